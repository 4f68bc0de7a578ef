"""Removes the cutting of rows whose parts are read where they lie."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import is_standard, row_part


class FuseSplitsPass(ir.passes.InPlacePass):
    """Removes ``Split`` where nothing reads its parts any more; what is still read becomes ``Slice``.

    A Split writes all its parts, also those that nothing reads. Runs after the passes that read parts in place.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            unread = [value for value in node.outputs if not value.uses() and not value.is_graph_output()]
            if not is_standard(node, "Split") or not unread or row_part(node.outputs[0]) is None:
                continue
            for value in node.outputs:
                if value not in unread:
                    _slice(graph, node, value)
            graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _slice(graph: ir.Graph, split: ir.Node, value: ir.Value) -> None:
    part = row_part(value)
    assert part is not None, "its sizes are known"
    ends = [_constant(graph, number) for number in (part.offset, part.offset + part.size, -1)]
    node = ir.node("Slice", [part.rows, *ends], name=f"{value.name}.Slice")
    new = node.outputs[0]
    new.name, new.type, new.shape = value.name, value.type, value.shape
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    value.name = f"{value.name}.unread"
    graph.insert_after(split, node)


def _constant(graph: ir.Graph, number: int) -> ir.Value:
    name = f"split.{number}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array([number], np.int64), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
