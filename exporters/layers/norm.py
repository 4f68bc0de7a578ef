"""Normalisation layers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.dtype import DtypeModule


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis; statistics in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter([dim], name="weight")
        self.eps = eps

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.RMSNormalization(x, self.weight, axis=-1, epsilon=self.eps, stash_type=ir.DataType.FLOAT)


class PlainLayerNorm(DtypeModule):
    """``(x - mean(x)) / sqrt(var(x) + eps)`` over the last axis, without weights; statistics in float32.

    ONNX's operator has no form without a scale, so the norms of one width share a vector of ones.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        name = f"ones.{self.dim}"
        ones = op.builder.root.graph.initializers.get(name)
        if ones is None:
            values = np.ones(self.dim, self.dtype.numpy())
            ones = op.builder.initializer(ir.tensor(values, name=name), qualify=False)
        return op.LayerNormalization(x, ones, axis=-1, epsilon=self.eps, stash_type=ir.DataType.FLOAT)


def modulate(op: OpBuilder, x_BSD: ir.Value, scale_B1D: ir.Value, shift_B1D: ir.Value) -> ir.Value:
    """``x * (1 + scale) + shift``, the adaptive norm of diffusion transformers (https://arxiv.org/abs/2212.09748)."""
    return op.Add(op.Mul(x_BSD, op.Add(scale_B1D, 1.0)), shift_B1D)
