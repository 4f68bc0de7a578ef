"""Writes GGUF files, version 3, little-endian, tensor by tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf_type42
from intaglio.exporters.checkpoints.gguf_blocks import DENSE_TYPES, TYPES, StoredTensor
from intaglio.exporters.checkpoints.gguf_header import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMENSIONS,
    SCALARS,
    STRING,
)
from intaglio.exporters.checkpoints.gguf_pack import PACKED_TYPES, quantize_rows, repack_rows
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, DenseTensor, FileBytes
from intaglio.output import replaced_file
from intaglio.progress import Progress, ProgressCallback

_VERSION = 3
_MAX_NAME_BYTES = 64  # the format's limit for tensor names
_CHUNK_BYTES = 4 << 20
_EXACT_IN_FLOAT32 = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write: ``source`` under ``name`` as ``storage``; as it is stored now where that is None."""

    name: str
    source: CheckpointTensor
    storage: str | None = None


@dataclass(frozen=True)
class _Planned:
    name: str
    source: CheckpointTensor
    storage: str
    type_id: int
    copied: bool
    nbytes: int
    offset: int


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[GgufTensor],
    progress: ProgressCallback | None = None,
) -> None:
    """Writes one GGUF file beside ``path`` and renames it when it is whole; peak memory is a few chunks or rows.

    A tensor that already is of its ``storage`` is copied byte for byte, whatever the type. Dense ones are
    converted or quantized from float32; quantized ones are repacked exactly, or refused naming row, group and
    reason. ``metadata`` holds str, bool, int, float, NumPy numbers, arrays and lists. A
    :class:`~intaglio.exporters.checkpoints.gguf.GgufMetadata` keeps its types; else an int becomes uint32, int32,
    int64 or uint64, the first that holds it, a float float32, and a NumPy value what it is.

    Raises CheckpointError on what the format cannot hold, before the file is there, and OutputError. The key
    ``intaglio.type_42`` is added where the ambiguous type id 42 is written.
    """
    path = Path(path)
    metadata, types = dict(metadata), dict(getattr(metadata, "types", {}))
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(f"{path}: split.count is {metadata['split.count']!r}; one whole file is written, drop it")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment % 8 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two of at least 8")
    planned = _plan(path, tensors, alignment)
    _note_type42(path, metadata, planned)
    header = b"".join(_header(path, metadata, types, planned))
    with replaced_file(path) as file:
        file.write(header)
        _pad(file, alignment)
        counter = Progress(progress, f"writing {path.name}", sum(p.nbytes for p in planned), "bytes")
        for tensor in planned:
            _write_tensor(path, file, tensor, counter)
            _pad(file, alignment)


