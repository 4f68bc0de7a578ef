"""Ternary matrices however they are stored: each group of inputs holds minus one scale, zero, and that scale.

Grouped-quantized they are 2 bits with the codes 0, 1 and 2 around the zero point 1, and no offsets. Dense files of
models trained that way hold the values themselves; MLX's 2-bit files hold biases that are minus the scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.errors import CheckpointError, InputError
from intaglio.exporters.checkpoints.mlx import MlxTensor
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, pack_codes

GROUP_SIZE = 128
_BFLOAT16, _FLOAT16, _FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
# The types of scales that a matrix of each type may get, the narrowest first.
_SCALE_DTYPES = {
    _BFLOAT16: (_BFLOAT16,),
    _FLOAT16: (_FLOAT16,),
    _FLOAT32: (_BFLOAT16, _FLOAT16, _FLOAT32),
}
_CHUNK_BYTES = 4 << 20
# The first number of a name is its block's; the weight of a module that is itself numbered is in none.
_IN_BLOCK = re.compile(r"\.\d+\..+\.weight$")


@dataclass(frozen=True)
class TernaryTensor(CheckpointTensor):
    """A dense matrix read as ternary rows. Raises CheckpointError naming row, group and values where it is not."""

    source: CheckpointTensor
    quantized: QuantizedLayout

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.quantized)

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        values = self.source.read_rows(start, stop)
        assert isinstance(values, np.ndarray)
        codes, scales = _ternary(self.source, values, self.quantized.format.group_size, start)
        return _rows(codes, _held(self.source, scales, self.quantized.scale_dtype, start))


@dataclass(frozen=True)
class TernaryMlxTensor(CheckpointTensor):
    """A 2-bit MLX matrix with the zero point 1 in place of its biases, which must be minus the scales.

    ``scale * code - scale`` is ``scale * (code - 1)``: exact for every code, for a 3 too, which types that are
    ternary refuse. Any other bias raises CheckpointError, naming row and group, when it is read.
    """

    source: CheckpointTensor

    def __post_init__(self) -> None:
        layout = self.source.layout
        assert layout is not None
        ternary = GroupedQuantFormat(2, layout.format.group_size, 1)
        object.__setattr__(self, "layout", QuantizedLayout(ternary, layout.scale_dtype, has_offsets=False))

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        rows = self.source.read_rows(start, stop)
        assert isinstance(rows, GroupedQuantRows)
        _refuse(
            self.source,
            _other_than_minus(rows.scales, rows.offsets),
            start,
            lambda at: f"has the scale {rows.scales[at]} and the bias {rows.offsets[at]}, expected minus the scale",
        )
        return GroupedQuantRows(rows.codes, rows.scales, np.zeros((), rows.scales.dtype))


def without_offsets(tensor: CheckpointTensor) -> CheckpointTensor:
    """``tensor`` as a :class:`TernaryMlxTensor` where it is rows of one that can be; else as it is.

    Reads scales and biases of 2-bit MLX matrices.
    """
    stored = tensor
    while not isinstance(stored, MlxTensor):
        source = getattr(stored, "source", None)
        if not isinstance(source, CheckpointTensor):
            return tensor
        stored = source
    if stored.bits != 2:
        return tensor
    step = max(1, _CHUNK_BYTES // max(1, stored.scales.row_bytes))
    for start in range(0, stored.row_count, step):
        stop = min(start + step, stored.row_count)
        if _other_than_minus(stored.scales.read_rows(start, stop), stored.biases.read_rows(start, stop)).any():
            return tensor
    return TernaryMlxTensor(tensor.name, tensor.shape, tensor.storage, tensor)


def _other_than_minus(scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """Which groups have a bias that is not minus a finite scale. A zero may have either sign."""
    scales, biases = scales.astype(np.float32), biases.astype(np.float32)
    return ~(biases == -scales) | ~np.isfinite(scales)


@dataclass(frozen=True)
class RescaledTensor(CheckpointTensor):
    """A quantized matrix with its scales in another type, exactly, or CheckpointError naming row and group."""

    source: CheckpointTensor
    scale_dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        layout = self.source.layout
        assert layout is not None
        assert not layout.has_offsets, f"{self.name}: only scales are converted"
        object.__setattr__(self, "layout", QuantizedLayout(layout.format, self.scale_dtype, has_offsets=False))

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        rows = self.source.read_rows(start, stop)
        assert isinstance(rows, GroupedQuantRows)
        return _rows(rows.codes, _held(self.source, rows.scales, self.scale_dtype, start))


def pack_blocks(tensors: Mapping[str, CheckpointTensor], source: str) -> dict[str, CheckpointTensor]:
    """``tensors`` with every dense matrix of a numbered block packed; all of them, or an error.

    Such a matrix is the two-axis weight of a module in a block (``layers.3.mlp.up_proj.weight``). Everything outside
    the blocks stays as it is, even where its values happen to be ternary. Raises CheckpointError where one is not
    ternary, InputError where there is none, naming ``source``.
    """
    packed = {
        name: pack_ternary(tensor)
        for name, tensor in tensors.items()
        if _IN_BLOCK.search(name) and tensor.dtype is not None and len(tensor.shape) == 2
    }
    if not packed:
        raise InputError(f"--pack-ternary: {source} has no dense matrices in its blocks; leave the option out")
    return {**tensors, **packed}


def pack_ternary(tensor: CheckpointTensor, group_size: int = GROUP_SIZE) -> CheckpointTensor:
    """A dense matrix ``[out, in]`` as ternary rows that are packed as they are read: 2-bit codes, one scale a group.

    Packed are float32, float16 and bfloat16 matrices whose width ``group_size`` divides. The scales of 16-bit ones
    keep their type; those of float32 become bfloat16 or float16 if that holds all of them, which the matrix is read
    once to find. A group of zeros has the scale 0 and the codes 1. Raises CheckpointError naming row, group and values
    where it is not ternary.
    """
    return TernaryTensor(tensor.name, tensor.shape, "ternary", tensor, _layout(tensor, group_size))


def _layout(tensor: CheckpointTensor, group_size: int) -> QuantizedLayout:
    if tensor.dtype not in _SCALE_DTYPES or len(tensor.shape) != 2:
        raise CheckpointError(
            f"{_where(tensor)}: is {tensor.storage} {list(tensor.shape)}; packed are matrices of F32, F16 or BF16"
        )
    if not tensor.shape[1] or tensor.shape[1] % group_size:
        raise CheckpointError(f"{_where(tensor)}: rows of {tensor.shape[1]} values are no multiple of {group_size}")
    fitting = list(_SCALE_DTYPES[tensor.dtype])
    for first, values in tensor.chunks(_CHUNK_BYTES):
        assert isinstance(values, np.ndarray)
        _, scales = _ternary(tensor, values, group_size, first)
        fitting = [dtype for dtype in fitting if not _lost(scales, dtype).any()]
    return QuantizedLayout(GroupedQuantFormat(2, group_size, 1), fitting[0], has_offsets=False)


def _ternary(
    tensor: CheckpointTensor, values: np.ndarray, group_size: int, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales of dense rows ``[rows, in]``. The bits are compared, which takes no rounding."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    bits = np.ascontiguousarray(values).view(unsigned).reshape(len(values), -1, group_size)
    sign = unsigned.type(1 << (8 * unsigned.itemsize - 1))
    magnitude = bits & ~sign
    largest = magnitude.max(axis=-1)
    nonzero = magnitude != 0
    odd = (nonzero & (magnitude != largest[..., None])).any(axis=-1)
    infinity = np.array(np.inf, values.dtype).view(unsigned)
    _refuse(tensor, odd | (largest >= infinity), first_row, lambda at: _found(values, at, group_size))
    negative = nonzero & (bits >= sign)
    codes = np.uint8(1) + nonzero.view(np.uint8) - (negative.view(np.uint8) << np.uint8(1))
    return pack_codes(codes.reshape(len(values), -1), 2), largest.view(values.dtype)


def _found(values: np.ndarray, at: tuple[int, ...], group_size: int) -> str:
    group = values[at[0]].reshape(-1, group_size)[at[1]]
    distinct = [str(value) for value in np.unique(group.astype(np.float32))]
    text = ", ".join(distinct if len(distinct) <= 4 else [*distinct[:2], "…", *distinct[-2:]])
    return f"holds {text}; expected minus one scale, zero, and that scale"


def _lost(scales: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return scales.astype(dtype).astype(np.float64) != scales.astype(np.float64)


def _held(tensor: CheckpointTensor, scales: np.ndarray, dtype: np.dtype[Any], first_row: int) -> np.ndarray:
    if scales.dtype != dtype:
        _refuse(
            tensor,
            _lost(scales, dtype) | ~np.isfinite(scales.astype(np.float64)),
            first_row,
            lambda at: f"has the scale {float(scales[at])!r}, which {dtype.name} does not hold exactly",
        )
    return scales.astype(dtype)


def _refuse(tensor: CheckpointTensor, bad: np.ndarray, first_row: int, why: Callable[[tuple[int, ...]], str]) -> None:
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(f"{_where(tensor)}: row {first_row + at[0]}, group {at[1]} {why(at)}")


def _where(tensor: CheckpointTensor) -> str:
    stored = tensor
    while isinstance(source := getattr(stored, "source", None), CheckpointTensor):
        stored = source
    file = stored.weight.file if isinstance(stored, MlxTensor) else getattr(stored, "file", None)
    return tensor.name if file is None else f"{file.path}: {tensor.name}"


def _rows(codes: np.ndarray, scales: np.ndarray) -> GroupedQuantRows:
    return GroupedQuantRows(codes, scales, np.zeros((), scales.dtype))
