"""Tensors of random numbers for checkpoints that tests and benchmarks make, drawn row by row as they are read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.exporters.checkpoints.tensors import CheckpointTensor, QuantizedLayout, Rows
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, pack_codes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TERNARY = QuantizedLayout(GroupedQuantFormat(2, 128, 1), BFLOAT16, has_offsets=False)
AFFINE_4BIT = QuantizedLayout(GroupedQuantFormat(4, 64, 0), BFLOAT16, has_offsets=True)

# Rows are drawn in blocks of about so many values. A block has a seed of its own, so that any part of a tensor can be
# had without the rest, and whoever reads in other pieces finds the same values.
_BLOCK_VALUES = 1 << 18
# The four codes of a byte, each 0, 1 or 2: all 81 of them three times, and 13 more that are symmetric too, so that
# weights are zero on average.
_FOUR_CODES = np.r_[np.tile(np.arange(81), 3), np.arange(34, 47)][:, None] // np.array([1, 3, 9, 27]) % 3
_TERNARY_BYTES = pack_codes(_FOUR_CODES.astype(np.uint8), 2).reshape(256)


@dataclass(frozen=True)
class RandomTensor(CheckpointTensor):
    """A tensor whose rows come from a generator; the same rows whenever and in whatever pieces they are read.

    ``draw`` maps a generator and a number of rows to those rows, dense in ``element`` or as ``quantized`` says.
    """

    seed: int
    draw: Callable[[np.random.Generator, int], Rows]
    element: np.dtype[Any] | None = None
    quantized: QuantizedLayout | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.element)
        object.__setattr__(self, "layout", self.quantized)

    @property
    def row_bytes(self) -> int:
        values = math.prod(self.shape[1:] if len(self.shape) > 1 else self.shape)
        if self.element is not None:
            return values * self.element.itemsize
        assert self.quantized is not None
        form = self.quantized.format
        return values * form.bits // 8 + values // form.group_size * self.quantized.scale_dtype.itemsize

    def read_rows(self, start: int, stop: int) -> Rows:
        width = math.prod(self.shape[1:] if len(self.shape) > 1 else self.shape)
        step = max(1, _BLOCK_VALUES // width)
        parts = []
        for block in range(start // step, -(-stop // step)):
            first = block * step
            rows = self.draw(
                np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), block]),
                min(step, self.row_count - first),
            )
            parts.append(_cut(rows, max(start - first, 0), stop - first))
        return _joined(parts)


@dataclass(frozen=True)
class StackedTensor(CheckpointTensor):
    """Dense tensors one below the other."""

    parts: tuple[CheckpointTensor, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.parts[0].dtype)

    @property
    def row_bytes(self) -> int:
        return self.parts[0].row_bytes

    def read_rows(self, start: int, stop: int) -> Rows:
        found, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.row_count)
            if low < high:
                found.append(part.read_rows(low, high))
            first += part.row_count
        return _joined(found)


@dataclass(frozen=True)
class ReshapedTensor(CheckpointTensor):
    """Another dense tensor's rows in another shape."""

    source: CheckpointTensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.source.dtype)

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> Rows:
        rows = self.source.read_rows(start, stop)
        assert isinstance(rows, np.ndarray)
        return rows.reshape(stop - start, *self.shape[1:])


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    if isinstance(rows, np.ndarray):
        return rows[start:stop]
    offsets = rows.offsets[start:stop] if rows.has_offsets else rows.offsets
    return GroupedQuantRows(rows.codes[start:stop], rows.scales[start:stop], offsets)


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    if dense:
        return np.concatenate(dense)
    quantized = [part for part in parts if isinstance(part, GroupedQuantRows)]
    offsets = [part.offsets for part in quantized]
    return GroupedQuantRows(
        np.concatenate([part.codes for part in quantized]),
        np.concatenate([part.scales for part in quantized]),
        np.concatenate(offsets) if quantized[0].has_offsets else offsets[0],
    )


def _few_digits(values: np.ndarray, bits: int) -> np.ndarray:
    """``values`` rounded to ``bits`` significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * (1 << bits)), exponent - bits)


def ternary(name: str, shape: tuple[int, int], seed: int) -> CheckpointTensor:
    """A ternary matrix: a third of its codes is zero, scales spread by a tenth around ``sqrt(1.5 / in)``."""
    groups = shape[1] // 128

    def draw(rng: np.random.Generator, count: int) -> GroupedQuantRows:
        codes = _TERNARY_BYTES[rng.integers(0, 256, (count, shape[1] // 4), np.uint8)]
        spread = np.exp(0.1 * rng.standard_normal((count, groups), np.float32))
        # Float16 holds every bfloat16 of this size.
        scales = np.clip(math.sqrt(1.5 / shape[1]) * spread, 2**-14, 1).astype(BFLOAT16)
        return GroupedQuantRows(codes, scales, np.zeros((), BFLOAT16))

    return RandomTensor(name, shape, "MLX2", seed, draw, quantized=TERNARY)


def affine_4bit(name: str, shape: tuple[int, int], seed: int) -> CheckpointTensor:
    """A 4-bit matrix of the deviation ``1 / sqrt(in)``: scales of both signs, offsets of about -7.5 of them."""
    groups = shape[1] // 64

    def draw(rng: np.random.Generator, count: int) -> GroupedQuantRows:
        codes = rng.integers(0, 256, (count, shape[1] // 2), np.uint8)
        spread = np.exp(0.1 * rng.standard_normal((count, groups), np.float32)) * rng.choice((-1, 1), (count, groups))
        # Sixteen codes deviate by 4.61. With four bits a scale times a code is exact in bfloat16, and so is the sum.
        scales = _few_digits(spread / (4.61 * math.sqrt(shape[1])), 4)
        offsets = scales * -rng.choice((7, 7.5, 8), (count, groups))
        return GroupedQuantRows(codes, scales.astype(BFLOAT16), offsets.astype(BFLOAT16))

    return RandomTensor(name, shape, "MLX4", seed, draw, quantized=AFFINE_4BIT)


def normal(
    name: str, shape: tuple[int, ...], seed: int, *, mean: float = 0.0, std: float | None = None
) -> CheckpointTensor:
    """A dense bfloat16 tensor; without ``std`` it deviates by one over the root of a row's length."""
    width = math.prod(shape[1:] if len(shape) > 1 else shape)
    deviation = np.float32(width**-0.5 if std is None else std)

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        values = rng.standard_normal((count, width), np.float32) * deviation + np.float32(mean)
        return values.astype(BFLOAT16).reshape(count, *(shape[1:] if len(shape) > 1 else shape))

    return RandomTensor(name, shape, "BF16", seed, draw, element=BFLOAT16)
