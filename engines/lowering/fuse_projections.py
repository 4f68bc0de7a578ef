"""Joins the projections of one activation."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import X, fused_product, is_product, same_attributes


class FuseProjectionsPass(ir.passes.InPlacePass):
    """Turns several quantized products of one ``x`` (query, key and value) into one ``FusedGroupedQuantMatMul``.

    Those whose formats differ stay apart.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.graph is None or not is_product(node):
                continue
            x = node.inputs[X]
            assert x is not None, "a product has an x"
            found = [user for user in x.consumers() if is_product(user) and same_attributes([node, user])]
            group = list(dict.fromkeys([node, *found]))
            if len(group) < 2:
                continue
            joined = fused_product(group, len(group))
            outputs = [product.outputs[0] for product in group]
            # At the place of the first, which is before all who read one of them.
            convenience.replace_nodes_and_values(model.graph, node, group, [joined], outputs, joined.outputs)
            modified = True
        return ir.passes.PassResult(model, modified=modified)
