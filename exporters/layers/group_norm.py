"""Group normalisation (https://arxiv.org/abs/1803.08494), whole or with statistics that come from elsewhere."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.dtype import DtypeModule, cast


class GroupNorm(DtypeModule):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over groups of channels; statistics in float32."""

    def __init__(self, num_groups: int, num_channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter([num_channels], name="weight")
        self.bias = nn.Parameter([num_channels], name="bias")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps

    def forward(self, op: OpBuilder, x_BCHW: ir.Value, statistics: tuple[ir.Value, ir.Value] | None = None) -> ir.Value:
        """``x`` normalised by its own statistics, or by the given float32 ``(mean, variance)``, each ``[B, G]``."""
        if statistics is None:
            y_BCHW = op.GroupNormalization(
                x_BCHW,
                self.weight,
                self.bias,
                num_groups=self.num_groups,
                epsilon=self.eps,
                stash_type=ir.DataType.FLOAT,
            )
            y_BCHW.shape = x_BCHW.shape  # which the builder does not infer
            return y_BCHW
        mean_BC11 = self._per_channel(op, statistics[0])
        deviation_BC11 = self._per_channel(op, op.Sqrt(op.Add(statistics[1], self.eps)))
        weight_C11 = op.Unsqueeze(cast(op, self.weight, ir.DataType.FLOAT), [1, 2])
        bias_C11 = op.Unsqueeze(cast(op, self.bias, ir.DataType.FLOAT), [1, 2])
        centered = op.Sub(cast(op, x_BCHW, ir.DataType.FLOAT), mean_BC11)
        return cast(op, op.Add(op.Mul(centered, op.Div(weight_C11, deviation_BC11)), bias_C11), self.dtype)

    def _per_channel(self, op: OpBuilder, x_BG: ir.Value) -> ir.Value:
        repeated = op.Expand(op.Unsqueeze(x_BG, [2]), [1, 1, self.num_channels // self.num_groups])
        return op.Reshape(repeated, [0, self.num_channels, 1, 1])


def group_statistics(op: OpBuilder, x_BCHW: ir.Value, num_groups: int) -> tuple[ir.Value, ir.Value]:
    """Mean and variance of each group of channels, float32 ``[B, G]`` both."""

    def mean_of_rows(rows_BCH: ir.Value) -> ir.Value:
        # Rows come first: a runtime that adds up a whole group one by one loses three digits.
        return op.ReduceMean(op.Reshape(rows_BCH, [0, num_groups, -1]), [2], keepdims=1)

    x_BCHW = cast(op, x_BCHW, ir.DataType.FLOAT)
    mean_BG1 = mean_of_rows(op.ReduceMean(x_BCHW, [3], keepdims=0))
    distance_BCHW = op.Reshape(op.Sub(op.Reshape(x_BCHW, [0, num_groups, -1]), mean_BG1), op.Shape(x_BCHW))
    squares_BG1 = mean_of_rows(op.ReduceSumSquare(distance_BCHW, [3], keepdims=0))
    width = op.Cast(op.Shape(x_BCHW, start=3, end=4), to=ir.DataType.FLOAT)
    return op.Squeeze(mean_BG1, [2]), op.Squeeze(op.Div(squares_BG1, width), [2])
