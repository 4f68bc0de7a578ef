"""Joins a product with the sum that it goes into."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import fused_product, is_product, is_standard, only_consumer, same_shape


class FuseResidualsPass(ir.passes.InPlacePass):
    """Turns ``residual + x @ weight`` of a quantized weight into one ``FusedGroupedQuantMatMul``.

    Left alone where something else reads the product, or where the sum would broadcast.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if not is_standard(node, "Add"):
                continue
            for residual, value in (node.inputs, node.inputs[::-1]):
                assert residual is not None and value is not None, "Add has two inputs"
                product = value.producer()
                if product is None or not is_product(product) or only_consumer(value) is not node:
                    continue
                if not same_shape(residual, value):
                    continue
                joined = fused_product([product], 1, residual=residual)
                replaced = [product, node]
                convenience.replace_nodes_and_values(
                    model.graph, node, replaced, [joined], node.outputs, joined.outputs
                )
                modified = True
                break
        return ir.passes.PassResult(model, modified=modified)
