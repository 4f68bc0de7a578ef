"""Writes rows as GGUF blocks: float32 rows by quantizing, grouped-quantized rows exactly or not at all.

Layouts are those that :mod:`gguf_unpack` reads. The rounding of each quantizer is ggml's reference (what
the ``gguf`` package does, byte for byte); the 128-wide ternary type is oxibonsai's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.tensors import QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, unpack_codes

_TERNARY_128 = GroupedQuantFormat(2, 128, 1)


class _MisfitError(Exception):
    # Rows do not fit a type; the public functions add which tensor they are of.
    def __init__(self, why: str, at: tuple[int, ...] | None = None) -> None:
        super().__init__(why)
        self.why, self.at = why, at

    def named(self, what: str, storage: str, first_row: int) -> CheckpointError:
        place = f"row {first_row + self.at[0]}, group {self.at[1]} " if self.at else ""
        return CheckpointError(f"{what}: cannot be written as {storage}: {place}{self.why}")


@dataclass(frozen=True)
class Groups:
    """Rows taken apart for one type: uint8 ``codes`` and float16 ``scales``, ``minima`` (None where it has none).

    ``codes`` are ``[rows, groups, group_size]``, one a byte; the others ``[rows, groups]``.
    """

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None


@dataclass(frozen=True)
class PackedType:
    """A type that can be written. ``zero_point`` and ``largest`` are of its codes.

    ``quantize`` maps float32 ``[rows, groups, group_size]`` to codes, float32 scales and minima; ``assemble``
    makes blocks, uint8 ``[rows, groups, bytes]``.
    """

    group_size: int
    zero_point: int
    largest: int
    quantize: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]
    assemble: Callable[[Groups], np.ndarray]
    has_minima: bool = False


def quantize_rows(storage: str, rows: np.ndarray, what: str, first_row: int = 0) -> np.ndarray:
    """Float32 ``[rows, in]`` to uint8 ``[rows, bytes]``.

    Raises CheckpointError on a width that the groups do not divide, on a value that is not finite, and on a
    scale that float16 does not hold; it begins with ``what`` and counts rows from ``first_row``.
    """
    try:
        return _quantize(PACKED_TYPES[storage], rows)
    except _MisfitError as error:
        raise error.named(what, storage, first_row) from None


def repack_rows(
    storage: str, rows: GroupedQuantRows, layout: QuantizedLayout, what: str, first_row: int = 0
) -> np.ndarray:
    """Grouped-quantized rows to uint8 ``[rows, bytes]``, so that every value stays exactly what it is.

    Raises CheckpointError, naming row, group and reason, where the type cannot hold them.
    """
    try:
        return _repack(storage, rows, layout)
    except _MisfitError as error:
        raise error.named(what, storage, first_row) from None


def _quantize(packed: PackedType, rows: np.ndarray) -> np.ndarray:
    _check_width(rows.shape[-1], packed.group_size)
    groups = np.ascontiguousarray(rows, np.float32).reshape(rows.shape[0], -1, packed.group_size)
    _refuse(~np.isfinite(groups).all(axis=-1), lambda at: f"holds {groups[at][~np.isfinite(groups[at])][0]}")
    # The span of a group may exceed float32, which the check of the scales reports.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        codes, scales, minima = packed.quantize(groups)
        halves = [None if part is None else part.astype(np.float16) for part in (scales, minima)]
    for part, half in zip((scales, minima), halves, strict=True):
        if part is not None and half is not None:
            _refuse(~np.isfinite(half), _overflow(part))
    assert halves[0] is not None
    return _bytes(packed.assemble(Groups(codes, halves[0], halves[1])))


def _overflow(values: np.ndarray) -> Callable[[tuple[int, ...]], str]:
    return lambda at: f"needs the scale or minimum {values[at]}, above float16's 65504"


def _repack(storage: str, rows: GroupedQuantRows, layout: QuantizedLayout) -> np.ndarray:
    packed = PACKED_TYPES[storage]
    if (
        storage == "TQ2_0_g128"
        and layout.format == _TERNARY_128
        and not rows.has_offsets
        and not _any_three(rows.codes)
    ):
        # The bytes of codes are the same in both.
        halves = _half(rows.scales, "scale")
        return _bytes(np.concatenate([rows.codes.reshape(*halves.shape, 32), _half_bytes(halves)], axis=-1))
    codes = unpack_codes(rows.codes, layout.format.bits)
    _check_width(codes.shape[-1], packed.group_size)
    count = codes.shape[-1] // packed.group_size
    scales = _half(_regroup(rows.scales, count, "scales"), "scale")
    offsets = np.zeros_like(scales)
    if rows.has_offsets:
        offsets = _half(_regroup(rows.offsets, count, "offsets"), "offset")
    # Integers from here on: w = scale * steps + offset.
    steps = codes.reshape(codes.shape[0], count, packed.group_size).astype(np.int32) - layout.format.zero_point
    minima = None
    if packed.has_minima:
        # Any zero point that lies outside the codes goes into the minimum, where it is exact.
        if layout.format.zero_point:
            _refuse(offsets != 0, lambda at: f"has a zero point and the offset {offsets[at]}, of which one can be kept")
            shift = scales.astype(np.float64) * -layout.format.zero_point
            offsets = _half(shift, "minimum (scale times zero point)")
            steps += layout.format.zero_point
        minima = offsets
    else:
        steps += _whole_steps(scales, offsets)[..., None]
    stored = steps + packed.zero_point
    # Where the scale is zero any code says zero.
    outside = (stored < 0) | (stored > packed.largest)
    stored = np.where(outside & (scales == 0)[..., None], packed.zero_point, stored)
    outside = (stored < 0) | (stored > packed.largest)
    low, high = -packed.zero_point, packed.largest - packed.zero_point
    _refuse(
        outside.any(axis=-1),
        lambda at: f"holds {steps[at][outside[at]][0]} times its scale, and {storage} holds {low} to {high}",
    )
    return _bytes(packed.assemble(Groups(stored.astype(np.uint8), scales, minima)))


def _any_three(codes: np.ndarray) -> bool:
    return bool((codes & codes >> np.uint8(1) & np.uint8(0x55)).any())


def _check_width(width: int, group_size: int) -> None:
    if width % group_size:
        raise _MisfitError(f"rows of {width} values are no multiple of {group_size}")


def _regroup(values: np.ndarray, count: int, what: str) -> np.ndarray:
    # One value for several groups is repeated; several for one group must be the same.
    have = values.shape[1]
    if count % have == 0:
        return np.repeat(values, count // have, axis=1)
    if have % count:
        raise _MisfitError(f"{have} groups a row cannot be made {count} without cutting one")
    parts = values.reshape(values.shape[0], count, have // count)
    _refuse(
        (parts != parts[..., :1]).any(axis=-1), lambda at: f"joins groups of different {what}: {parts[at].tolist()}"
    )
    return parts[..., 0]


def _half(values: np.ndarray, what: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    lost = ~np.isfinite(half) | (half.astype(np.float64) != values.astype(np.float64))
    _refuse(lost, lambda at: f"has the {what} {float(values[at])!r}, which is no finite float16")
    return half


def _whole_steps(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float64)
    steps = np.rint(np.divide(offsets, wide, out=np.zeros_like(wide), where=wide != 0))
    _refuse(
        (steps * wide != offsets) | (np.abs(steps) > 255),
        lambda at: (
            f"has the offset {offsets[at]}, no small multiple of its scale {scales[at]}; the type has no minimum"
        ),
    )
    return steps.astype(np.int32)


def _refuse(bad: Any, why: Callable[[tuple[int, ...]], str]) -> None:
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise _MisfitError(why(at), at)


def _bytes(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(blocks.shape[0], -1)


def _reciprocal(scales: np.ndarray) -> np.ndarray:
    # The scale of a group of zeros, or of values so small that float16 makes it zero anyway.
    inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))[..., None]


def _symmetric(largest: int) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, None]]:
    half = (largest + 1) // 2

    def quantize(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        # The value of largest magnitude gets the lowest code, so the scale takes its sign.
        at = np.abs(groups).argmax(axis=-1)[..., None]
        scales = np.take_along_axis(groups, at, axis=-1)[..., 0] / np.float32(-half)
        shifted = groups * _reciprocal(scales) + np.float32(half + 0.5)
        return np.clip(np.trunc(shifted), 0, largest).astype(np.uint8), scales, None

    return quantize


def _affine(largest: int) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    def quantize(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low = groups.min(axis=-1)
        scales = (groups.max(axis=-1) - low) / np.float32(largest)
        shifted = (groups - low[..., None]) * _reciprocal(scales) + np.float32(0.5)
        return np.clip(np.trunc(shifted), 0, largest).astype(np.uint8), scales, low

    return quantize


def _round_half_away(values: np.ndarray) -> np.ndarray:
    magnitude = np.abs(values)
    whole = np.floor(magnitude)
    return np.copysign(whole + (magnitude - whole >= np.float32(0.5)), values)


def _int8(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    steps = np.clip(_round_half_away(groups * _reciprocal(scales)), -127, 127)
    return (steps.astype(np.int16) + 128).astype(np.uint8), scales, None


def _ternary(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    scales = np.abs(groups).max(axis=-1)
    steps = np.clip(_round_half_away(groups * _reciprocal(scales)), -1, 1)
    return (steps + 1).astype(np.uint8), scales, None


def _ternary_128(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    # Compared with half of the scale, not multiplied by its reciprocal: the two differ in the last place.
    scales = np.abs(groups).max(axis=-1)
    half = (np.float32(0.5) * scales)[..., None]
    nonzero = (scales != 0)[..., None]
    codes = np.int8(1) + (nonzero & (groups >= half)).astype(np.int8) - (nonzero & (groups <= -half)).astype(np.int8)
    return codes.astype(np.uint8), scales, None


def interleave(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The inverse of :func:`gguf_unpack.bit_planes`: uint8 ``[..., n]`` to ``[..., n * bits / 8]``."""
    per_byte = 8 // bits
    runs = codes.reshape(*codes.shape[:-1], -1, per_byte, run)
    packed = runs[..., 0, :].copy()
    for i in range(1, per_byte):
        packed |= runs[..., i, :] << np.uint8(i * bits)
    return packed.reshape(*codes.shape[:-1], -1)


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.astype("<f2"))[..., None].view(np.uint8)


