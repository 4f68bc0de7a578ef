"""Encoder and decoder of the convolutional autoencoders of latent diffusion (https://arxiv.org/abs/2112.10752).

Parameter names are those of diffusers' ``Encoder`` and ``Decoder``. Shapes: B batch, C channels, H height, W width,
T pixels in a row (H * W).
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.layers.activation import silu
from intaglio.exporters.layers.conv import Conv2d, upsample_nearest
from intaglio.exporters.layers.dtype import cast
from intaglio.exporters.layers.group_norm import GroupNorm
from intaglio.exporters.layers.linear import Linear
from intaglio.exporters.layers.taps import tap

# Of every group norm in these models; no config has a key for it.
NORM_EPS = 1e-6
# As many zeros around a picture as a 3x3 kernel reaches beyond it.
_AROUND = (1, 1, 1, 1)


class ResnetBlock2D(nn.Module):
    """``shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))``."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(groups, in_channels, NORM_EPS)
        self.conv1 = Conv2d(in_channels, out_channels, 3, pads=_AROUND)
        self.norm2 = GroupNorm(groups, out_channels, NORM_EPS)
        self.conv2 = Conv2d(out_channels, out_channels, 3, pads=_AROUND)
        self.conv_shortcut = None if in_channels == out_channels else Conv2d(in_channels, out_channels, 1)
        self.in_channels, self.out_channels = in_channels, out_channels

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        h_BCHW = self.conv1(op, silu(op, self.norm1(op, x_BCHW)))
        h_BCHW = self.conv2(op, silu(op, self.norm2(op, h_BCHW)))
        return op.Add(x_BCHW if self.conv_shortcut is None else self.conv_shortcut(op, x_BCHW), h_BCHW)


class SpatialAttention(nn.Module):
    """One head of self-attention over the pixels of a normed picture, plus the picture; softmax in float32."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = GroupNorm(groups, channels, NORM_EPS)
        self.to_q = Linear(channels, channels, bias=True)
        self.to_k = Linear(channels, channels, bias=True)
        self.to_v = Linear(channels, channels, bias=True)
        self.to_out = nn.ModuleList([Linear(channels, channels, bias=True)])
        self.channels = channels

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        return self.output(op, self.attend(op, *self.project(op, x_BCHW)), x_BCHW)

    def project(self, op: OpBuilder, x_BCHW: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query, key and value, ``[B, T, C]`` each."""
        pixels_BTC = op.Transpose(op.Reshape(self.group_norm(op, x_BCHW), [0, 0, -1]), perm=[0, 2, 1])
        return self.to_q(op, pixels_BTC), self.to_k(op, pixels_BTC), self.to_v(op, pixels_BTC)

    def attend(self, op: OpBuilder, query_BQC: ir.Value, key_BTC: ir.Value, value_BTC: ir.Value) -> ir.Value:
        """``[B, Q, C]`` for any of the queries.

        Not the op Attention: no target has a kernel for one head this wide, and TensorRT refuses it.
        """
        # Scaled first: a float16 product of unscaled queries could overflow.
        scaled_BQC = op.Mul(query_BQC, self.channels**-0.5)
        scores_BQT = op.MatMul(scaled_BQC, op.Transpose(key_BTC, perm=[0, 2, 1]))
        weights_BQT = op.Softmax(cast(op, scores_BQT, ir.DataType.FLOAT), axis=-1)
        return op.MatMul(cast(op, weights_BQT, value_BTC.dtype or ir.DataType.FLOAT), value_BTC)

    def output(self, op: OpBuilder, attended_BTC: ir.Value, x_BCHW: ir.Value) -> ir.Value:
        """The projected attention in the shape of ``x``, added to it."""
        out_BCT = op.Transpose(self.to_out[0](op, attended_BTC), perm=[0, 2, 1])
        out_BCHW = op.Reshape(out_BCT, op.Shape(x_BCHW))
        out_BCHW.shape = x_BCHW.shape
        return op.Add(out_BCHW, x_BCHW)


class MidBlock2D(nn.Module):
    """Two residual blocks, with attention between them or none."""

    def __init__(self, channels: int, groups: int, *, add_attention: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([SpatialAttention(channels, groups)] if add_attention else [])
        self.resnets = nn.ModuleList([ResnetBlock2D(channels, channels, groups) for _ in range(2)])

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        x_BCHW = self.resnets[0](op, x_BCHW)
        for attention in self.attentions:
            x_BCHW = attention(op, x_BCHW)
        return self.resnets[1](op, x_BCHW)


class Downsample2D(nn.Module):
    """Half the size: a stride of two over the picture with zeros at its right and bottom only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, stride=2, pads=(0, 0, 1, 1))

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        return self.conv(op, x_BCHW)


class Upsample2D(nn.Module):
    """Twice the size: nearest neighbours, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, pads=_AROUND)

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        return self.conv(op, upsample_nearest(op, x_BCHW))


