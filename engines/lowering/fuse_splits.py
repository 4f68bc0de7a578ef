"""Removes the cutting of rows whose parts are read where they lie."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import attribute, is_standard, row_part
from intaglio.kernels.grouped_quant import DOMAIN


class FuseSplitsPass(ir.passes.InPlacePass):
    """Removes ``Split`` where not all of its parts are read any more; what is still read becomes ``Slice``.

    A Split writes all its parts, also those that nothing reads. ``FusedAttention`` reads queries, keys and values where
    they lie in the rows. Runs after the other passes that read parts in place.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            if not is_standard(node, "Split") or row_part(node.outputs[0]) is None:
                continue
            for value in node.outputs:
                modified |= _attend_in_place(value)
            unread = [value for value in node.outputs if not value.uses() and not value.is_graph_output()]
            if not unread:
                continue
            for value in node.outputs:
                if value not in unread:
                    _slice(graph, node, value)
            graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


# Inputs of FusedAttention, the attributes that tell how many heads they have and how wide these are.
_ATTENDED = (
    ("query", "q_num_heads", "head_size"),
    ("key", "kv_num_heads", "head_size"),
    ("value", "kv_num_heads", "value_head_size"),
)


def _attend_in_place(value: ir.Value) -> bool:
    """Hands the whole rows to each FusedAttention that reads ``value``; whether there was one."""
    part, modified = row_part(value), False
    assert part is not None, "its sizes are known"
    for node, index in list(value.uses()):
        if (node.domain, node.op_type) != (DOMAIN, "FusedAttention") or index >= len(_ATTENDED):
            continue
        name, heads_name, size_name = _ATTENDED[index]
        heads = attribute(node, heads_name, 0)
        if part.rows.shape is None or part.rows.shape.rank() != 3 or not heads or part.size % heads:
            continue
        node.replace_input_with(index, part.rows)
        node.attributes[f"{name}_offset"] = ir.AttrInt64(f"{name}_offset", part.offset)
        node.attributes[size_name] = ir.AttrInt64(size_name, part.size // heads)
        modified = True
    return modified


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
