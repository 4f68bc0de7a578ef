"""A decoder cut into stages that need a band of its rows at a time, with the numbers of the whole one.

Group norms are over whole pictures, so the decoder is cut at each of them, from the upsampler before its last two
blocks on: only there activations are large. A stage takes a band of whole rows, its neighbour rows above and below,
and the statistics of the whole activation; it gives the rows that follow and their share of the next statistics.

- ``vae_tiles_attention_in``, ``vae_tiles_attention`` (some queries, all keys) and ``vae_tiles_attention_out`` run what
  is small, and never hold the scores of all queries
- ``vae_tiles_upN_upsample``; ``vae_tiles_upN_resnetM_conv1`` and ``…_conv2`` (which adds the block's input);
  ``vae_tiles_out`` run bands; N counts the decoder's blocks as ``up_blocks`` does

``row_mask`` is 1 for rows of the picture and 0 for rows beyond its border, which a convolution has to see as zeros
after norm and activation. Shapes: R rows of a band, P = R + 2 rows with their neighbours, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.architecture import Input, Stage
from intaglio.exporters.bundle import Dim
from intaglio.exporters.layers.activation import silu
from intaglio.exporters.layers.conv import Conv2d, upsample_nearest
from intaglio.exporters.layers.group_norm import GroupNorm, group_statistics

# How many blocks run in bands, counted from the picture.
BANDED_BLOCKS = 2
# A band has its neighbour rows already; columns are padded as ever.
_COLUMNS_ONLY = (0, 1, 0, 1)
_BAND = ("band_rows", "band_width")
_Values = Mapping[str, ir.Value]


@dataclass(frozen=True)
class TiledDecoder:
    """What the stages need to know: the decoder's widths from the picture inwards, and how latents get into it.

    ``unpack`` gives the decoder's input of a model and the stage's latents.
    """

    block_out_channels: tuple[int, ...]
    layers: int
    groups: int
    latents: Input
    unpack: Callable[[Any, OpBuilder, ir.Value], ir.Value]
    dtype: ir.DataType

    def stages(self) -> dict[str, Stage]:
        """All stages in the order in which they run; none for a decoder that has too few blocks to cut."""
        widths = self.block_out_channels[::-1]
        first = len(widths) - BANDED_BLOCKS
        if first < 1:
            return {}
        stages = self._attention(widths[0], first)
        previous = widths[first - 1]
        for block in range(first, len(widths)):
            stages[f"vae_tiles_up{block - 1}_upsample"] = self._upsample(block - 1, previous)
            for resnet in range(self.layers):
                before = previous if resnet == 0 else widths[block]
                name = f"vae_tiles_up{block}_resnet{resnet}"
                stages[f"{name}_conv1"] = self._conv1(block, resnet, before)
                stages[f"{name}_conv2"] = self._conv2(block, resnet, before, widths[block])
            previous = widths[block]
        stages["vae_tiles_out"] = Stage(self._banded(previous), _out)
        return stages

    def _attention(self, channels: int, first: int) -> dict[str, Stage]:
        tokens = ("batch", "attention_tokens", channels)
        picture = ("batch", channels, "decoder_height", "decoder_width")
        inputs = {
            "vae_tiles_attention": (
                Input("query", self.dtype, ("batch", "query_tokens", channels)),
                Input("key", self.dtype, tokens),
                Input("value", self.dtype, tokens),
            ),
            "vae_tiles_attention_out": (
                Input("attended", self.dtype, tokens),
                Input("residual", self.dtype, picture),
            ),
        }

        def before(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            decoder = model.decoder
            latents = self.unpack(model, op, x["latents"])
            with _within(op, decoder):
                residual = decoder.conv_in(op, latents)
                with _within(op, decoder.mid_block):
                    residual = decoder.mid_block.resnets[0](op, residual)
                    attention = decoder.mid_block.attentions[0]
                    with _within(op, attention):
                        projected = attention.project(op, residual)
            residual.shape = ir.Shape(picture)
            for value in projected:
                value.shape = ir.Shape(tokens)
            return {"residual": residual, **dict(zip(("query", "key", "value"), projected, strict=True))}

        def attend(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            attention = model.decoder.mid_block.attentions[0]
            attended = attention.attend(op, x["query"], x["key"], x["value"])
            attended.shape = ir.Shape(("batch", "query_tokens", channels))
            return {"attended": attended}

        def after(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            decoder = model.decoder
            with _within(op, decoder):
                with _within(op, decoder.mid_block):
                    attention = decoder.mid_block.attentions[0]
                    with _within(op, attention):
                        y_BCHW = attention.output(op, x["attended"], x["residual"])
                    y_BCHW = decoder.mid_block.resnets[1](op, y_BCHW)
                for block in decoder.up_blocks[: first - 1]:
                    y_BCHW = block(op, y_BCHW)
                with _within(op, decoder.up_blocks[first - 1]):
                    for resnet in decoder.up_blocks[first - 1].resnets:
                        y_BCHW = resnet(op, y_BCHW)
            _name(y_BCHW, "banded_height", "banded_width")
            return {"y": y_BCHW}

        return {
            "vae_tiles_attention_in": Stage((self.latents,), before),
            "vae_tiles_attention": Stage(inputs["vae_tiles_attention"], attend),
            "vae_tiles_attention_out": Stage(inputs["vae_tiles_attention_out"], after),
        }

    def _banded(self, channels: int) -> tuple[Input, ...]:
        statistics = ("batch", self.groups)
        return (
            Input("x", self.dtype, ("batch", channels, "halo_rows", "band_width")),
            Input("mean", ir.DataType.FLOAT, statistics),
            Input("variance", ir.DataType.FLOAT, statistics),
            Input("row_mask", self.dtype, ("halo_rows",)),
        )

    def _upsample(self, block: int, channels: int) -> Stage:
        def upsample(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            decoder = model.decoder
            sampler = decoder.up_blocks[block].upsamplers[0]
            with _within(op, decoder, decoder.up_blocks[block], sampler):
                # Of the neighbours' two copies each, the convolution needs the nearer one.
                rows = op.Slice(upsample_nearest(op, x["x"]), [1], [-1], [2])
                y_BCRW = sampler.conv(op, rows, _COLUMNS_ONLY)
                return self._with_statistics(op, y_BCRW, ("upsampled_rows", "upsampled_width"))

        return Stage((self._banded(channels)[0],), upsample)

    def _conv1(self, block: int, resnet: int, channels: int) -> Stage:
        def conv1(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            decoder = model.decoder
            module = decoder.up_blocks[block].resnets[resnet]
            with _within(op, decoder, decoder.up_blocks[block], module):
                return self._with_statistics(op, _norm_silu_conv(op, module.norm1, module.conv1, x))

        return Stage(self._banded(channels), conv1)

    def _conv2(self, block: int, resnet: int, before: int, channels: int) -> Stage:
        def conv2(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
            decoder = model.decoder
            module = decoder.up_blocks[block].resnets[resnet]
            residual = x["residual"]
            with _within(op, decoder, decoder.up_blocks[block], module):
                y_BCRW = _norm_silu_conv(op, module.norm2, module.conv2, x)
                if module.conv_shortcut is not None:
                    residual = module.conv_shortcut(op, residual)
                return self._with_statistics(op, op.Add(residual, y_BCRW))

        residual = Input("residual", self.dtype, ("batch", before, "band_rows", "band_width"))
        return Stage((*self._banded(channels), residual), conv2)

    def _with_statistics(self, op: OpBuilder, y_BCRW: ir.Value, sides: tuple[str, str] = _BAND) -> dict[str, ir.Value]:
        mean, variance = group_statistics(op, y_BCRW, self.groups)
        _name(y_BCRW, *sides)
        mean.shape = variance.shape = ir.Shape(("batch", self.groups))
        return {"y": y_BCRW, "y_mean": mean, "y_variance": variance}


def _out(model: Any, op: OpBuilder, x: _Values) -> dict[str, ir.Value]:
    decoder = model.decoder
    with _within(op, decoder):
        y_BCRW = _norm_silu_conv(op, decoder.conv_norm_out, decoder.conv_out, x)
    _name(y_BCRW, *_BAND)
    return {"y": y_BCRW}


def _name(y_BCHW: ir.Value, *sides: str) -> None:
    assert y_BCHW.shape is not None, "a convolution's channels are known"
    y_BCHW.shape = ir.Shape(["batch", y_BCHW.shape[1], *sides])


def _norm_silu_conv(op: OpBuilder, norm: GroupNorm, conv: Conv2d, x: _Values) -> ir.Value:
    y_BCPW = silu(op, norm(op, x["x"], (x["mean"], x["variance"])))
    return conv(op, op.Mul(y_BCPW, op.Unsqueeze(x["row_mask"], [1])), _COLUMNS_ONLY)


@contextmanager
def _within(op: OpBuilder, *modules: nn.Module) -> Iterator[None]:
    # A parameter takes its name from the modules around it: these are entered without being run.
    for module in modules:
        op.builder.push_module(module.name or "", type(module).__qualname__)
    try:
        yield
    finally:
        for _ in modules:
            op.builder.pop_module()


def tiled_dims(blocks: int, largest: int) -> dict[str, Dim]:
    """The dims of the stages of a decoder of ``blocks``, whose picture is at most ``largest`` pixels wide and high."""
    factor = 2 ** (blocks - 1)
    most = largest // factor
    sides = {f"decoder_{side}": Dim(min=1, max=most, expression=f"{side} / {factor}") for side in ("height", "width")}
    tokens = Dim(min=1, max=most**2, expression="decoder_height * decoder_width")
    return {
        **sides,
        "attention_tokens": tokens,
        "query_tokens": Dim(min=1, opt=min(512, most**2), max=most**2),
        "band_rows": Dim(min=1, opt=min(64, largest), max=largest),
        "halo_rows": Dim(min=3, max=largest + 2, expression="band_rows + 2"),
        "band_width": Dim(min=1, opt=min(512, largest), max=largest),
    }
