"""Quantized tensors with zero points, for targets that know integers about zero only."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import attribute, constant_of, is_standard
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.engines.lowering.packed_blocks import lazy, read_tensor

_RANGES = {ir.DataType.INT4: (-8, 7), ir.DataType.INT8: (-128, 127)}
_ROOM = {
    **_RANGES,
    ir.DataType.UINT4: (0, 15),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.UINT16: (0, 2**16 - 1),
}
# Constants of these are made dense: biases, which TensorRT dequantizes none of.
_WIDE = (ir.DataType.INT32,)


class SymmetricDequantizePass(ir.passes.InPlacePass):
    """Rewrites DequantizeLinear and QuantizeLinear to what is about zero, with the same numbers.

    1. A constant becomes INT4 or INT8 less its zero point where that fits: unsigned 8 bits about 128 become INT8, four
       bits about anything else than 8 too. What does not fit, such as the biases of 32 bits, becomes dense in the dtype
       of the scale.
    2. An activation that is quantized and dequantized at once, to what the target has not or about another number than
       zero, is divided, rounded, clipped and multiplied in floats.

    After the call ``notes`` say which constants take more bits than before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in [node for node in graph.all_nodes() if is_standard(node, "DequantizeLinear")]:
            source = node.inputs[0]
            quantize = source.producer() if source is not None else None
            if source is not None and source.const_value is not None and not source.is_graph_input():
                modified |= self._constant(graph, node, source)
            elif is_standard(quantize, "QuantizeLinear"):
                modified |= _activation(graph, node, quantize)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]
        return ir.passes.PassResult(model, modified=modified)

    def _constant(self, graph: ir.Graph, node: ir.Node, source: ir.Value) -> bool:
        tensor, zero_point = source.const_value, _zero_point(node)
        assert tensor is not None
        if source.dtype not in (*_ROOM, *_WIDE) or (
            len(node.inputs) > 2 and node.inputs[2] is not None and zero_point is None
        ):
            return False
        zeros = zero_point if zero_point is not None else np.zeros((), np.int32)
        if source.dtype in _RANGES and not zeros.any():
            if len(node.inputs) > 2:
                node.resize_inputs(2)
                return True
            return False
        shape = tuple(tensor.shape.numpy())
        axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)

        def values() -> np.ndarray:
            return read_tensor(tensor).astype(np.int32) - _spread(zeros, shape, axis, block)

        found = values()
        low, high = int(found.min(initial=0)), int(found.max(initial=0))
        del found
        dtypes = [d for d, (least, most) in _RANGES.items() if least <= low and high <= most]
        dtypes = [d for d in dtypes if d.bitwidth >= tensor.dtype.bitwidth]  # none of 32 bits
        build = GraphBuilder(graph, str(node.outputs[0].name))
        if dtypes:
            dtype = dtypes[0]
            held = lazy(lambda: values().astype(dtype.numpy()), dtype, shape, f"{source.name}.about_zero")
            inputs = [build.initializer(held), node.inputs[1]]
            kept = {name: each.value for name, each in node.attributes.items()}
            result = build("DequantizeLinear", inputs, node.outputs[0].dtype, shape, **kept)
            if dtype.bitwidth > tensor.dtype.bitwidth:
                self.notes.append(f"{source.name}: {dtype.bitwidth} bits, as its zero points are not in the middle")
        else:
            scale = constant_of(node.inputs[1])
            output = node.outputs[0]
            if scale is None or node.inputs[1] is None:
                return False
            wide = output.dtype or node.inputs[1].dtype or ir.DataType.FLOAT

            def dense() -> np.ndarray:
                spread = _spread(scale.astype(np.float32), shape, axis, block)
                return (values().astype(np.float32) * spread).astype(wide.numpy())

            if source.dtype not in _WIDE:
                self.notes.append(f"{source.name}: dense, as its numbers about zero take more than 8 bits")
            result = build("Identity", [build.initializer(lazy(dense, wide, shape, f"{source.name}.dense"))], wide)
        build.replace(node, result)
        return True


def _zero_point(node: ir.Node) -> np.ndarray | None:
    found = constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    return None if found is None else found.astype(np.int32)


def _spread(array: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """One number, one a row of ``axis`` or one a block, so that it broadcasts over ``shape``."""
    if array.size == 1:
        return array.reshape(())
    if block:
        return np.repeat(array, block, axis=axis)[tuple(slice(size) for size in shape)]
    return array.reshape([-1 if each == axis % len(shape) else 1 for each in range(len(shape))])


def _activation(graph: ir.Graph, node: ir.Node, quantize: ir.Node) -> bool:
    x, quantized = quantize.inputs[0], quantize.outputs[0]
    zero_point = _zero_point(quantize)
    same = all(a is b or _equal(a, b) for a, b in zip(quantize.inputs[1:], node.inputs[1:], strict=False))
    if x is None or x.dtype is None or not same or len(quantize.inputs) != len(node.inputs) or quantized.dtype is None:
        return False
    is_about_zero = zero_point is None or not zero_point.any()
    if (quantized.dtype == ir.DataType.INT8 and is_about_zero) or quantized.dtype not in _ROOM:
        return False
    scale = constant_of(quantize.inputs[1])
    if scale is None or scale.size != 1 or (zero_point is not None and zero_point.size != 1):
        return False
    build, wide = GraphBuilder(graph, str(node.outputs[0].name)), ir.DataType.FLOAT
    zero = 0 if zero_point is None else int(zero_point.reshape(()))
    low, high = (float(end - zero) for end in _ROOM[quantized.dtype])
    step = build.scalar(float(scale.astype(np.float32).reshape(())), wide)
    steps = build("Round", [build("Div", [build.cast(x, wide), step], wide)], wide)
    steps = build("Clip", [steps, build.scalar(low, wide), build.scalar(high, wide)], wide)
    result = build.cast(build("Mul", [steps, step], wide), node.outputs[0].dtype)
    build.replace(node, result)
    if not quantized.uses() and not quantized.is_graph_output() and quantize.graph is not None:
        quantize.graph.remove(quantize, safe=True)
    return True


def _equal(a: Any, b: Any) -> bool:
    first, second = constant_of(a), constant_of(b)
    # Where a graph was narrowed, the scale of the second was too.
    return first is not None and second is not None and np.array_equal(first.astype(second.dtype), second)
