"""Computes matrix products of halves in float32, for targets that have no others."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class WidenProductsPass(ir.passes.InPlacePass):
    """Casts the named inputs of a node from half precision to float32, and its output back: rounded once.

    ``inputs`` says which, by domain and op type: the scales of a quantized weight stay in their own dtype. A
    constant weight that is cast becomes a float32 copy at load, where the runtime folds constants.
    """

    def __init__(self, inputs: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
        super().__init__()
        self._inputs = dict(inputs)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        widened: dict[ir.Value, ir.Value] = {}  # one cast of a value, however many products share it
        modified = False
        for node in list(model.graph):
            indices = self._inputs.get((node.domain, node.op_type))
            if indices is None:
                continue
            for index in indices:
                value = node.inputs[index]
                if value is None or value.dtype not in _HALVES:
                    continue
                if value not in widened:
                    cast = widened_value(value)
                    model.graph.insert_before(node, cast)
                    widened[value] = cast.outputs[0]
                node.replace_input_with(index, widened[value])
                modified = True
            if node.outputs[0].dtype in _HALVES:
                _narrow(model.graph, node)
        return ir.passes.PassResult(model, modified=modified)


def widened_value(value: ir.Value) -> ir.Node:
    """A Cast of ``value`` to float32, not yet in a graph."""
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    result = cast.outputs[0]
    result.name, result.dtype, result.shape = f"{value.name}.float32", ir.DataType.FLOAT, value.shape
    return cast


def _narrow(graph: ir.Graph, node: ir.Node) -> None:
    wide = node.outputs[0]
    # What came out under this name comes out under it still: it may be an output of the graph.
    assert wide.dtype is not None
    narrow = ir.Value(name=wide.name, type=ir.TensorType(wide.dtype), shape=wide.shape)
    wide.replace_all_uses_with(narrow, replace_graph_outputs=True)
    graph.insert_after(node, ir.node("Cast", [wide], {"to": wide.dtype}, outputs=[narrow]))
    wide.name, wide.dtype = f"{wide.name}.unrounded", ir.DataType.FLOAT
