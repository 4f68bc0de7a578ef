"""Joins a layer norm without weights with the scale and shift that follow it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    attribute,
    constant_of,
    is_over_last_axis,
    is_standard,
    modulates,
    only_consumer,
    remove_unread,
)
from intaglio.kernels.grouped_quant import DOMAIN


class FuseAdaptiveNormPass(ir.passes.InPlacePass):
    """Turns ``LayerNormalization(x) * (1 + scale) + shift`` into one ``AdaptiveLayerNorm``.

    The norm has no weights (ones, and no bias), scale and shift are ``[B, 1, D]``, all is float32. Left alone where
    something else reads a value in between.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if is_standard(node, "LayerNormalization") and _is_plain(node)]
        modified = [_join(model.graph, node) for node in nodes]
        return ir.passes.PassResult(model, modified=any(modified))


def _is_plain(node: ir.Node) -> bool:
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    if has_bias or len(node.outputs) != 1 or not is_over_last_axis(node):
        return False
    weight = constant_of(node.inputs[1])
    return weight is not None and bool((weight == 1).all())


def _join(graph: ir.Graph, node: ir.Node) -> bool:
    x, normed = node.inputs[0], node.outputs[0]
    multiply = only_consumer(normed)
    if x is None or multiply is None or not is_standard(multiply, "Mul"):
        return False
    factor = _other(multiply, normed)
    scale = _less_one(factor)
    add = only_consumer(multiply.outputs[0])
    if scale is None or add is None or not is_standard(add, "Add"):
        return False
    shift = _other(add, multiply.outputs[0])
    if not modulates(scale, x) or not modulates(shift, x):
        return False
    epsilon = ir.AttrFloat32("epsilon", attribute(node, "epsilon", 1e-5))
    joined = ir.Node(DOMAIN, "AdaptiveLayerNorm", [x, scale, shift], [epsilon], num_outputs=1, name=node.name)
    replaced = [node, multiply, add]
    convenience.replace_nodes_and_values(graph, add, replaced, [joined], add.outputs, joined.outputs)
    remove_unread(graph, [factor])
    return True


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """What ``value`` is multiplied by or added to."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _less_one(value: ir.Value | None) -> ir.Value | None:
    """``scale`` of a ``value`` that is ``scale + 1``."""
    add = value.producer() if value is not None else None
    if add is None or not is_standard(add, "Add"):
        return None
    for scale, one in (add.inputs, add.inputs[::-1]):
        number = constant_of(one)
        if number is not None and number.size == 1 and number.item() == 1:
            return scale
    return None
