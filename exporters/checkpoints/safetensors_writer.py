"""Writes safetensors files, one or several with an index, tensor by tensor.

Format: https://github.com/huggingface/safetensors#format; names of shards and index are Hugging Face's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.mlx import BITS, GROUP_SIZES, MlxTensor
from intaglio.exporters.checkpoints.safetensors import DTYPES
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, DenseTensor
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize
from intaglio.output import replaced_file
from intaglio.progress import Progress, ProgressCallback

# Where huggingface_hub begins another shard.
SHARD_BYTES = 5_000_000_000
_CHUNK_BYTES = 4 << 20
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: ``dtype`` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = DTYPES[self.dtype].itemsize
        for n in self.shape:
            count *= n
        return count


@dataclass(frozen=True)
class _Group:
    """Entries that come from one source, and the function that yields a piece of each until all are whole."""

    entries: tuple[Entry, ...]
    pieces: Callable[[], Iterator[tuple[np.ndarray | bytearray, ...]]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def write_file(
    path: str | Path,
    tensors: Mapping[str, CheckpointTensor],
    metadata: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes one safetensors file beside ``path`` and renames it when it is whole.

    Dense tensors are written as they are, tensors of grouped-quantized rows as MLX's three (see
    :func:`mlx_parts`). Peak memory is a few chunks. Raises CheckpointError on what cannot be written.
    """
    groups = [_group(str(path), name, tensor) for name, tensor in tensors.items()]
    path = Path(path)
    counter = Progress(progress, f"writing {path.name}", sum(group.nbytes for group in groups), "bytes")
    _write(path, groups, metadata or {}, counter)


