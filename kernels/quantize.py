"""The one quantizer: how training, and whoever makes packed weights from dense ones, rounds to the format.

A matrix ``[out, in]`` is rounded group by group along its inputs to whole steps, and

    weight = step * scale (+ offset)

so that a step is ``code - zero_point`` of :mod:`intaglio.kernels.grouped_quant`. All of it is float32 arithmetic in an
order that is fixed, of operations that IEEE 754 rounds in one way only, so that the result is the same to the bit
whoever computes it: NumPy or torch, on one thread or many, on a CPU or a GPU.

Scales and offsets are bfloat16 numbers within float16's normal range: both types hold them exactly, and so do MLX's
files (bfloat16) and GGUF's (float16). Steps are computed with the scale that is stored, not with the one before it was
rounded. The formats:

- ``ternary``: the scale is the mean magnitude of the group (https://arxiv.org/abs/2402.17764); ``round(w / scale)``
  within -1 to 1. Halves of the group are added until one number is left, so its size is a power of two.
- ``int8``: one group a row; the scale is the largest magnitude divided by 127; ``round(w / scale)`` within -127 to 127.
- ``affine4``: MLX's affine mode in 4 bits (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html):
  ``round((w - offset) / scale)`` within 0 to 15, where the offset is the end of the group's range that is further from
  zero, and the scale is made such that zero was a step before the two were rounded.

Rounding is to the nearest, halves to the even number. Of a group of zeros, or of weights far below the smallest scale
(2^-14), every step is the one nearest to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, pack_codes

# The normal range of float16; above, the largest bfloat16 that is below its end.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-14, 65280.0
# 128 times an int8 scale is the bias in MLX's files.
_LARGEST_INT8_SCALE = 510.0
FORMATS = ("ternary", "affine4", "int8")
GROUP_SIZES = (32, 64, 128)
SCALE_DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Quantization:
    """A format of ``FORMATS`` with its group size; None is a whole row, and ``int8`` has no other.

    Raises ValueError on what there is not.
    """

    format: str
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"the format {self.format!r} is unknown; there are {', '.join(FORMATS)}")
        if self.format == "int8" and self.group_size is not None:
            raise ValueError(f"group_size is {self.group_size}, but int8 has one group a row; leave it out")
        if self.format != "int8" and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"group_size is {self.group_size!r}, expected one of {sizes} for {self.format}")

    def layout(self, width: int) -> GroupedQuantFormat:
        """How the codes of a matrix of ``width`` inputs are stored. Raises ValueError where groups do not divide it."""
        if width < 1 or width % (self.group_size or width):
            raise ValueError(f"its {width} inputs are no multiple of the group size {self.group_size}")
        bits, zero_point = {"ternary": (2, 1), "affine4": (4, 0), "int8": (8, 128)}[self.format]
        return GroupedQuantFormat(bits, self.group_size or width, zero_point)

    @property
    def has_offsets(self) -> bool:
        """Whether each group has an offset of its own."""
        return self.format == "affine4"


class Arithmetic(NamedTuple):
    """Whose arrays: a namespace with NumPy's names for element-wise operations, and float32 rounded to bfloat16.

    ``to_bfloat16`` gives float32 again.
    """

    namespace: Any
    to_bfloat16: Callable[[Any], Any]


NUMPY = Arithmetic(np, lambda values: values.astype(SCALE_DTYPE).astype(np.float32))


class Steps(NamedTuple):
    """``steps`` ``[..., groups, group_size]``, ``scales`` and ``offsets`` ``[..., groups, 1]``, float32.

    ``offsets`` are None where the format has none.
    """

    steps: Any
    scales: Any
    offsets: Any | None

    def dequantized(self) -> Any:
        """The weights that they stand for, in the order of operations of the kernels' reference."""
        weight = self.steps * self.scales
        return weight if self.offsets is None else weight + self.offsets


