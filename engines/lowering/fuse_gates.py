"""Joins the two projections of a gated feed-forward layer with the gate."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    fused_product,
    is_product,
    is_standard,
    only_consumer,
    same_attributes,
    silu_input,
)


class FuseGatesPass(ir.passes.InPlacePass):
    """Turns ``silu(x @ gate) * (x @ up)`` of quantized weights into one ``FusedGroupedQuantMatMul``.

    Left alone where the formats of the weights differ, or where something else reads a value in between.
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
    products = [gate.producer(), up.producer()]
    nodes = [product for product in products if product is not None and is_product(product)]
    if len(nodes) != 2 or gate.is_graph_output() or set(gate.consumers()) != set(activation):
        return False
    if nodes[0].inputs[0] is not nodes[1].inputs[0] or not same_attributes(nodes):
        return False
    joined = fused_product(nodes, 1, attributes={"gated": 1})
    replaced = [*nodes, *activation, node]
    convenience.replace_nodes_and_values(graph, node, replaced, [joined], node.outputs, joined.outputs)
    return True
