"""Joins the gate of a feed-forward layer whose two halves come from one projection."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    attribute,
    is_standard,
    only_consumer,
    row_part,
    silu_input,
)
from intaglio.kernels.grouped_quant import DOMAIN


class FuseSwiGLUPass(ir.passes.InPlacePass):
    """Turns ``silu(gate) * up``, both cut from the same rows, into one ``SwiGLU`` that reads the rows as they lie.

    Where the result is joined to the end of other rows, it is written there at once. The Split stays for
    :class:`~intaglio.engines.lowering.fuse_splits.FuseSplitsPass`. Left alone where something else reads a value in
    between.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if is_standard(node, "Mul") and node.graph is not None:
                modified |= any(_join(model.graph, node, *pair) for pair in (node.inputs, node.inputs[::-1]))
        return ir.passes.PassResult(model, modified=modified)


def _join(graph: ir.Graph, node: ir.Node, activated: ir.Value | None, up: ir.Value | None) -> bool:
    found = silu_input(activated)
    if found is None or up is None or only_consumer(up) is not node:
        return False
    gate, activation = found
    if gate.is_graph_output() or set(gate.consumers()) != set(activation):
        return False
    gate_part, up_part = row_part(gate), row_part(up)
    if gate_part is None or up_part is None or gate_part.rows is not up_part.rows or gate_part.size != up_part.size:
        return False
    inputs, replaced = [gate_part.rows], [*activation, node]
    concat = only_consumer(node.outputs[0])
    if concat is not None and _appends(concat, node.outputs[0]):
        assert concat.inputs[0] is not None
        inputs.append(concat.inputs[0])
        replaced.append(concat)
    sizes = {"width": gate_part.size, "gate_offset": gate_part.offset, "up_offset": up_part.offset}
    joined = ir.node("SwiGLU", inputs, sizes, domain=DOMAIN, name=node.name)
    last = replaced[-1]
    convenience.replace_nodes_and_values(graph, last, replaced, [joined], last.outputs, joined.outputs)
    return True


def _appends(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node writes ``value`` behind the rows of one other value."""
    if not is_standard(node, "Concat") or len(node.inputs) != 2 or node.inputs[1] is not value:
        return False
    before = node.inputs[0]
    if before is None or before.shape is None or before.dtype != ir.DataType.FLOAT:
        return False
    return attribute(node, "axis", 0) in (-1, before.shape.rank() - 1)
