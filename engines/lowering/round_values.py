"""Rounds the values of a float32 graph as one of bfloat16 would, for a runtime that computes in float32 only."""

from __future__ import annotations

import onnx_ir as ir

from intaglio.engines.lowering.widen_dtype import WidenDtypePass

_MOVES = {"Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
          "Transpose", "Unsqueeze"}  # fmt: skip


class RoundValuesPass(ir.passes.InPlacePass):
    """Computes what is of ``dtype`` in float32 and rounds each result to ``dtype``, as a GPU does.

    The graph takes, gives and holds float32 afterwards, values of ``domains`` and weights excepted, which stay as they
    are (:class:`~intaglio.engines.lowering.widen_dtype.WidenDtypePass`). Inputs are rounded as well; what only moves
    values is not, since it would round twice. Bodies of If and Loop and of functions are left alone.
    """

    def __init__(self, dtype: ir.DataType, domains: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._dtype, self._domains = dtype, domains

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        rounded = [value for value in graph.inputs if value.dtype == self._dtype]
        rounded += [v for node in graph for v in node.outputs if v.dtype == self._dtype and node.op_type not in _MOVES]
        # A cast from float32 is where the dtype begins.
        casts = [node for node in graph if node.op_type == "Cast" and node.outputs[0].dtype == self._dtype]
        rounded += [node.outputs[0] for node in casts]
        result = WidenDtypePass(self._dtype, self._domains)(model)
        for value in rounded:
            if value.dtype == ir.DataType.FLOAT:
                self._round(graph, value)
        return result

    def _round(self, graph: ir.Graph, value: ir.Value) -> None:
        narrow = ir.node("Cast", [value], {"to": self._dtype}, name=f"{value.name}.rounded")
        wide = ir.node("Cast", [narrow.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{value.name}.rounded.wide")
        for node, dtype in ((narrow, self._dtype), (wide, ir.DataType.FLOAT)):
            made = node.outputs[0]
            made.name, made.type, made.shape = node.name, ir.TensorType(dtype), value.shape
        result = wide.outputs[0]
        if value.is_graph_output():
            result.name, value.name = value.name, f"{value.name}.unrounded"
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        narrow.replace_input_with(0, value)
        producer = value.producer()
        if producer is None:
            graph.insert_before(graph.node(0), [narrow, wide])
        else:
            graph.insert_after(producer, [narrow, wide])