def _front(groups: Groups) -> list[np.ndarray]:
    return [_half_bytes(groups.scales), *([] if groups.minima is None else [_half_bytes(groups.minima)])]


def _assemble_4bit(groups: Groups) -> np.ndarray:
    return np.concatenate([*_front(groups), interleave(groups.codes, 4, 16)], axis=-1)


def _assemble_5bit(groups: Groups) -> np.ndarray:
    high, low = interleave(groups.codes >> np.uint8(4), 1, 1), interleave(groups.codes & np.uint8(15), 4, 16)
    return np.concatenate([*_front(groups), high, low], axis=-1)


def _assemble_8bit(groups: Groups) -> np.ndarray:
    return np.concatenate([*_front(groups), groups.codes ^ np.uint8(0x80)], axis=-1)


def _base3(digits: np.ndarray, count: int, run: int) -> np.ndarray:
    places = np.array([81, 27, 9, 3, 1][:count], np.uint16)[:, None]
    number = (digits.reshape(*digits.shape[:-1], -1, count, run) * places).sum(axis=-2, dtype=np.uint16)
    # The number of 243 as the next fraction of 256 above it, so that multiplying by 3 yields the digits.
    return (-(-(number.astype(np.int32) * 256) // 243)).astype(np.uint8).reshape(*digits.shape[:-1], -1)


def _assemble_tq1_0(groups: Groups) -> np.ndarray:
    codes = groups.codes
    parts = [_base3(codes[..., :160], 5, 32), _base3(codes[..., 160:240], 5, 16), _base3(codes[..., 240:], 4, 4)]
    return np.concatenate([*parts, _half_bytes(groups.scales)], axis=-1)


def _assemble_tq2_0(groups: Groups) -> np.ndarray:
    return np.concatenate([interleave(groups.codes, 2, 32), _half_bytes(groups.scales)], axis=-1)


def _assemble_tq2_0_g128(groups: Groups) -> np.ndarray:
    return np.concatenate([interleave(groups.codes, 2, 1), _half_bytes(groups.scales)], axis=-1)


PACKED_TYPES: dict[str, PackedType] = {
    "Q4_0": PackedType(32, 8, 15, _symmetric(15), _assemble_4bit),
    "Q4_1": PackedType(32, 0, 15, _affine(15), _assemble_4bit, has_minima=True),
    "Q5_0": PackedType(32, 16, 31, _symmetric(31), _assemble_5bit),
    "Q5_1": PackedType(32, 0, 31, _affine(31), _assemble_5bit, has_minima=True),
    "Q8_0": PackedType(32, 128, 255, _int8, _assemble_8bit),
    "TQ1_0": PackedType(256, 1, 2, _ternary, _assemble_tq1_0),
    # Its fourth code is twice the scale to ggml.
    "TQ2_0": PackedType(256, 1, 3, _ternary, _assemble_tq2_0),
    "TQ2_0_g128": PackedType(128, 1, 2, _ternary_128, _assemble_tq2_0_g128),
}
