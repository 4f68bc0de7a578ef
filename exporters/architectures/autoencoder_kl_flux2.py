"""AutoencoderKLFlux2, the autoencoder of FLUX.2 (https://huggingface.co/black-forest-labs/FLUX.2-dev).

- the convolutional autoencoder of latent diffusion, with 32 latent channels at an eighth of the picture's size
- the transformer sees patches of 2x2 latents as channels, normalised by the running statistics of a batch norm
  without weights; both stages begin or end there, as the published pipeline does
- ``decoder_block_out_channels`` gives the decoder widths of its own (FLUX.2-small-decoder)

Parameter names are those of diffusers' ``AutoencoderKLFlux2``. Shapes: B batch, L latent channels, K = L * patch ** 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.errors import ConfigError
from intaglio.exporters.architecture import Architecture, Input, Stage
from intaglio.exporters.bundle import Dim
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor
from intaglio.exporters.checkpoints.vae_names import diffusers_vae_tensors
from intaglio.exporters.config import ConfigKeys, shown
from intaglio.exporters.layers.autoencoder import Decoder, Encoder
from intaglio.exporters.layers.conv import Conv2d
from intaglio.exporters.layers.dtype import DtypeModule, cast
from intaglio.exporters.layers.taps import tap
from intaglio.exporters.layers.tiled_decoder import TiledDecoder, tiled_dims

# Published geometries, of which the constants that no tensor shows are known.
_ENCODER = (128, 256, 512, 512)
_DECODERS = ((128, 256, 512, 512), (96, 192, 384, 384))
_PUBLISHED = {"norm_num_groups": 32, "batch_norm_eps": 1e-4}
# Pixels of a picture that nobody gives a size, unless the model was made for smaller ones.
_SIZE = 512
_MAX_BLOCKS, _MAX_LAYERS, _MAX_CHANNELS = 8, 32, 65536  # a lie beyond them would have us build for hours


@dataclass(frozen=True)
class AutoencoderKLFlux2Config:
    """The published keys that the graphs depend on; widths are those from the picture inwards.

    ``sample_size`` are the pixels of a picture that the model was made for.
    """

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    decoder_block_out_channels: tuple[int, ...]
    layers_per_block: int
    norm_num_groups: int
    use_quant_conv: bool
    use_post_quant_conv: bool
    mid_block_add_attention: bool
    patch_size: int
    batch_norm_eps: float
    sample_size: int | None = None

    @property
    def factor(self) -> int:
        """Pixels a packed latent is wide and high."""
        return 2 ** (len(self.block_out_channels) - 1) * self.patch_size

    @property
    def packed_channels(self) -> int:
        """Channels of the packed latents."""
        return self.latent_channels * self.patch_size**2

    @classmethod
    def from_keys(cls, keys: ConfigKeys) -> AutoencoderKLFlux2Config:
        """Reads and checks a configuration. Raises ConfigError."""
        keys.choice("act_fn", "silu")
        groups = keys.integer("norm_num_groups")
        widths = _widths(keys, "block_out_channels", groups)
        # Absent or null means the encoder's.
        own = keys.has("decoder_block_out_channels")
        decoder_widths = _widths(keys, "decoder_block_out_channels", groups) if own else widths
        if len(decoder_widths) != len(widths):
            found = f"has {len(decoder_widths)} widths, block_out_channels has {len(widths)}; expected as many"
            raise keys.wrong("decoder_block_out_channels", found)
        for key, built in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
            # A file alone has no types, and its tensors show which blocks they are.
            if keys.has(key) and keys.values[key] != [built] * len(widths):
                raise keys.wrong(key, f"is {shown(keys.values[key])}; built is only {len(widths)} times {built!r}")
        layers = keys.integer("layers_per_block")
        if layers > _MAX_LAYERS:
            raise keys.wrong("layers_per_block", f"is {layers}, expected at most {_MAX_LAYERS}")
        return cls(
            in_channels=_channels(keys, "in_channels"),
            out_channels=_channels(keys, "out_channels"),
            latent_channels=_channels(keys, "latent_channels"),
            block_out_channels=widths,
            decoder_block_out_channels=decoder_widths,
            layers_per_block=layers,
            norm_num_groups=groups,
            use_quant_conv=keys.boolean("use_quant_conv"),
            use_post_quant_conv=keys.boolean("use_post_quant_conv"),
            mid_block_add_attention=keys.boolean("mid_block_add_attention"),
            patch_size=_patch_size(keys),
            batch_norm_eps=keys.number("batch_norm_eps"),
            # Takes no part in the arithmetic, so a file alone may do without it.
            sample_size=keys.integer("sample_size") if keys.has("sample_size") else None,
        )


def _channels(keys: ConfigKeys, key: str) -> int:
    count = keys.integer(key)
    if count > _MAX_CHANNELS:
        raise keys.wrong(key, f"is {count}, expected at most {_MAX_CHANNELS}")
    return count


def _list(keys: ConfigKeys, key: str) -> list[int]:
    values: Any = keys.values[key] if keys.has(key) else keys.integer(key)  # which says that it is missing
    good = isinstance(values, list | tuple) and all(type(value) is int and 0 < value < 2**20 for value in values)
    if not good:
        raise keys.wrong(key, f"is {shown(values)}, expected a list of integers above zero")
    return list(values)


def _widths(keys: ConfigKeys, key: str, groups: int) -> tuple[int, ...]:
    widths = _list(keys, key)
    if not 1 <= len(widths) <= _MAX_BLOCKS:
        raise keys.wrong(key, f"has {len(widths)} widths, expected 1 to {_MAX_BLOCKS}")
    if odd := [width for width in widths if width % groups]:
        raise keys.wrong(key, f"has the width {odd[0]}, which norm_num_groups, {groups}, does not divide")
    return tuple(widths)


def _patch_size(keys: ConfigKeys) -> int:
    sizes = _list(keys, "patch_size")
    if len(sizes) != 2 or sizes[0] != sizes[1] or sizes[0] > 16:
        raise keys.wrong("patch_size", f"is {sizes}; built are only square patches, [1, 1] to [16, 16]")
    return sizes[0]


class LatentNorm(DtypeModule):
    """Running mean and standard deviation of the packed latents, ``[K, 1, 1]`` each; computed in float32."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.running_mean = nn.Parameter([channels], name="running_mean")
        self.running_var = nn.Parameter([channels], name="running_var")
        self.eps = eps

    def forward(self, op: OpBuilder) -> tuple[ir.Value, ir.Value]:
        std = op.Sqrt(op.Add(cast(op, self.running_var, ir.DataType.FLOAT), self.eps))
        return op.Unsqueeze(self.running_mean, [1, 2]), op.Unsqueeze(cast(op, std, self.dtype), [1, 2])


