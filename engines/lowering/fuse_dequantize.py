"""Joins an integer weight and the scale that it is multiplied by to one DequantizeLinear, which targets keep packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import attribute, constant_of, producer, remove_unread

# The first opset whose DequantizeLinear takes the integers.
_INTEGERS = {ir.DataType.INT8: 13, ir.DataType.UINT8: 13, ir.DataType.INT4: 21, ir.DataType.UINT4: 21}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_RANGES = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
}


class FuseDequantizePass(ir.passes.InPlacePass):
    """Turns ``(Cast(weight) - zero_point) * scale`` into ``DequantizeLinear(weight, scale, zero_point)``.

    The weight is an initializer of int8, uint8, int4 or uint4; the scale and the zero point, which may be left out, are
    constants: one number, or one for each row of one axis. A float16 scale is written before opset 19 too, which first
    allowed it: the graph is for a converter.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        nodes = [node for node in graph if not node.domain and node.op_type == "Mul"]
        joined = [node for node in nodes if _join(graph, node, opset)]
        return ir.passes.PassResult(model, modified=bool(joined))


def _join(graph: ir.Graph, node: ir.Node, opset: int) -> bool:
    for factor, scale in (node.inputs, node.inputs[::-1]):
        shifted = producer(factor, "Sub")
        cast = producer(factor if shifted is None else shifted.inputs[0], "Cast")
        weight = cast.inputs[0] if cast is not None else None
        if cast is None or weight is None or not weight.is_initializer() or weight.is_graph_input():
            continue
        dtype, target = weight.dtype, ir.DataType(attribute(cast, "to", 0))
        if dtype not in _INTEGERS or target not in _FLOATS or opset < _INTEGERS[dtype]:
            continue
        given = [constant_of(scale), *([constant_of(shifted.inputs[1])] if shifted is not None else [])]
        shape = weight.shape.numpy() if weight.shape is not None else ()
        placed = _along_one_axis(given, tuple(shape))
        if placed is None:
            continue
        axis, (numbers, *zeros) = placed
        if any(np.any(z != np.round(z)) or z.min() < _RANGES[dtype][0] or z.max() > _RANGES[dtype][1] for z in zeros):
            continue
        inputs = [weight, _weight(graph, f"{weight.name}.scale", numbers, target)]
        inputs += [_weight(graph, f"{weight.name}.zero_point", each, dtype) for each in zeros]
        new = ir.node("DequantizeLinear", inputs, {"axis": axis} if numbers.ndim else {}, name=node.name)
        outputs = node.outputs
        convenience.replace_nodes_and_values(graph, node, [node], [new], outputs, new.outputs)
        remove_unread(graph, [factor])
        return True
    return False


def _along_one_axis(arrays: Sequence[np.ndarray | None], shape: Sequence[int]) -> tuple[int, list[np.ndarray]] | None:
    """The axis of ``shape`` along which the arrays vary, and they as vectors or, if none varies, as scalars."""
    known = [array for array in arrays if array is not None and array.ndim <= len(shape)]
    if len(known) < len(arrays):
        return None
    axes: set[int] = set()
    for array in known:
        wide = (1,) * (len(shape) - array.ndim) + array.shape
        if any(size not in (1, own) for size, own in zip(wide, shape, strict=True)):
            return None
        axes.update(i for i, size in enumerate(wide) if size != 1)
    if len(axes) > 1:
        return None
    if not axes:
        return 0, [array.reshape(()) for array in known]
    axis = axes.pop()
    return axis, [np.broadcast_to(array.ravel(), (shape[axis],)) for array in known]


def _weight(graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    while name in graph.initializers:
        name += "_"
    tensor = ir.Tensor(np.array(array, dtype.numpy()), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
