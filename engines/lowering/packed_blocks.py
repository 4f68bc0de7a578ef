"""Grouped-quantized weights as the signed integers of DequantizeLinear: made when a file is written, tensor by tensor.

What stands for them in a graph has a dtype, a shape and no data. Reading and unpacking a weight of the largest layers
takes less than its values in a byte each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import GroupedQuantFormat

# Values of DequantizeLinear's block that targets take: more share a scale in few formats, fewer take too many scales.
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 8
# In the names of the constants that are added to groups.
RESTS = ".rests."
_CHUNK = 1 << 20
# Look-ups make their indices eight bytes wide: so many stay in a core's cache.
_LOOKED_UP = 1 << 16


def read_tensor(tensor: ir.TensorProtocol) -> np.ndarray:
    """The values of a tensor; those in a file by positioned reads, since pages of a map would count as ours.

    Raises CompileError for a file that ends too early.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor.numpy()
    count = math.prod(tensor.shape.numpy())
    values = np.fromfile(tensor.path, tensor.dtype.numpy(), count, offset=tensor.offset or 0)
    if values.size != count:
        raise CompileError(
            f"{tensor.name}: there are {values.size} of its {count} values in {tensor.path}; export again"
        )
    return values.reshape(tensor.shape.numpy())


@dataclass(frozen=True)
class PackedBlocks:
    """A weight ``[out, in]``, ``w = scale * (code - zero_point) + offset``, as ``scale * value + rest`` of blocks.

    ``value`` is an INT4 or INT8: a code less ``center``. Where that is not the zero point, or groups have offsets,
    there is a ``rest`` a group (``has_rest``).
    """

    name: str
    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    offsets: ir.TensorProtocol
    format: GroupedQuantFormat

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        rows, width = self.codes.shape.numpy()
        return rows, width * 8 // self.format.bits

    @property
    def groups(self) -> int:
        """How many groups a row has."""
        return self.shape[1] // self.format.group_size

    @property
    def dtype(self) -> ir.DataType:
        """INT4 for codes of 2 and 4 bits, INT8 for those of 8."""
        return ir.DataType.INT8 if self.format.bits == 8 else ir.DataType.INT4

    @property
    def block(self) -> int:
        """Values that share a scale: a group, or a part of one."""
        return math.gcd(self.format.group_size, LARGEST_BLOCK)

    @property
    def is_per_row(self) -> bool:
        """Whether a row has one scale and needs no blocks; INT4 keeps them, for which targets have their kernels."""
        return self.groups == 1 and (self.dtype == ir.DataType.INT8 or self.block < SMALLEST_BLOCK)

    @property
    def has_offsets(self) -> bool:
        """Whether groups have offsets of their own."""
        return bool(len(self.offsets.shape))

    @cached_property
    def center(self) -> int:
        """The code that becomes zero: the zero point, if all codes then fit."""
        bits, zero_point = self.format.bits, self.format.zero_point
        half = 1 << (self.dtype.bitwidth - 1)
        if bits == 2:
            return zero_point
        if zero_point != half and not self.has_offsets and zero_point < half:
            # Narrower codes may be held in these, so that the largest has to be looked for.
            return zero_point if self._largest_code() - zero_point < half else half
        return half

    @property
    def has_rest(self) -> bool:
        """Whether a number is to be added to each group."""
        return self.has_offsets or self.center != self.format.zero_point

    def bits_per_weight(self, scale_bits: int, rest_bits: int) -> float:
        """What a weight takes with scales and rests of so many bits, the rests of its groups among them."""
        rest = rest_bits / self.format.group_size if self.has_rest else 0.0
        return self.dtype.bitwidth + scale_bits / (self.shape[1] if self.is_per_row else self.block) + rest

    def values(self) -> ir.LazyTensor:
        """INT4 or INT8 ``[out, in]``."""
        shape = ir.Shape(self.shape)

        def read() -> ir.TensorProtocol:
            codes = read_tensor(self.codes).ravel()
            table = self._table()
            values = np.empty(codes.size, table.dtype)
            for start in range(0, codes.size, _LOOKED_UP):
                part = slice(start, start + _LOOKED_UP)
                np.take(table, codes[part], out=values[part], mode="clip")
            packed = values.view(np.uint8)
            if self.dtype == ir.DataType.INT8:
                return ir.Tensor(packed.view(np.int8).reshape(self.shape), name=name)
            return ir.PackedTensor(packed, self.dtype, shape=shape, name=name)

        name = f"{self.name}.values"
        return ir.LazyTensor(read, self.dtype, shape, name=name)

    def block_scales(self, dtype: ir.DataType) -> ir.LazyTensor:
        """``[out, in / block]`` in ``dtype``, or ``[out]`` where a row has one."""
        rows, width = self.shape

        def read() -> np.ndarray:
            with np.errstate(over="ignore"):  # told by rounding_of_scales
                scales = read_tensor(self.scales).astype(dtype.numpy())
            return scales[:, 0] if self.is_per_row else np.repeat(scales, self.format.group_size // self.block, axis=1)

        shape = (rows,) if self.is_per_row else (rows, width // self.block)
        return lazy(read, dtype, shape, f"{self.name}.block_scales.{dtype.name}")

    def rests(self, dtype: ir.DataType) -> ir.LazyTensor:
        """What is added to each group, ``[out, groups]`` in ``dtype``."""

        def read() -> np.ndarray:
            offsets = read_tensor(self.offsets).astype(np.float32)
            scales = read_tensor(self.scales).astype(np.float32)
            shift = np.float32(self.center - self.format.zero_point)
            return np.asarray(offsets + scales * shift).astype(dtype.numpy())

        return lazy(read, dtype, (self.shape[0], self.groups), f"{self.name}{RESTS}{dtype.name}")

    def dense(self, dtype: ir.DataType) -> ir.LazyTensor:
        """The weight itself, ``[out, in]`` in ``dtype``."""
        from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize

        def read() -> np.ndarray:
            codes, scales, offsets = (read_tensor(part) for part in (self.codes, self.scales, self.offsets))
            weight = np.empty(self.shape, dtype.numpy())
            rows = max(1, _CHUNK // self.shape[1])
            for start in range(0, self.shape[0], rows):
                part = slice(start, start + rows)
                own = offsets[part] if offsets.ndim else offsets
                weight[part] = dequantize(GroupedQuantRows(codes[part], scales[part], own), self.format)
            return weight

        return lazy(read, dtype, self.shape, f"{self.name}.dense.{dtype.name}")

    def rounding_of_scales(self, dtype: ir.DataType) -> float:
        """The largest relative error that ``dtype`` makes of a scale; infinite if one overflows."""
        if self.scales.dtype == dtype or dtype == ir.DataType.FLOAT:
            return 0.0
        scales = read_tensor(self.scales).astype(np.float32)
        with np.errstate(over="ignore"):
            rounded = scales.astype(dtype.numpy()).astype(np.float32)
        nonzero = scales != 0
        return float(np.abs((rounded[nonzero] - scales[nonzero]) / scales[nonzero]).max(initial=0.0))

    def _largest_code(self) -> int:
        codes = read_tensor(self.codes)
        if self.format.bits == 8:
            return int(codes.max())
        low, high = codes & 15, codes >> 4
        return int(max(low.max(), high.max()))

    def _table(self) -> np.ndarray:
        """Two's complements of all codes in a byte: a byte for each of 4 and 8 bits, two bytes for one of 2 bits."""
        byte, bits = np.arange(256, dtype=np.int64), self.format.bits
        if bits == 8:
            return ((byte - self.center) & 255).astype(np.uint8)
        nibbles = [((byte >> shift & (1 << bits) - 1) - self.center & 15) for shift in range(0, 8, bits)]
        table = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
        return np.asarray(table).astype(np.dtype("<u2") if bits == 2 else np.uint8)


def lazy(read: Callable[[], np.ndarray], dtype: ir.DataType, shape: tuple[int, ...], name: str) -> ir.LazyTensor:
    """A tensor whose values ``read`` gives whenever they are asked for."""
    return ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)