class AutoencoderKLFlux2(nn.Module):
    def __init__(self, config: AutoencoderKLFlux2Config) -> None:
        super().__init__()
        latent, layers, groups = config.latent_channels, config.layers_per_block, config.norm_num_groups
        attention = config.mid_block_add_attention
        self.encoder = Encoder(
            config.in_channels,
            latent,
            config.block_out_channels,
            layers,
            groups,
            mid_block_add_attention=attention,
        )
        self.decoder = Decoder(
            latent,
            config.out_channels,
            config.decoder_block_out_channels,
            layers,
            groups,
            mid_block_add_attention=attention,
        )
        self.quant_conv = Conv2d(2 * latent, 2 * latent, 1) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(latent, latent, 1) if config.use_post_quant_conv else None
        self.bn = LatentNorm(config.packed_channels, config.batch_norm_eps)
        self.patch_size, self.latent_channels = config.patch_size, latent

    def unpack(self, op: OpBuilder, latents_BKHW: ir.Value) -> ir.Value:
        """What the decoder takes, ``[B, L, H * patch, W * patch]``, of latents as the transformer leaves them."""
        mean, std = self.bn(op)
        x_BKHW = tap(op.Add(op.Mul(latents_BKHW, std), mean), "vae_bn_denorm")
        # Channel L * p * p + y * p + x goes to row y and column x of the patch: the mode CRD.
        x_BLHW = op.DepthToSpace(x_BKHW, blocksize=self.patch_size, mode="CRD")
        x_BLHW = tap(x_BLHW, "vae_unpatchified")
        return x_BLHW if self.post_quant_conv is None else tap(self.post_quant_conv(op, x_BLHW), "vae_post_quant_conv")

    def decode(self, op: OpBuilder, latents_BKHW: ir.Value) -> ir.Value:
        """``[B, K, H, W]`` to a picture ``[B, out channels, H * factor, W * factor]``, in about -1 to 1."""
        return self.decoder(op, self.unpack(op, latents_BKHW))

    def encode(self, op: OpBuilder, image_BCHW: ir.Value) -> ir.Value:
        """A picture in -1 to 1 to its most probable latents, as the transformer takes them."""
        moments = self.encoder(op, image_BCHW)
        if self.quant_conv is not None:
            moments = self.quant_conv(op, moments)
        mean_BLHW = op.Slice(moments, [0], [self.latent_channels], [1])
        # SpaceToDepth puts the place in the patch before the channel; the model has it after.
        by_place = np.arange(self.latent_channels * self.patch_size**2).reshape(-1, self.latent_channels)
        order = op.initializer(ir.tensor(by_place.T.ravel().copy(), name="patch_order"))
        x_BKHW = op.Gather(op.SpaceToDepth(mean_BLHW, blocksize=self.patch_size), order, axis=1)
        mean, std = self.bn(op)
        return op.Div(op.Sub(x_BKHW, mean), std)


