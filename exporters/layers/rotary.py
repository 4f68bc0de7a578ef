"""Rotary position embeddings over one axis (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines for ``position_ids``, computed once in a graph and shared by its layers.

    They are computed rather than looked up: a table to a published context of 131072 tokens would be
    larger than some models.
    """

    def __init__(self, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        # In float64: the angle of a far position is as exact as float32 can hold it.
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        self._inv_freq = (rope_theta**-exponents).astype(np.float32)

    def forward(self, op: OpBuilder, position_ids_BS: ir.Value) -> tuple[ir.Value, ir.Value]:
        """``cos`` and ``sin``, float32 ``[B, S, E / 2]``, of int64 ``[B, S]``."""
        inv_freq = op.initializer(ir.tensor(self._inv_freq, name="rotary_emb.inv_freq"))
        positions = op.Cast(op.Unsqueeze(position_ids_BS, [-1]), to=ir.DataType.FLOAT)
        angles = op.Mul(positions, inv_freq)
        return op.Cos(angles), op.Sin(angles)


def apply_rotary(op: OpBuilder, x_BHSE: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotates the halves of each head (the layout of transformers, not the interleaved one of GGUF)."""
    return op.RotaryEmbedding(x_BHSE, cos, sin, interleaved=0)
