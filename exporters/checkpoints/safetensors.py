"""Safetensors files: one, or several named by an index, alone or in a Hugging Face directory.

The container is read here rather than through the safetensors package, which maps the whole file.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import mlx
from intaglio.exporters.checkpoints.json_file import no_duplicates, read_json
from intaglio.exporters.checkpoints.tensors import (
    Checkpoint,
    CheckpointTensor,
    DenseTensor,
    FileBytes,
    UnreadableTensor,
)

# The published limit of the format; a larger length is not a header.
_MAX_HEADER = 100_000_000
# JSON takes up to so many bytes in memory for each of its own (a list in a list: 88 for two). A real header is
# far below the part of its file that this allows.
_PARSED = 48
_MEMORY_FLOOR = 64 << 20
# What NumPy holds.
_MAX_DIMENSIONS = 32
_MAX_VALUES = (1 << 59) - 1

# Every type of the format but those that share bytes between values (F4, F6_E2M3, F6_E3M2), which are listed only.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype("<c8"),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype("?"),
}


def open_file(path: Path) -> Checkpoint:
    """One safetensors file. A ``config.json`` beside it is taken as its configuration."""
    config = read_json(path.parent / "config.json") if (path.parent / "config.json").is_file() else {}
    return _checkpoint(path, [path], [_read_file(path)], config)


def _checkpoint(path: Path, files: list[Path], parts: list[_File], config: dict[str, Any]) -> Checkpoint:
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    tensors, notes = mlx.join_triplets(path, tensors, config)
    metadata: dict[str, Any] = {}
    for file, part in zip(files, parts, strict=True):
        for key, value in part.metadata.items():
            if metadata.setdefault(key, value) != value:
                notes.append(f"{file.name}: its metadata {key} is {value!r:.80}, unlike that of another shard")
    return Checkpoint(path, "safetensors", tensors, tuple(files), config, metadata, tuple(notes))


def open_directory(path: Path, index: Path | None = None) -> Checkpoint:
    """A folder with ``config.json`` and ``*.safetensors``, sharded or not.

    Raises CheckpointError if a shard is missing, lies outside the folder, or does not hold what the index
    says; if two files hold the same tensor; or if there are several files and no index.
    """
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if index is None:
        found = sorted(path.glob("*.safetensors.index.json"))
        if len(found) > 1:
            names = ", ".join(p.name for p in found)
            raise CheckpointError(f"{path}: holds {len(found)} indexes ({names}); name the one to open")
        index = found[0] if found else None
    if index is None:
        files = sorted(path.glob("*.safetensors"))
        if len(files) > 1:
            names = ", ".join(p.name for p in files)
            raise CheckpointError(
                f"{path}: holds {len(files)} safetensors files ({names}) and no *.safetensors.index.json that "
                "says which belong together; name the one to open, or fetch the index"
            )
        return _checkpoint(path, files, [_read_file(files[0])], config)
    shards = _read_shards(path, index)
    return _checkpoint(path, list(shards), list(shards.values()), config)


def _read_shards(folder: Path, index: Path) -> dict[Path, _File]:
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: has no `weight_map` from tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"{index}: names the shard {name!r}; a shard must be a file beside its index")
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(names)} shards are missing in {folder}: {', '.join(missing)}. "
            "Fetch them and try again."
        )
    shards = {folder / name: _read_file(folder / name) for name in names}
    held: set[str] = set()
    for name in names:
        for key in shards[folder / name].tensors:
            if weight_map.get(key) != name:
                raise CheckpointError(
                    f"{folder / name}: holds {key!r}, which the index places in {weight_map.get(key)!r}"
                )
            held.add(key)
    absent = sorted(set(weight_map) - held)
    if absent:
        raise CheckpointError(
            f"{index}: {len(absent)} tensors are not in the shards it names: {', '.join(absent[:20])}"
        )
    return shards


@dataclass(frozen=True)
class _File:
    """The tensors of one file, and its ``__metadata__``."""

    tensors: dict[str, CheckpointTensor]
    metadata: dict[str, str]


def _read_file(path: Path) -> _File:
    file = FileBytes(path)
    if file.size < 8:
        raise CheckpointError(f"{path}: has {file.size} bytes; a safetensors file has at least 8")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(file.size - 8, _MAX_HEADER):
        raise CheckpointError(
            f"{path}: says its header has {length} bytes, but the file has {file.size} "
            f"(and a header at most {_MAX_HEADER}); it is cut short or not safetensors"
        )
    if length * _PARSED > 2 * file.size + _MEMORY_FLOOR:
        raise CheckpointError(
            f"{path}: says its header has {length} bytes of the file's {file.size}, and would take more memory than "
            "twice the file and 64 MiB; no model's does, so it is damaged"
        )
    try:
        header = json.loads(file.read(8, length), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not the JSON of a safetensors file ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {reprlib.repr(metadata)}, expected an object of strings")
    start, tensors, spans = 8 + length, {}, []
    for name, entry in header.items():
        tensors[name], span = _tensor(path, file, start, name, entry)
        spans.append((*span, name))
    _check_spans(path, sorted(spans), file.size - start)
    return _File(tensors, metadata)


def _tensor(path: Path, file: FileBytes, start: int, name: str, entry: Any) -> tuple[CheckpointTensor, tuple[int, int]]:
    try:
        storage, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {name}: expected dtype, shape and data_offsets, found {reprlib.repr(entry)}"
        ) from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise CheckpointError(
            f"{path}: {name}: shape {reprlib.repr(shape)} and data_offsets {reprlib.repr([begin, end])} "
            "must be integers >= 0"
        )
    if not isinstance(storage, str):
        raise CheckpointError(f"{path}: {name}: dtype is {reprlib.repr(storage)}, expected a name such as 'BF16'")
    if begin > end or start + end > file.size:
        raise CheckpointError(
            f"{path}: {name}: lies at bytes {start + begin} to {start + end}, but the file has {file.size}; "
            "it is cut short or its header lies. Fetch it again."
        )
    values = 1
    for n in shape:
        values *= max(n, 1)
    if len(shape) > _MAX_DIMENSIONS or values > _MAX_VALUES:
        raise CheckpointError(
            f"{path}: {name}: has the shape {reprlib.repr(shape)}, expected at most {_MAX_DIMENSIONS} sizes and "
            "2^59 values"
        )
    dtype = DTYPES.get(storage)
    if dtype is None:
        why = f"{path}: {name}: is stored as {storage!r}; read are {', '.join(DTYPES)}"
        return UnreadableTensor(name, tuple(shape), storage, why), (begin, end)
    expected = dtype.itemsize
    for n in shape:
        expected *= n
    if expected != end - begin:
        raise CheckpointError(
            f"{path}: {name}: {storage} of shape {shape} takes {expected} bytes, but data_offsets give {end - begin}"
        )
    return DenseTensor(name, tuple(shape), storage, file, start + begin, dtype), (begin, end)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    position, previous = 0, "the header"
    for begin, end, name in spans:
        if begin < position:
            raise CheckpointError(f"{path}: {name} overlaps {previous} at byte {begin} of the data")
        position, previous = max(position, end), name
    if position > size:
        raise CheckpointError(f"{path}: the data has {size} bytes, the tensors end at {position}")
