"""The ops of the domain ``intaglio`` as model-local functions, whose bodies are their definition.

An engine that has a kernel under an op's name takes the node and never sees the body. onnxruntime
runs the body where no custom op is registered, other runtimes after inlining it. Run as it stands
with constant folding on, the body unpacks constant weights to float32 at load: every compiled target
lowers the node instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import onnx_ir as ir
from onnxscript import OpBuilder, build_function

from intaglio.kernels.grouped_quant import DOMAIN

OPSET = 23


def _attribute(op: OpBuilder, name: str) -> ir.Value:
    # The builder has no spelling for a reference to a function's attribute.
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    reference = ir.RefAttr("value_int", name, ir.AttributeType.INT)
    op.builder.graph.append(ir.Node("", "Constant", inputs=[], attributes=[reference], outputs=[value]))
    return value


def _dequantize(op: OpBuilder, codes: ir.Value, scales: ir.Value, offsets: ir.Value) -> ir.Value:
    bits, group_size, zero_point = (_attribute(op, n) for n in ("bits", "group_size", "zero_point"))
    shifts = op.Cast(op.Range(0, 8, bits), to=ir.DataType.UINT8)
    mask = op.Cast(op.Sub(op.Pow(2, bits), 1), to=ir.DataType.UINT8)
    fields = op.BitwiseAnd(op.BitShift(op.Unsqueeze(codes, [-1]), shifts, direction="RIGHT"), mask)
    groups = op.Reshape(fields, op.Concat([0], [-1], op.Reshape(group_size, [1]), axis=0))
    values = op.Sub(op.Cast(groups, to=ir.DataType.INT32), op.Cast(zero_point, to=ir.DataType.INT32))
    scaled = op.Mul(op.Cast(values, to=ir.DataType.FLOAT), op.Unsqueeze(op.Cast(scales, to=ir.DataType.FLOAT), [-1]))
    weight = op.Add(scaled, op.Unsqueeze(op.Cast(offsets, to=ir.DataType.FLOAT), [-1]))
    return op.Reshape(weight, [0, -1])


def _matmul(op: OpBuilder, x: ir.Value, codes: ir.Value, scales: ir.Value, offsets: ir.Value) -> ir.Value:
    weight = op.Transpose(_dequantize(op, codes, scales, offsets), perm=[1, 0])
    return op.CastLike(op.MatMul(op.Cast(x, to=ir.DataType.FLOAT), weight), x)


def _function(name: str, inputs: list[str], body: Callable[..., ir.Value]) -> ir.Function:
    return build_function(
        body,
        [ir.Value(name=n) for n in inputs],
        domain=DOMAIN,
        name=name,
        attributes=[ir.Attr(n, ir.AttributeType.INT, None) for n in ("bits", "group_size", "zero_point")],
        opset_imports={"": OPSET},
    )


@cache
def grouped_quant_matmul() -> ir.Function:
    """``GroupedQuantMatMul(x, codes, scales, offsets) -> y``; attributes bits, group_size, zero_point.

    ``x`` is float32, float16 or bfloat16 ``[..., in]``, the weight as in :mod:`intaglio.kernels.grouped_quant`;
    ``y`` ``[..., out]`` is ``x`` times the transposed weight, computed in float32 and rounded to the dtype of ``x``.
    """
    return _function("GroupedQuantMatMul", ["x", "codes", "scales", "offsets"], _matmul)


@cache
def grouped_quant_dequantize() -> ir.Function:
    """``GroupedQuantDequantize(codes, scales, offsets) -> weight``; attributes as in the matmul.

    ``weight`` is float32 ``[out, in]``. Meant for rows gathered from a packed embedding, never for a
    whole constant weight.
    """
    return _function("GroupedQuantDequantize", ["codes", "scales", "offsets"], _dequantize)
