"""Streams weights into the one file that the stages of a bundle share.

The layout is fixed before a byte is read, so the parts of a quantized tensor are written beside each other
as its blocks arrive: peak memory is one chunk, whatever the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, Rows
from intaglio.exporters.layers.linear import QUANTIZED_PARTS
from intaglio.progress import Progress

ALIGNMENT = 4096
_CHUNK_BYTES = 16 << 20
_BFLOAT16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


@dataclass(frozen=True)
class Part:
    """One initializer in the weights file."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.numpy().itemsize


@dataclass(frozen=True)
class Written:
    """What WeightsInfo says of a written file."""

    sha256: str
    flushed_to_zero: int


def plan_weights(
    weights: Mapping[str, CheckpointTensor], dtype: ir.DataType, start: int = 0
) -> tuple[dict[str, tuple[Part, ...]], int]:
    """Places every tensor from the byte ``start`` on: its parts by tensor name, and where the last one ends.

    Dense ones become ``dtype``.
    """
    plan: dict[str, tuple[Part, ...]] = {}
    end = start
    for name, tensor in weights.items():
        parts = []
        for part_name, part_dtype, shape in _parts(name, tensor, dtype):
            part = Part(part_name, part_dtype, shape, -(-end // ALIGNMENT) * ALIGNMENT)
            parts.append(part)
            end = part.offset + part.nbytes
        plan[name] = tuple(parts)
    return plan, end


def _parts(name: str, tensor: CheckpointTensor, dtype: ir.DataType) -> list[tuple[str, ir.DataType, tuple[int, ...]]]:
    if tensor.layout is None:
        return [(name, dtype, tensor.shape)]
    scale_dtype = ir.DataType.from_numpy(tensor.layout.scale_dtype)
    groups = tensor.layout.format.groups_shape(tensor.shape)
    shapes = (
        (ir.DataType.UINT8, tensor.layout.format.codes_shape(tensor.shape)),
        (scale_dtype, groups),
        (scale_dtype, groups if tensor.layout.has_offsets else ()),
    )
    return [(f"{name}.{part}", *shape) for part, shape in zip(QUANTIZED_PARTS, shapes, strict=True)]


def write_weights(
    path: Path,
    weights: Mapping[str, CheckpointTensor],
    plan: Mapping[str, tuple[Part, ...]],
    size: int,
    progress: Progress,
) -> Written:
    """Writes the planned file.

    Raises WeightsError for a finite value that is infinite in the planned dtype.
    """
    total, flushed = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        # Reserved first, so that a full disk is known before the work, not after it.
        _reserve(file.fileno(), size)
        for name, tensor in weights.items():
            digests, count = _write(file.fileno(), tensor, plan[name], progress)
            flushed += count
            for part, digest in zip(plan[name], digests, strict=True):
                total.update(f"{part.name}\0{part.dtype.name}\0{list(part.shape)}\0{digest}\n".encode())
    return Written(total.hexdigest(), flushed)


def _reserve(fd: int, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.truncate(fd, size)


def _write(fd: int, tensor: CheckpointTensor, parts: tuple[Part, ...], progress: Progress) -> tuple[list[str], int]:
    flushed = 0
    hashes = [hashlib.sha256() for _ in parts]
    written = [0 for _ in parts]
    for start, rows in tensor.chunks(_CHUNK_BYTES):
        if isinstance(rows, np.ndarray):
            converted = _convert(rows, tensor, parts[0].dtype)
            if converted is not rows:
                flushed += int(np.count_nonzero(rows) - np.count_nonzero(converted))
            arrays: tuple[np.ndarray, ...] = (converted,)
        else:
            arrays = rows.codes, rows.scales, rows.offsets
        for i, (part, values) in enumerate(zip(parts, arrays, strict=True)):
            if part.shape == () and start:
                continue  # the scalar in place of offsets comes with every chunk
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            hashes[i].update(data)
            _write_at(fd, data, part.offset + written[i])
            written[i] += len(data)
        progress.advance(len(arrays[0]) * tensor.row_bytes)
    for part, count in zip(parts, written, strict=True):
        assert count == part.nbytes, f"{part.name}: wrote {count} bytes of {part.nbytes}"
    return [h.hexdigest() for h in hashes], flushed


def _convert(rows: np.ndarray, tensor: CheckpointTensor, dtype: ir.DataType) -> np.ndarray:
    if rows.dtype == dtype.numpy():
        return rows  # nothing to round, overflow or flush
    with np.errstate(over="ignore"):  # looked for below
        converted = rows.astype(dtype.numpy(), copy=False)
    if np.count_nonzero(np.isinf(converted)) == np.count_nonzero(np.isinf(rows)):
        return converted
    largest = max(_largest_finite(rows) for _, rows in tensor.chunks(_CHUNK_BYTES))
    name, limit = dtype.numpy().name, float(ml_dtypes.finfo(dtype.numpy()).max)
    advice = "bfloat16" if name == "float16" and largest < _BFLOAT16_MAX else "float32"
    raise WeightsError(
        f"{tensor.name}: its largest magnitude is {largest:g}, beyond {name}'s {limit:g}; export with --dtype {advice}"
    )


def _largest_finite(rows: Rows) -> float:
    assert isinstance(rows, np.ndarray), "only dense tensors are converted"
    return float(np.abs(rows, where=np.isfinite(rows), out=np.zeros_like(rows)).max(initial=0))


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        if hasattr(os, "pwrite"):
            n = os.pwrite(fd, data, offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            n = os.write(fd, data)
        data, offset = data[n:], offset + n
