"""Normalisation layers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.constants import shared_constant
from intaglio.exporters.layers.dtype import DtypeModule
from intaglio.exporters.layers.linear import Linear


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
        ones = shared_constant(op, f"ones.{self.dim}", np.ones(self.dim, self.dtype.numpy()))
        return op.LayerNormalization(x, ones, axis=-1, epsilon=self.eps, stash_type=ir.DataType.FLOAT)


def modulate(op: OpBuilder, x_BSD: ir.Value, scale_B1D: ir.Value, shift_B1D: ir.Value) -> ir.Value:
    """``x * (1 + scale) + shift``, the adaptive norm of diffusion transformers (https://arxiv.org/abs/2212.09748)."""
    return op.Add(op.Mul(x_BSD, op.Add(scale_B1D, 1.0)), shift_B1D)


class AdaLayerNormContinuous(nn.Module):
    """A norm modulated by a projection of ``silu(temb)`` ``[B, conditioning_dim]``: scale, then shift, no bias."""

    def __init__(self, dim: int, conditioning_dim: int, eps: float) -> None:
        super().__init__()
        self.linear = Linear(conditioning_dim, 2 * dim)
        self.norm = PlainLayerNorm(dim, eps)

    def forward(self, op: OpBuilder, x_BSD: ir.Value, silu_temb: ir.Value) -> ir.Value:
        mod_B1D = op.Unsqueeze(self.linear(op, silu_temb), [1])
        scale, shift = op.Split(mod_B1D, num_outputs=2, axis=-1, _outputs=2)
        return modulate(op, self.norm(op, x_BSD), scale, shift)