def _stages(
    config: AutoencoderKLFlux2Config, hidden_state_layers: tuple[int, ...], dtype: ir.DataType
) -> dict[str, Stage]:
    """``vae_decoder``: packed latents to a picture; ``vae_encoder``: the way back, without noise.

    ``vae_tiles_…``: the decoder in bands, for a decoder with attention and at least three blocks.
    """
    latents_shape = ("batch", config.packed_channels, "latent_height", "latent_width")

    def decode(model: Any, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        sample = model.decode(op, x["latents"])
        sample.shape = ir.Shape(["batch", config.out_channels, "height", "width"])
        return {"sample": sample}

    def encode(model: Any, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        latents = model.encode(op, x["image"])
        latents.shape = ir.Shape(latents_shape)
        return {"latents": latents}

    latents = Input("latents", dtype, latents_shape)
    image = Input("image", dtype, ("batch", config.in_channels, "height", "width"))
    tiles = TiledDecoder(
        config.decoder_block_out_channels,
        config.layers_per_block + 1,
        config.norm_num_groups,
        latents,
        AutoencoderKLFlux2.unpack,
        dtype,
    )
    return {
        "vae_decoder": Stage((latents,), decode),
        "vae_encoder": Stage((image,), encode),
        **(tiles.stages() if config.mid_block_add_attention else {}),
    }


def _dims(config: AutoencoderKLFlux2Config) -> dict[str, Dim]:
    factor = config.factor
    most = 4096 // factor * factor
    usual = min(_SIZE, config.sample_size or _SIZE)
    size = Dim(min=factor, opt=min(usual // factor * factor or factor, most), max=most, multiple_of=factor)
    latent = {
        f"latent_{name}": Dim(min=1, max=most // factor, expression=f"{name} / {factor}")
        for name in ("height", "width")
    }
    tiles = tiled_dims(len(config.block_out_channels), most)
    return {"batch": Dim(min=1, opt=1, max=64), "height": size, "width": size, **latent, **tiles}


def _recognize(checkpoint: Checkpoint) -> ConfigKeys | None:
    """The configuration that the shapes of a file show; what they do not, only for the published geometries."""
    tensors = diffusers_vae_tensors(checkpoint.tensors)

    def size(name: str, axis: int, rank: int) -> int | None:
        tensor = tensors.get(name)
        return tensor.shape[axis] if tensor is not None and len(tensor.shape) == rank else None

    def widths(prefix: str) -> list[int]:
        found = (size(f"{prefix}.{i}.resnets.0.conv1.weight", 0, 4) for i in range(_MAX_BLOCKS))
        return [width for width in found if width]

    latent, packed = size("decoder.conv_in.weight", 1, 4), size("bn.running_mean", 0, 1)
    decoder, encoder = widths("decoder.up_blocks")[::-1], widths("encoder.down_blocks")
    # The batch norm tells it from other autoencoders.
    if not latent or not packed or not decoder:
        return None
    layers = sum(f"decoder.up_blocks.0.resnets.{i}.conv1.weight" in tensors for i in range(_MAX_LAYERS + 1))
    values: dict[str, Any] = {
        "act_fn": "silu",
        "in_channels": size("encoder.conv_in.weight", 1, 4),
        "out_channels": size("decoder.conv_out.weight", 0, 4),
        "latent_channels": latent,
        "block_out_channels": encoder or None,
        "decoder_block_out_channels": decoder,
        "layers_per_block": layers - 1,
        "use_quant_conv": "quant_conv.weight" in tensors,
        "use_post_quant_conv": "post_quant_conv.weight" in tensors,
        "mid_block_add_attention": "decoder.mid_block.attentions.0.to_q.weight" in tensors,
        "patch_size": [math.isqrt(packed // latent)] * 2,
    }
    assumed: dict[str, Any] = {}
    if tuple(decoder) in _DECODERS and tuple(encoder) in ((), _ENCODER):
        assumed = dict(_PUBLISHED)
        if not encoder:  # a decoder alone
            assumed |= {"in_channels": 3, "block_out_channels": list(_ENCODER)}
    return ConfigKeys({**values, **assumed, **checkpoint.config}, str(checkpoint.path), assumed=assumed)


def _respell(
    tensors: Mapping[str, CheckpointTensor], config: AutoencoderKLFlux2Config
) -> Mapping[str, CheckpointTensor]:
    return diffusers_vae_tensors(tensors)


def _no_gguf(checkpoint: Checkpoint) -> ConfigKeys:
    raise ConfigError(f"{checkpoint.path}: an autoencoder is read from safetensors, not from GGUF")


ARCHITECTURE = Architecture(
    roles=("vae",),
    model_types=("autoencoder_kl_flux2",),
    class_names=("AutoencoderKLFlux2",),
    gguf_architectures=(),
    read_config=AutoencoderKLFlux2Config.from_keys,
    build=AutoencoderKLFlux2,
    stages=_stages,
    dims=_dims,
    gguf_config=_no_gguf,
    # Counts training steps.
    unneeded=lambda name, config: name == "bn.num_batches_tracked",
    recognize=_recognize,
    respell=_respell,
)
