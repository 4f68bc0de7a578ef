"""Feed-forward blocks."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.activation import silu
from intaglio.exporters.layers.linear import Linear


class SwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))`` (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        gate = self.gate_proj(op, x)
        return self.down_proj(op, op.Mul(silu(op, gate), self.up_proj(op, x)))


class FusedSwiGLU(nn.Module):
    """:class:`SwiGLU` with the rows of gate and up in one projection, as diffusers' FLUX.2 has it."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.linear_in = Linear(hidden_size, 2 * intermediate_size)
        self.linear_out = Linear(intermediate_size, hidden_size)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        gate, up = op.Split(self.linear_in(op, x), num_outputs=2, axis=-1, _outputs=2)
        return self.linear_out(op, op.Mul(silu(op, gate), up))
