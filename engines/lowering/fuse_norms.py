"""Joins an RMSNorm with the projections that read it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    FUSED_PRODUCT,
    NORM_WEIGHT,
    X,
    attribute,
    fused_product,
    is_over_last_axis,
    is_product,
    is_standard,
    only_consumer,
)
from intaglio.kernels.grouped_quant import DOMAIN


class FuseNormsPass(ir.passes.InPlacePass):
    """Turns ``RMSNormalization`` and the one product, or ``FusedGroupedQuantMatMul``, that reads it into one node.

    Left alone where something else reads the norm as well. Runs after the passes that join products.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if not is_standard(node, "RMSNormalization") or not _is_over_rows(node):
                continue
            user = only_consumer(node.outputs[0])
            if user is None or user.inputs[X] is not node.outputs[0]:
                continue
            if is_product(user):
                joined = fused_product([user], 1)
                convenience.replace_nodes_and_values(model.graph, user, [user], [joined], user.outputs, joined.outputs)
            elif (user.domain, user.op_type) == (DOMAIN, FUSED_PRODUCT) and user.inputs[NORM_WEIGHT] is None:
                joined = user
            else:
                continue
            joined.replace_input_with(X, node.inputs[0])
            joined.replace_input_with(NORM_WEIGHT, node.inputs[1])
            joined.attributes["epsilon"] = ir.AttrFloat32("epsilon", attribute(node, "epsilon", 1e-5))
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _is_over_rows(node: ir.Node) -> bool:
    """Whether a norm is over the last axis alone, with a weight of float32 that is known to be a vector."""
    weight = node.inputs[1]
    if weight is None or weight.dtype != ir.DataType.FLOAT or weight.shape is None or weight.shape.rank() != 1:
        return False
    return is_over_last_axis(node)
