"""What our plugins of full TensorRT compute, as model-local functions: for a runtime that has none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import onnx_ir as ir
from onnxscript import OpBuilder, build_function

from intaglio.engines.lowering.attention_plugin import MASKED, PLAIN
from intaglio.engines.lowering.ternary_plugin import FEW_ROWS, MANY_ROWS
from intaglio.kernels.grouped_quant import DOMAIN

_OPSET = 23
_ATTENTION = {
    "scale": ir.AttributeType.FLOAT,
    "softcap": ir.AttributeType.FLOAT,
    "is_causal": ir.AttributeType.INT,
}


@cache
def plugin_bodies() -> tuple[ir.Function, ...]:
    """A function for each plugin's node, as the passes make them: float32 inside, rounded to the dtype of ``x``."""
    products = [_function(name, ["x", "words", "scales"], {"group_size": ir.AttributeType.INT}, _ternary_product)
                for name in (MANY_ROWS, FEW_ROWS)]  # fmt: skip
    inputs = ["query", "key", "value"]
    return (
        *products,
        _function(PLAIN, inputs, _ATTENTION, _attention),
        _function(MASKED, [*inputs, "mask"], _ATTENTION, _attention),
    )


def add_plugin_bodies(model: ir.Model) -> None:
    """Gives a model that was lowered for full TensorRT the functions of the plugins that it has nodes of."""
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    for function in plugin_bodies():
        if function.name in used:
            model.functions[function.identifier()] = function.clone()
    if used:
        model.graph.opset_imports.setdefault(DOMAIN, 1)


def _ternary_product(op: OpBuilder, x: ir.Value, words: ir.Value, scales: ir.Value) -> ir.Value:
    group_size = _stated(op, "Constant", [], {"value_int": ("group_size", ir.AttributeType.INT)})
    shifts = op.Cast(op.Range(0, 32, 2), to=ir.DataType.UINT32)
    fields = op.BitShift(op.Unsqueeze(op.Cast(words, to=ir.DataType.UINT32), [-1]), shifts, direction="RIGHT")
    codes = op.Cast(op.BitwiseAnd(fields, op.Cast(3, to=ir.DataType.UINT32)), to=ir.DataType.FLOAT)
    shape = op.Concat([0], [-1], op.Reshape(group_size, [1]), axis=0)
    # A word at a time, and then a group.
    groups = op.Reshape(op.Reshape(op.Sub(codes, 1.0), [0, -1]), shape)
    scaled = op.Mul(groups, op.Unsqueeze(op.Cast(scales, to=ir.DataType.FLOAT), [-1]))
    weight = op.Transpose(op.Reshape(scaled, [0, -1]), perm=[1, 0])
    return op.CastLike(op.MatMul(op.Cast(x, to=ir.DataType.FLOAT), weight), x)


def _attention(op: OpBuilder, *inputs: ir.Value) -> ir.Value:
    return _stated(op, "Attention", list(inputs), {name: (name, kind) for name, kind in _ATTENTION.items()})


def _stated(
    op: OpBuilder, op_type: str, inputs: list[ir.Value], attributes: dict[str, tuple[str, ir.AttributeType]]
) -> ir.Value:
    """A node whose attributes are the function's own, which the builder has no spelling for."""
    references = [ir.RefAttr(name, stated, kind) for name, (stated, kind) in attributes.items()]
    node = ir.Node("", op_type, inputs=inputs, attributes=references)
    op.builder.graph.append(node)
    node.outputs[0].name = f"{op_type}.stated"
    return node.outputs[0]


def _function(
    name: str, inputs: list[str], attributes: dict[str, ir.AttributeType], body: Callable[..., ir.Value]
) -> ir.Function:
    return build_function(
        body,
        [ir.Value(name=each) for each in inputs],
        domain=DOMAIN,
        name=name,
        attributes=[ir.Attr(each, kind, None) for each, kind in attributes.items()],
        opset_imports={"": _OPSET},
    )