def _plan(path: Path, tensors: Sequence[GgufTensor], alignment: int) -> list[_Planned]:
    planned: list[_Planned] = []
    names: set[str] = set()
    end = 0
    for tensor in tensors:
        what, source = f"{path}: {tensor.name}", tensor.source
        if tensor.name in names:
            raise CheckpointError(f"{what}: stands twice among the tensors to write")
        names.add(tensor.name)
        size = len(_utf8(path, tensor.name))
        if size > _MAX_NAME_BYTES:
            raise CheckpointError(f"{what}: the name has {size} bytes, expected at most {_MAX_NAME_BYTES}; rename it")
        if len(source.shape) > MAX_DIMENSIONS or 0 in source.shape:
            raise CheckpointError(
                f"{what}: has the shape {list(source.shape)}, expected at most {MAX_DIMENSIONS} sizes of at least 1"
            )
        storage = tensor.storage or source.storage
        copied = storage == source.storage and isinstance(source, StoredTensor | DenseTensor)
        type_id, values, size = _type(what, source, storage)
        if not copied:
            _check_convertible(what, source, storage)
        if values > 1 and (not source.shape or source.shape[-1] % values):
            raise CheckpointError(
                f"{what}: cannot be written as {storage}: the rows of shape {list(source.shape)} are no multiple "
                f"of {values}"
            )
        count = 1
        for n in source.shape:
            count *= n
        offset = -(-end // alignment) * alignment
        planned.append(_Planned(tensor.name, source, storage, type_id, copied, count // values * size, offset))
        end = offset + planned[-1].nbytes
    return planned


def _type(what: str, source: CheckpointTensor, storage: str) -> tuple[int, int, int]:
    if isinstance(source, StoredTensor) and storage == source.storage:
        return source.type_id, source.block_values, source.block_bytes
    if storage in gguf_type42.LAYOUTS:
        return gguf_type42.TYPE_ID, *gguf_type42.LAYOUTS[storage][:2]
    for type_id, (name, values, size) in TYPES.items():
        if name == storage:
            return type_id, values, size
    raise CheckpointError(f"{what}: {storage!r} is no type of GGUF that can be written")


def _check_convertible(what: str, source: CheckpointTensor, storage: str) -> None:
    if source.layout is not None:
        if storage not in PACKED_TYPES:
            raise CheckpointError(
                f"{what}: is {source.storage} and cannot be made {storage} exactly; written from quantized tensors "
                f"are {', '.join(PACKED_TYPES)}, and its own type where it is a tensor of a GGUF file"
            )
    elif source.dtype is None:
        raise CheckpointError(f"{what}: is {source.storage}, which is not read, so it can only be copied as it is")
    elif storage not in DENSE_TYPES and storage not in PACKED_TYPES:
        writable = ", ".join([*DENSE_TYPES, *PACKED_TYPES])
        raise CheckpointError(f"{what}: cannot be made {storage} from {source.storage}; written are {writable}")
    elif source.dtype not in _EXACT_IN_FLOAT32:
        raise CheckpointError(f"{what}: is {source.storage}, which float32 does not hold; convert it first")


def _note_type42(path: Path, metadata: dict[str, Any], planned: Sequence[_Planned]) -> None:
    found = sorted({tensor.storage for tensor in planned if tensor.type_id == gguf_type42.TYPE_ID})
    key = gguf_type42.HINT_KEY
    if len(found) > 1:
        raise CheckpointError(f"{path}: {' and '.join(found)} share the type id 42; a file can hold one of them")
    if found and metadata.setdefault(key, found[0]) != found[0]:
        raise CheckpointError(f"{path}: {key} is {metadata[key]!r}, but the tensors of the id are {found[0]}")
    if not found:
        metadata.pop(key, None)


def _write_tensor(path: Path, file: BinaryIO, tensor: _Planned, counter: Progress) -> None:
    written = 0
    for chunk in _copied(tensor) if tensor.copied else _converted(path, tensor):
        file.write(chunk)
        written += len(chunk)
        counter.advance(len(chunk))
    if written != tensor.nbytes:
        raise CheckpointError(f"{path}: {tensor.name}: gave {written} bytes of {tensor.storage}, not {tensor.nbytes}")


def _copied(tensor: _Planned) -> Iterator[bytearray]:
    source = tensor.source
    assert isinstance(source, StoredTensor | DenseTensor)
    data: FileBytes = source.file
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield data.read(source.offset + start, min(_CHUNK_BYTES, tensor.nbytes - start))


def _converted(path: Path, tensor: _Planned) -> Iterator[memoryview]:
    what, storage = f"{path}: {tensor.name}", tensor.storage
    for start, rows in tensor.source.chunks(_CHUNK_BYTES):
        if isinstance(rows, np.ndarray):
            wide = rows.astype(np.float32).reshape(-1, rows.shape[-1] if rows.ndim else 1)
            # Rows of a tensor of three axes are many rows of blocks.
            first = start * (len(wide) // max(1, len(rows)))
            data = _dense(storage, wide, what) if storage in DENSE_TYPES else quantize_rows(storage, wide, what, first)
        else:
            assert tensor.source.layout is not None
            data = repack_rows(storage, rows, tensor.source.layout, what, start)
        yield memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def _dense(storage: str, rows: np.ndarray, what: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        data = rows.astype(DENSE_TYPES[storage])
        lost = np.isfinite(rows) & ~np.isfinite(data.astype(np.float32))
    if lost.any():
        raise CheckpointError(f"{what}: holds {rows[lost][0]}, which overflows {storage}; write it as F32 or BF16")
    return data


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _header(
    path: Path, metadata: Mapping[str, Any], types: Mapping[str, tuple[int, ...]], planned: Sequence[_Planned]
) -> Iterator[bytes]:
    yield MAGIC + struct.pack("<IQQ", _VERSION, len(planned), len(metadata))
    for key, value in metadata.items():
        yield _string(path, key)
        yield from _value(path, key, value, types.get(key) or _type_of(path, key, value))
    for tensor in planned:
        shape = tensor.source.shape
        yield _string(path, tensor.name)
        yield struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), tensor.type_id, tensor.offset)


def _utf8(path: Path, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: {text[:40]!r} cannot be written as UTF-8 ({error.reason})") from error


def _string(path: Path, text: str) -> bytes:
    raw = _utf8(path, text)
    return struct.pack("<Q", len(raw)) + raw


def _type_of(path: Path, key: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return (STRING,)
    if isinstance(value, bool):
        return (BOOL,)
    if isinstance(value, int):
        for kind in (4, 5, 11, 10):
            limits = np.iinfo(SCALARS[kind])
            if limits.min <= value <= limits.max:
                return (kind,)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return (6,)
    if isinstance(value, np.ndarray | np.generic):
        for kind, dtype in SCALARS.items():
            if value.dtype == np.dtype(dtype):
                return (ARRAY, kind) if value.ndim == 1 else (kind,)
    if isinstance(value, list | tuple):
        kinds = {_type_of(path, key, element) for element in value} or {(STRING,)}
        if len({kind[0] for kind in kinds}) == 1:
            return (ARRAY, next(iter(kinds))[0])
        numbers = {kind[0] for kind in kinds}
        if numbers <= {4, 5, 10, 11}:
            return (ARRAY, 5 if numbers == {4, 5} and max(value) < 1 << 31 else 10 if min(value) >= 0 else 11)
    raise CheckpointError(f"{path}: the metadata key {key} holds {value!r:.80}, which GGUF has no type for")


def _value(path: Path, key: str, value: Any, kind: tuple[int, ...]) -> Iterator[bytes]:
    yield struct.pack("<I", kind[0])
    try:
        if kind[0] == ARRAY:
            yield from _array(path, key, value, kind[1])
        elif kind[0] == STRING:
            yield _string(path, _checked(value, str))
        else:
            yield _number(value, kind[0]).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: the metadata key {key} holds {value!r:.80}, which is not of its GGUF type {kind} ({error})"
        ) from error


def _array(path: Path, key: str, values: Any, element: int) -> Iterator[bytes]:
    yield struct.pack("<IQ", element, len(values))
    if element == STRING:
        yield b"".join(_string(path, _checked(text, str)) for text in values)
    elif element == ARRAY:
        for inner in values:
            yield from _array(path, key, inner, _type_of(path, key, inner)[1])
    elif isinstance(values, np.ndarray) and values.dtype == np.dtype(SCALARS[element]):
        yield values.tobytes()
    else:
        yield b"".join(_number(number, element).tobytes() for number in values)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"found {type(value).__name__}, expected {kind.__name__}")
    return value


def _number(value: Any, kind: int) -> np.ndarray:
    dtype = np.dtype(SCALARS[kind])
    if isinstance(value, bool | np.bool_) != (kind == BOOL):
        raise TypeError(f"found {type(value).__name__}, expected {dtype.name}")
    if dtype.kind in "iu" and not isinstance(value, int | np.integer):
        raise TypeError(f"found {type(value).__name__}, expected {dtype.name}")
    with np.errstate(over="ignore"):
        number = np.array(value, dtype)
    if dtype.kind == "f" and np.isinf(number) and not np.isinf(value):
        raise OverflowError(f"{value!r} is above {dtype.name}")
    return number
