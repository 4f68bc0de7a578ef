"""Products and look-ups of grouped-quantized weights as onnxruntime's own operators, for its providers on GPUs.

Shape suffixes: K inputs, N outputs, G blocks of inputs, P bytes of a block.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.block_dequantize import BlockDequantizePass
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.engines.lowering.packed_blocks import PackedBlocks, lazy, read_tensor

_DOMAIN, _VERSION = "com.microsoft", 1
# Of values that share a scale, in both operators.
_SMALLEST_BLOCK = 16
# Activations stay as they are: 4 would round them to 8 bits on a CPU.
_FLOAT_ACTIVATIONS = 1


class MatMulNBitsPass(BlockDequantizePass):
    """Replaces ``GroupedQuantMatMul`` by ``MatMulNBits`` and ``GroupedQuantGather`` by ``GatherBlockQuantized``.

    1. Weights are of 4 bits (ternary ones too, which no provider on a GPU reads in 2) or of 8, with one scale a block
       in the dtype of the activations, and exact.
    2. What a group's zero point is off the middle, or its offset, is a second product as in the base class.
    3. A weight is dense where its groups are no blocks for the operators: a power of two, and at least 16.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = super().call(model)
        if any(node.domain == _DOMAIN for node in model.graph):
            model.graph.opset_imports.setdefault(_DOMAIN, _VERSION)
        return result

    def _is_dense(self, packed: PackedBlocks, dtype: ir.DataType) -> bool:
        if super()._is_dense(packed, dtype):
            return True
        is_odd = packed.block < _SMALLEST_BLOCK or packed.block & (packed.block - 1) != 0
        if is_odd:
            group = packed.format.group_size
            self._tell(packed, f"{packed.name}: dense {dtype.numpy().name}, as groups of {group} are no blocks there")
        return is_odd

    def _packed_product(self, build: GraphBuilder, packed: PackedBlocks, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        rows, width = packed.shape
        codes = build.initializer(
            _codes(packed, (rows, width // packed.block, packed.block * packed.dtype.bitwidth // 8))
        )
        scales = build.initializer(_scales(packed, dtype))
        return build(
            "MatMulNBits",
            [x, codes, scales],
            dtype,
            domain=_DOMAIN,
            K=width,
            N=rows,
            bits=packed.dtype.bitwidth,
            block_size=packed.block,
            accuracy_level=_FLOAT_ACTIVATIONS,
        )

    def _packed_rows(
        self, build: GraphBuilder, packed: PackedBlocks, indices: ir.Value, dtype: ir.DataType
    ) -> ir.Value:
        rows, width = packed.shape
        codes = build.initializer(_codes(packed, (rows, width * packed.dtype.bitwidth // 8)))
        scales = build.initializer(_scales(packed, dtype))
        return build(
            "GatherBlockQuantized",
            [codes, indices, scales],
            dtype,
            domain=_DOMAIN,
            gather_axis=0,
            quantize_axis=1,
            bits=packed.dtype.bitwidth,
            block_size=packed.block,
        )


def _codes(packed: PackedBlocks, shape: tuple[int, ...]) -> ir.LazyTensor:
    """The values as uint8 of both operators, whose zero is the middle code: a sign bit away from two's complements."""
    flip = 0x80 if packed.dtype == ir.DataType.INT8 else 0x88

    def read() -> np.ndarray:
        signed = np.frombuffer(packed.values().tobytes(), np.uint8)
        return (signed ^ np.uint8(flip)).reshape(shape)

    return lazy(read, ir.DataType.UINT8, shape, f"{packed.name}.codes.{len(shape)}")


def _scales(packed: PackedBlocks, dtype: ir.DataType) -> ir.LazyTensor:
    """``[N, G]`` in ``dtype``: also where a row has one scale, which the operators have no form for."""

    def read() -> np.ndarray:
        with np.errstate(over="ignore"):  # told by rounding_of_scales
            scales = read_tensor(packed.scales).astype(dtype.numpy())
        return np.repeat(scales, packed.format.group_size // packed.block, axis=1)

    shape = packed.shape[0], packed.shape[1] // packed.block
    return lazy(read, dtype, shape, f"{packed.name}.scales_of_blocks.{dtype.name}")
