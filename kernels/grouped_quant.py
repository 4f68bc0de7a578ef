"""The grouped-quantized weight format and its NumPy reference.

A weight matrix ``[out, in]`` is cut into groups of ``group_size`` values along its input axis.
Each value is an unsigned integer code of ``bits`` bits, and

    w = scale * (code - zero_point) + offset

with one scale and one offset a group. The arithmetic of the reference, which every kernel is
compared with: ``code - zero_point`` to float32, one multiply, one add, all in float32; then the
product in float32.

Layout: ``codes`` is uint8 ``[out, in * bits / 8]``, the first input in the lowest bits of a byte;
``scales`` and ``offsets`` are ``[out, in / group_size]`` in float16, bfloat16 or float32. A format
without offsets has a scalar zero (shape ``[]``) in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

# Where the ops on this format live in a graph.
DOMAIN = "intaglio"
DOMAIN_VERSION = 1

SUPPORTED_BITS = (2, 4, 8)
SCALE_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


@dataclass(frozen=True)
class GroupedQuantFormat:
    """How the codes of one weight are to be read. Raises ValueError on what the format does not hold."""

    bits: int
    group_size: int
    zero_point: int

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(f"bits is {self.bits}, expected one of {SUPPORTED_BITS}")
        if self.group_size < 1 or self.group_size * self.bits % 8:
            raise ValueError(
                f"group_size {self.group_size} with {self.bits} bits does not end on a byte; "
                f"it must be a positive multiple of {8 // self.bits}"
            )
        if not 0 <= self.zero_point < 1 << self.bits:
            raise ValueError(f"zero_point {self.zero_point} is not a {self.bits}-bit code")

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of ``codes`` for a weight of ``shape`` ``[out, in]``."""
        self._check_width(shape[1])
        return shape[0], shape[1] * self.bits // 8

    def groups_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of ``scales`` (and of ``offsets``, where there are any) for a weight ``[out, in]``."""
        self._check_width(shape[1])
        return shape[0], shape[1] // self.group_size

    def _check_width(self, width: int) -> None:
        if width % self.group_size:
            raise ValueError(f"input width {width} is not a multiple of the group size {self.group_size}")


@dataclass(frozen=True)
class GroupedQuantRows:
    """Some rows of a grouped-quantized weight: ``codes``, ``scales`` and ``offsets`` as the module says."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray

    @property
    def has_offsets(self) -> bool:
        """Whether each group has an offset of its own."""
        return self.offsets.ndim != 0


def pack_codes(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, uint8 ``[..., n]`` with one code a byte, into uint8 ``[..., n * bits / 8]``.

    Raises ValueError if a code does not fit or if ``n`` codes do not fill whole bytes.
    """
    if values.dtype != np.uint8:
        raise ValueError(f"codes are {values.dtype}, expected uint8")
    per_byte = 8 // bits
    if values.shape[-1] % per_byte:
        raise ValueError(f"{values.shape[-1]} codes of {bits} bits do not fill whole bytes")
    if bits < 8 and values.size and int(values.max()) >> bits:
        raise ValueError(f"code {int(values.max())} does not fit in {bits} bits")
    if bits == 8:
        return values.copy()
    packed = values[..., 0::per_byte].copy()
    for i in range(1, per_byte):
        packed |= values[..., i::per_byte] << np.uint8(i * bits)
    return packed


def unpack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_codes`: uint8 ``[..., n * bits / 8]`` to uint8 ``[..., n]``."""
    per_byte = 8 // bits
    mask = np.uint8((1 << bits) - 1)
    values = np.empty((*codes.shape[:-1], codes.shape[-1] * per_byte), np.uint8)
    for i in range(per_byte):
        values[..., i::per_byte] = codes >> np.uint8(i * bits) & mask
    return values


def dequantize(rows: GroupedQuantRows, quantization: GroupedQuantFormat) -> np.ndarray:
    """Unpacks to float32 ``[out, in]`` in exactly the order of operations that the module states."""
    codes = unpack_codes(rows.codes, quantization.bits)
    groups = codes.reshape(codes.shape[0], -1, quantization.group_size).astype(np.int32)
    values = (groups - np.int32(quantization.zero_point)).astype(np.float32)
    # An 8-bit code may meet a scale near the top of float32: infinity is then the exact answer.
    with np.errstate(over="ignore", invalid="ignore"):
        weight = values * rows.scales.astype(np.float32)[..., None]
        weight = weight + rows.offsets.astype(np.float32)[..., None]
    return weight.reshape(codes.shape)


def matmul(x: np.ndarray, rows: GroupedQuantRows, quantization: GroupedQuantFormat) -> np.ndarray:
    """The reference of ``GroupedQuantMatMul``: ``x`` ``[..., in]`` float32 to float32 ``[..., out]``."""
    return np.matmul(x.astype(np.float32), dequantize(rows, quantization).T)
