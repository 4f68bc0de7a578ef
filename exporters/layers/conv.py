"""Two-dimensional convolutions and the changes of size around them."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn


class Conv2d(nn.Module):
    """A convolution with bias, as ``torch.nn.Conv2d``.

    ``pads`` are rows and columns of zeros before and after: top, left, bottom, right.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter([out_channels, in_channels, kernel_size, kernel_size], name="weight")
        self.bias = nn.Parameter([out_channels], name="bias")
        self.kernel_size, self.stride, self.pads = kernel_size, stride, pads

    def forward(self, op: OpBuilder, x_BCHW: ir.Value, pads: tuple[int, int, int, int] | None = None) -> ir.Value:
        """``[B, C', H', W']``. ``pads`` take the place of the layer's own."""
        return op.Conv(
            x_BCHW,
            self.weight,
            self.bias,
            kernel_shape=[self.kernel_size, self.kernel_size],
            pads=list(self.pads if pads is None else pads),
            strides=[self.stride, self.stride],
        )


def upsample_nearest(op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
    """Every pixel twice in both directions: ``[B, C, 2 * H, 2 * W]``."""
    return op.Resize(
        x_BCHW,
        None,
        [1.0, 1.0, 2.0, 2.0],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