def quantize_groups(groups: Any, kind: str, arithmetic: Arithmetic = NUMPY) -> Steps:
    """Float32 ``[..., groups, group_size]`` in steps of the format ``kind``. A NaN makes its group NaN."""
    return {"ternary": _ternary, "affine4": _affine4, "int8": _int8}[kind](groups, arithmetic)


def quantize(weight: np.ndarray, quantization: Quantization) -> GroupedQuantRows:
    """A float32 matrix ``[out, in]`` in the stored form: packed codes, scales and offsets of ``SCALE_DTYPE``.

    Raises ValueError where the groups do not divide its rows, and naming the first row with a value that is not finite.
    """
    layout = quantization.layout(weight.shape[1])
    if not np.isfinite(weight).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(weight))[0])
        raise ValueError(f"row {row} holds {weight[row, column]} at input {column}")
    with np.errstate(over="ignore"):
        found = quantize_groups(weight.reshape(len(weight), -1, layout.group_size), quantization.format)
    codes = (found.steps.astype(np.int32) + layout.zero_point).astype(np.uint8)
    offsets = np.zeros((), SCALE_DTYPE) if found.offsets is None else found.offsets[..., 0].astype(SCALE_DTYPE)
    return GroupedQuantRows(
        pack_codes(codes.reshape(weight.shape), layout.bits), found.scales[..., 0].astype(SCALE_DTYPE), offsets
    )


def _ternary(groups: Any, arithmetic: Arithmetic) -> Steps:
    xp = arithmetic.namespace
    total = xp.abs(groups)
    while (count := total.shape[-1]) > 1:
        total = total[..., : count // 2] + total[..., count // 2 :]
    scales = _held(total * (1 / groups.shape[-1]), arithmetic)
    return Steps(_whole(groups / scales, -1, 1, xp), scales, None)


def _int8(groups: Any, arithmetic: Arithmetic) -> Steps:
    xp = arithmetic.namespace
    largest = _divided(xp.amax(xp.abs(groups), -1)[..., None], 127, xp)
    scales = _held(largest, arithmetic, _LARGEST_INT8_SCALE)
    return Steps(_whole(groups / scales, -127, 127, xp), scales, None)


def _affine4(groups: Any, arithmetic: Arithmetic) -> Steps:
    xp = arithmetic.namespace
    low, high = xp.amin(groups, -1)[..., None], xp.amax(groups, -1)[..., None]
    from_low = xp.abs(low) > xp.abs(high)
    # As small as MLX lets a scale become.
    span = xp.clip(_divided(high - low, 15, xp), 1e-7, None)
    scales, ends = xp.where(from_low, span, -span), xp.where(from_low, low, high)
    # How many steps zero is away from that end.
    count = xp.round(ends / scales)
    some = count != 0
    scales = xp.where(some, ends / xp.where(some, count, 1.0), scales)
    magnitude = _held(xp.abs(scales), arithmetic)
    scales = xp.where(scales < 0, -magnitude, magnitude)
    offsets = xp.where(some, ends, 0.0)
    small = xp.abs(offsets) < SMALLEST_SCALE
    offsets = xp.clip(arithmetic.to_bfloat16(xp.where(small, 0.0, offsets)), -LARGEST_SCALE, LARGEST_SCALE)
    return Steps(_whole((groups - offsets) / scales, 0, 15, xp), scales, offsets)


def _divided(values: Any, divisor: int, xp: Any) -> Any:
    # By an array: by a Python number, torch multiplies with the rounded reciprocal on a GPU, and divides on a CPU.
    return values / xp.full_like(values, divisor)


def _whole(values: Any, low: int, high: int, xp: Any) -> Any:
    # In place: memory is what takes the time.
    return xp.clip(xp.round(values, out=values), low, high, out=values)


def _held(scales: Any, arithmetic: Arithmetic, largest: float = LARGEST_SCALE) -> Any:
    return arithmetic.namespace.clip(arithmetic.to_bfloat16(scales), SMALLEST_SCALE, largest)
