"""Embeddings of diffusion timesteps."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.activation import silu
from intaglio.exporters.layers.constants import shared_constant
from intaglio.exporters.layers.dtype import DtypeModule, cast
from intaglio.exporters.layers.linear import Linear

_MAX_PERIOD = 10000


class Timesteps(DtypeModule):
    """Cosines, then sines, of a timestep times ``channels / 2`` frequencies (https://arxiv.org/abs/2006.11239).

    Angles are float32; the result has the graph's dtype.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        # Exponents in float32, as models were trained: angles of some thousand show the last bit.
        exponents = np.float32(-math.log(_MAX_PERIOD)) * np.arange(half, dtype=np.float32) / np.float32(half)
        self._frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)

    def forward(self, op: OpBuilder, timestep_B: ir.Value) -> ir.Value:
        """``[B, channels]`` of float32 ``[B]``."""
        frequencies = shared_constant(op, f"timestep_frequencies.{2 * len(self._frequencies)}", self._frequencies)
        angles = op.Mul(op.Unsqueeze(timestep_B, [1]), frequencies)
        return cast(op, op.Concat(op.Cos(angles), op.Sin(angles), axis=-1), self.dtype)


class TimestepEmbedding(nn.Module):
    """``linear_2(silu(linear_1(x)))`` without biases."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = Linear(channels, dim)
        self.linear_2 = Linear(dim, dim)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return self.linear_2(op, silu(op, self.linear_1(op, x)))
