"""Joins an RMSNorm with the projections that read it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    FUSED_PRODUCT,
    NORM_WEIGHT,
    X,
    fused_product,
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
            epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
            joined.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
            model.graph.remove(node, safe=True)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def _is_over_rows(node: ir.Node) -> bool:
    """Whether a norm is of float32, over the last axis alone, with a weight that is known to be a vector."""
    x, weight = node.inputs[0], node.inputs[1]
    if x is None or weight is None or x.dtype != ir.DataType.FLOAT or weight.dtype != ir.DataType.FLOAT:
        return False
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    last = x.shape is not None and axis == x.shape.rank() - 1
    return (axis == -1 or last) and weight.shape is not None and weight.shape.rank() == 1