class DownEncoderBlock2D(nn.Module):
    """Residual blocks, then half the size in all blocks but the last."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, *, last: bool) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * (layers - 1)
        self.resnets = nn.ModuleList([ResnetBlock2D(width, out_channels, groups) for width in widths])
        self.downsamplers = nn.ModuleList([] if last else [Downsample2D(out_channels)])

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        for resnet in self.resnets:
            x_BCHW = resnet(op, x_BCHW)
        for downsampler in self.downsamplers:
            x_BCHW = downsampler(op, x_BCHW)
        return x_BCHW


class UpDecoderBlock2D(nn.Module):
    """Residual blocks, then twice the size in all blocks but the last."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, *, last: bool) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * (layers - 1)
        self.resnets = nn.ModuleList([ResnetBlock2D(width, out_channels, groups) for width in widths])
        self.upsamplers = nn.ModuleList([] if last else [Upsample2D(out_channels)])

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        for resnet in self.resnets:
            x_BCHW = resnet(op, x_BCHW)
        for upsampler in self.upsamplers:
            x_BCHW = upsampler(op, x_BCHW)
        return x_BCHW


class Encoder(nn.Module):
    """A picture ``[B, C, H, W]`` to mean and log variance of its latents, ``[B, 2 * latent channels, H / f, W / f]``.

    ``block_out_channels`` are those of the blocks from the picture inwards, and f is 2 to the number of blocks - 1.
    """

    def __init__(
        self,
        in_channels: int,
        latent_channels: int,
        block_out_channels: tuple[int, ...],
        layers_per_block: int,
        groups: int,
        *,
        mid_block_add_attention: bool,
    ) -> None:
        super().__init__()
        first, innermost = block_out_channels[0], block_out_channels[-1]
        inputs = (first, *block_out_channels)
        self.conv_in = Conv2d(in_channels, first, 3, pads=_AROUND)
        self.down_blocks = nn.ModuleList(
            [
                DownEncoderBlock2D(inputs[i], width, layers_per_block, groups, last=i == len(block_out_channels) - 1)
                for i, width in enumerate(block_out_channels)
            ]
        )
        self.mid_block = MidBlock2D(innermost, groups, add_attention=mid_block_add_attention)
        self.conv_norm_out = GroupNorm(groups, innermost, NORM_EPS)
        self.conv_out = Conv2d(innermost, 2 * latent_channels, 3, pads=_AROUND)

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        x_BCHW = self.conv_in(op, x_BCHW)
        for block in self.down_blocks:
            x_BCHW = block(op, x_BCHW)
        x_BCHW = self.mid_block(op, x_BCHW)
        return self.conv_out(op, silu(op, self.conv_norm_out(op, x_BCHW)))


class Decoder(nn.Module):
    """Latents ``[B, latent channels, H, W]`` to a picture ``[B, out channels, H * f, W * f]``; see :class:`Encoder`."""

    def __init__(
        self,
        latent_channels: int,
        out_channels: int,
        block_out_channels: tuple[int, ...],
        layers_per_block: int,
        groups: int,
        *,
        mid_block_add_attention: bool,
    ) -> None:
        super().__init__()
        outputs = block_out_channels[::-1]
        inputs = (outputs[0], *outputs)
        self.conv_in = Conv2d(latent_channels, outputs[0], 3, pads=_AROUND)
        self.mid_block = MidBlock2D(outputs[0], groups, add_attention=mid_block_add_attention)
        self.up_blocks = nn.ModuleList(
            [
                UpDecoderBlock2D(inputs[i], width, layers_per_block + 1, groups, last=i == len(outputs) - 1)
                for i, width in enumerate(outputs)
            ]
        )
        self.conv_norm_out = GroupNorm(groups, outputs[-1], NORM_EPS)
        self.conv_out = Conv2d(outputs[-1], out_channels, 3, pads=_AROUND)

    def forward(self, op: OpBuilder, x_BCHW: ir.Value) -> ir.Value:
        x_BCHW = tap(self.conv_in(op, x_BCHW), "vae_conv_in")
        x_BCHW = tap(self.mid_block(op, x_BCHW), "vae_mid")
        for i, block in enumerate(self.up_blocks):
            x_BCHW = tap(block(op, x_BCHW), f"vae_up{i}")
        x_BCHW = tap(self.conv_norm_out(op, x_BCHW), "vae_conv_norm_out")
        return self.conv_out(op, silu(op, x_BCHW))
