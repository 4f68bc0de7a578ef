"""The dtype of a graph, and the float32 islands in it.

Weights, activations and the key-value cache have the graph's dtype. Islands, each declared where it is computed:
the statistics of a norm, the softmax of an attention, rotary angles, the product with a quantized weight, logits.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

# By their names on the command line and in bundle.json, as NumPy spells them.
DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_FLOAT16_MAX = 65504.0


class DtypeModule(nn.Module):
    """A module that has to know the graph's dtype, since its inputs need not have it."""

    dtype = ir.DataType.FLOAT


def set_dtype(model: nn.Module, dtype: ir.DataType) -> None:
    """Gives every parameter of a model that is not yet quantized the graph's ``dtype``."""
    for module in model.modules():
        if isinstance(module, DtypeModule):
            module.dtype = dtype
    for parameter in model.parameters():
        parameter.type = ir.TensorType(dtype)


def cast(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """``x`` in ``dtype``; the value itself if it has it."""
    return x if x.dtype == dtype else op.Cast(x, to=dtype)


def clip_float16(op: OpBuilder, x: ir.Value) -> ir.Value:
    """``x`` with what overflowed in a float16 graph put back to its largest magnitudes; ``x`` itself in others."""
    return op.Clip(x, -_FLOAT16_MAX, _FLOAT16_MAX) if x.dtype == ir.DataType.FLOAT16 else x
