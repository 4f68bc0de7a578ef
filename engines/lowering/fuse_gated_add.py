"""Joins a gate with the residual sum that it goes into."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import is_standard, modulates, only_consumer, same_shape
from intaglio.kernels.grouped_quant import DOMAIN


class FuseGatedAddPass(ir.passes.InPlacePass):
    """Turns ``x + gate * z`` into one ``GatedAdd``, where gate is ``[B, 1, D]`` and all is float32.

    Left alone where something else reads the product.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if is_standard(node, "Add"):
                modified |= any(_join(model.graph, node, *pair) for pair in (node.inputs, node.inputs[::-1]))
        return ir.passes.PassResult(model, modified=modified)


def _join(graph: ir.Graph, node: ir.Node, x: ir.Value | None, gated: ir.Value | None) -> bool:
    multiply = gated.producer() if gated is not None else None
    if x is None or gated is None or multiply is None or node.graph is None or not is_standard(multiply, "Mul"):
        return False
    if x.dtype != ir.DataType.FLOAT or only_consumer(gated) is not node:
        return False
    for gate, z in (multiply.inputs, multiply.inputs[::-1]):
        if z is not None and modulates(gate, x) and same_shape(x, z):
            joined = ir.node("GatedAdd", [x, gate, z], domain=DOMAIN, name=node.name)
            replaced = [multiply, node]
            convenience.replace_nodes_and_values(graph, node, replaced, [joined], node.outputs, joined.outputs)
            return True
    return False
