"""Activations that are no op of their own."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder


def silu(op: OpBuilder, x: ir.Value) -> ir.Value:
    """``x * sigmoid(x)`` (https://arxiv.org/abs/1702.03118), any shape."""
    return op.Mul(x, op.Sigmoid(x))