def write_shards(
    folder: str | Path,
    tensors: Mapping[str, CheckpointTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> list[Path]:
    """Writes ``STEM.safetensors`` into ``folder``; above ``shard_bytes`` several files and their index.

    Returns the weight files. A tensor is never cut, and the three of a quantized one stay together. The index
    comes last, so that without it nothing looks whole. Otherwise as :func:`write_file`.
    """
    folder = Path(folder)
    groups = [_group(str(folder), name, tensor) for name, tensor in tensors.items()]
    shards: list[list[_Group]] = [[]]
    filled = 0
    for group in groups:
        if shards[-1] and filled + group.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += group.nbytes
    total = sum(group.nbytes for group in groups)
    counter = Progress(progress, f"writing {folder.name}", total, "bytes")
    if len(shards) == 1:
        _write(folder / f"{stem}.safetensors", groups, metadata or {}, counter)
        return [folder / f"{stem}.safetensors"]
    files = [folder / f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        _write(file, shard, metadata or {}, counter)
        weight_map |= {entry.name: file.name for group in shard for entry in group.entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    content = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    with replaced_file(folder / f"{stem}.safetensors.index.json") as index_file:
        index_file.write(content.encode())
    return files


def mlx_parts(what: str, name: str, tensor: CheckpointTensor) -> tuple[Entry, Entry, Entry]:
    """The three tensors of MLX that hold a quantized one. Raises CheckpointError where none can."""
    layout = tensor.layout
    assert layout is not None, f"{name}: a quantized tensor"
    bits = tensor.bits if isinstance(tensor, MlxTensor) else layout.format.bits
    group_size = _mlx_group_size(layout.format.group_size)
    module = name.removesuffix(".weight")
    if module == name:
        raise CheckpointError(f"{what}: {name}: is quantized, and MLX quantizes only tensors named *.weight")
    if bits not in BITS or group_size not in GROUP_SIZES or tensor.shape[1] % group_size:
        raise CheckpointError(
            f"{what}: {name}: {tensor.storage} has groups of {layout.format.group_size}, and MLX has only groups of "
            f"{', '.join(map(str, GROUP_SIZES))}; it cannot be held exactly. Ask for --type F32, F16 or BF16"
        )
    dtype = next(key for key, value in DTYPES.items() if value == layout.scale_dtype)
    rows, columns = tensor.shape
    groups = (rows, columns // group_size)
    return (
        Entry(name, "U32", (rows, columns * bits // 32)),
        Entry(f"{module}.scales", dtype, groups),
        Entry(f"{module}.biases", dtype, groups),
    )


def mlx_setting(tensor: CheckpointTensor) -> dict[str, int]:
    """Bits and group size under which a quantized tensor is written, as ``config.json`` names them."""
    assert tensor.layout is not None
    bits = tensor.bits if isinstance(tensor, MlxTensor) else tensor.layout.format.bits
    return {"group_size": _mlx_group_size(tensor.layout.format.group_size), "bits": bits}


def mlx_rows(what: str, tensor: CheckpointTensor, first: int, rows: GroupedQuantRows) -> tuple[np.ndarray, ...]:
    """Codes as uint8, scales and biases, the zero point moved into the bias.

    Raises CheckpointError naming row and group where the dtype of the scales does not hold the bias.
    """
    assert tensor.layout is not None
    quantization, scales = tensor.layout.format, rows.scales
    wide = scales.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        # No format has both a zero point and offsets; their sum might be rounded, so it is refused below.
        biases = rows.offsets.astype(np.float64) if rows.has_offsets else -quantization.zero_point * wide
        held = biases.astype(tensor.layout.scale_dtype)
        # Beyond the range a bias would be infinite, between two numbers of the type it would be rounded.
        bad = ~np.isfinite(wide) | (held.astype(np.float64) != biases)
    if rows.has_offsets and quantization.zero_point:
        bad |= np.ones_like(bad)
    if quantization.zero_point and tensor.layout.scale_dtype == np.float32:
        # Scale times code is rounded there, before the bias is taken away again.
        bad |= _differs(rows, quantization, held)
    if bad.any():
        row, group = (int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(
            f"{what}: row {first + row}, group {group} of {tensor.storage} has the scale {float(wide[row, group])!r} "
            f"and would need the bias {float(biases[row, group])!r}, which {tensor.layout.scale_dtype.name} does not "
            "hold exactly, or which does not give the same values; it is not written. Ask for --type F32"
        )
    repeats = quantization.group_size // _mlx_group_size(quantization.group_size)
    return rows.codes, np.repeat(scales, repeats, axis=1), np.repeat(held, repeats, axis=1)


def _differs(rows: GroupedQuantRows, quantization: GroupedQuantFormat, biases: np.ndarray) -> np.ndarray:
    affine = GroupedQuantFormat(quantization.bits, quantization.group_size, 0)
    here, there = dequantize(rows, quantization), dequantize(GroupedQuantRows(rows.codes, rows.scales, biases), affine)
    return (here != there).reshape(*biases.shape, quantization.group_size).any(axis=-1)


def _mlx_group_size(group_size: int) -> int:
    # A larger group is several of the largest that MLX has, with the same scale.
    largest = max(GROUP_SIZES)
    return largest if group_size % largest == 0 else group_size


def _group(what: str, name: str, tensor: CheckpointTensor) -> _Group:
    if isinstance(tensor, MlxTensor):
        parts = (tensor.weight, tensor.scales, tensor.biases)
        entries = mlx_parts(what, name, tensor)
        return _Group(entries, lambda: _copies(parts))
    if tensor.layout is not None:
        entries = mlx_parts(what, name, tensor)
        return _Group(entries, lambda: _triplets(f"{what}: {name}", tensor))
    if tensor.dtype is None:
        raise CheckpointError(f"{what}: {name}: is {tensor.storage}, which is not read and cannot be written")
    dtype = next((key for key, value in DTYPES.items() if value == tensor.dtype), None)
    if dtype is None:
        raise CheckpointError(f"{what}: {name}: is {tensor.dtype}, which safetensors does not have")
    entry = Entry(name, dtype, tensor.shape)
    return _Group((entry,), lambda: _dense(tensor))


def _copies(parts: Sequence[DenseTensor]) -> Iterator[tuple[bytearray, ...]]:
    for at in range(len(parts)):
        for piece in _bytes_of(parts[at]):
            yield tuple(piece if i == at else bytearray() for i in range(len(parts)))


def _bytes_of(tensor: DenseTensor) -> Iterator[bytearray]:
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield tensor.file.read(tensor.offset + start, min(_CHUNK_BYTES, tensor.nbytes - start))


def _triplets(what: str, tensor: CheckpointTensor) -> Iterator[tuple[np.ndarray, ...]]:
    for first, rows in tensor.chunks(_CHUNK_BYTES):
        assert isinstance(rows, GroupedQuantRows)
        yield mlx_rows(what, tensor, first, rows)


def _dense(tensor: CheckpointTensor) -> Iterator[tuple[np.ndarray | bytearray, ...]]:
    if isinstance(tensor, DenseTensor):
        for piece in _bytes_of(tensor):
            yield (piece,)
        return
    for _, rows in tensor.chunks(_CHUNK_BYTES):
        assert isinstance(rows, np.ndarray)
        yield (rows,)


def _write(path: Path, groups: Sequence[_Group], metadata: Mapping[str, str], counter: Progress) -> None:
    entries = [entry for group in groups for entry in group.entries]
    names = [entry.name for entry in entries]
    if twice := {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set():
        raise CheckpointError(f"{path}: {min(twice)} stands twice among the tensors to write")
    if wrong := [key for key, value in metadata.items() if not isinstance(value, str)]:
        raise CheckpointError(f"{path}: the metadata key {wrong[0]} is {metadata[wrong[0]]!r:.80}, expected text")
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    if "__metadata__" in names:
        raise CheckpointError(f"{path}: a tensor may not be called __metadata__; rename it")
    offsets, end = {}, 0
    # Wide types first, so that each tensor starts on a multiple of its own size.
    for entry in sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize):
        offsets[entry.name] = end
        header[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes]
        }  # fmt: skip
        end += entry.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _MAX_HEADER:
        raise CheckpointError(f"{path}: the header has {len(raw)} bytes, at most {_MAX_HEADER} are allowed")

    with replaced_file(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for group in groups:
            _fill(path, file, group, offsets, 8 + len(raw), counter)


def _fill(path: Path, file: BinaryIO, group: _Group, offsets: Mapping[str, int], start: int, counter: Progress) -> None:
    written = [0 for _ in group.entries]
    for pieces in group.pieces():
        for i, (entry, piece) in enumerate(zip(group.entries, pieces, strict=True)):
            if isinstance(piece, np.ndarray):
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            else:
                data = memoryview(piece)
            if len(data):
                file.seek(start + offsets[entry.name] + written[i])
                file.write(data)
            written[i] += len(data)
            counter.advance(len(data))
    for entry, count in zip(group.entries, written, strict=True):
        if count != entry.nbytes:
            raise CheckpointError(f"{path}: {entry.name}: gave {count} bytes of {entry.dtype}, not {entry.nbytes}")
