"""Dynamically quantized products in floats, for targets without products of integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import constant_of, is_standard
from intaglio.engines.lowering.graph_builder import GraphBuilder

_WIDE = ir.DataType.FLOAT
_KINDS = ("MatMulInteger", "ConvInteger")
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


class FloatIntegersPass(ir.passes.InPlacePass):
    """Replaces ``DynamicQuantizeLinear``, ``MatMulInteger`` and ``ConvInteger`` by float32 arithmetic on integers.

    Floats hold the bytes and their products exactly, and sums up to 2^24; beyond, a sum is rounded. Constant bytes stay
    such, under a DequantizeLinear with the scale 1. A DynamicQuantizeLinear that others than products read stays.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        floats: dict[ir.Value, ir.Value] = {}
        modified = False
        for node in list(graph.all_nodes()):
            if is_standard(node, "DynamicQuantizeLinear") and _feeds_products(node):
                _quantize(graph, node, floats)
                modified = True
        for node in list(graph.all_nodes()):
            if not node.domain and node.op_type in _KINDS:
                _multiply(graph, node, floats)
                modified = True
        for node in [node for node in graph.all_nodes() if is_standard(node, "DynamicQuantizeLinear")]:
            if node.graph is not None and not any(each.uses() or each.is_graph_output() for each in node.outputs):
                node.graph.remove(node, safe=True)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]
        return ir.passes.PassResult(model, modified=modified)


def _feeds_products(node: ir.Node) -> bool:
    quantized, _, zero_point = node.outputs
    users = [user for value in (quantized, zero_point) for user, _ in value.uses()]
    is_output = quantized.is_graph_output() or zero_point.is_graph_output()
    return not is_output and all(not user.domain and user.op_type in _KINDS for user in users)


def _quantize(graph: ir.Graph, node: ir.Node, floats: dict[ir.Value, ir.Value]) -> None:
    """The steps as ONNX defines them, in floats; what they are called is remembered for the products."""
    x, (quantized, scale, zero_point) = node.inputs[0], node.outputs
    build = GraphBuilder(graph, str(quantized.name))
    zero, most = build.scalar(0.0, _WIDE), build.scalar(255.0, _WIDE)
    top = build("Max", [build("ReduceMax", [x], _WIDE, [], keepdims=0), zero], _WIDE, [])
    bottom = build("Min", [build("ReduceMin", [x], _WIDE, [], keepdims=0), zero], _WIDE, [])
    step = build("Div", [build("Sub", [top, bottom], _WIDE, []), most], _WIDE, [])
    # Zeros alone have no step of their own; with any, they are zeros again.
    is_empty = build("Equal", [step, zero], ir.DataType.BOOL, [])
    step = build("Where", [is_empty, build.scalar(1.0, _WIDE), step], _WIDE, [])
    middle = build("Round", [build("Div", [build("Sub", [zero, bottom], _WIDE, []), step], _WIDE, [])], _WIDE, [])
    middle = build("Clip", [middle, zero, most], _WIDE, [])
    rows = build("Round", [build("Div", [x, step], _WIDE)], _WIDE)
    steps = build("Clip", [build("Add", [rows, middle], _WIDE), zero, most], _WIDE, quantized.shape)
    build.insert_after(node)
    scale.replace_all_uses_with(step, replace_graph_outputs=True)
    floats[quantized], floats[zero_point] = steps, middle


def _multiply(graph: ir.Graph, node: ir.Node, floats: dict[ir.Value, ir.Value]) -> None:
    a, b, a_zero, b_zero = (*node.inputs, None, None)[:4]
    assert a is not None and b is not None
    build, output = GraphBuilder(graph, str(node.outputs[0].name)), node.outputs[0]
    left, right = _about_zero(build, a, a_zero, floats, node), _about_zero(build, b, b_zero, floats, node)
    kept = {name: each.value for name, each in node.attributes.items()}
    y = build(node.op_type.removesuffix("Integer"), [left, right], _WIDE, output.shape, **kept)
    users = [user for user, _ in output.uses()]
    casts = [user for user in users if is_standard(user, "Cast") and user.outputs[0].dtype == _WIDE]
    if output.is_graph_output() or len(casts) != len(users):
        y = build("Cast", [y], ir.DataType.INT32, output.shape, to=ir.DataType.INT32)
        build.replace(node, y)
        return
    build.replace(node, y)
    y.type = ir.TensorType(_WIDE)


def _about_zero(
    build: GraphBuilder, value: ir.Value, zero: ir.Value | None, floats: dict[ir.Value, ir.Value], node: ir.Node
) -> ir.Value:
    """Bytes less their zero point, as floats."""
    zeros = None if zero is None else constant_of(zero)
    is_constant = value.const_value is not None and not value.is_graph_input() and value.dtype in _BYTES
    if is_constant and (zero is None or zeros is not None):
        ones = np.ones(() if zeros is None else zeros.shape, np.float32)
        step = build.initializer(ir.tensor(ones, name=f"ones.{'_'.join(map(str, ones.shape))}"))
        # Zero points are one a column of a matrix, or one an output channel of a convolution.
        axis = {"axis": 0 if node.op_type == "ConvInteger" else 1} if ones.ndim else {}
        inputs = [value, step] if zero is None else [value, step, zero]
        return build("DequantizeLinear", inputs, _WIDE, value.shape, **axis)  # type: ignore[arg-type]
    found = floats[value] if value in floats else build.cast(value, _WIDE)
    if zero is None or (zeros is not None and not zeros.any()):
        return found
    shift = floats[zero] if zero in floats else build.cast(zero, _WIDE)
    if value is node.inputs[0] and shift.shape is not None and shift.shape.rank() == 1 and shift.shape[0] != 1:
        shift = build("Reshape", [shift, build.int64([-1, 1])], _WIDE)  # one a row
    return build("Sub", [found, shift], _WIDE, value.shape)
