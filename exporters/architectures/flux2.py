"""FLUX.2 (https://bfl.ai/blog/flux-2): a rectified-flow transformer over image and text tokens, dev and klein.

- double-stream blocks: image and text have weights of their own and attend jointly, text first
- single-stream blocks: both as one sequence; attention and SwiGLU run in parallel between one projection in, one out
- shift, scale and gate of all blocks of a kind come from one projection of the timestep (and guidance, in dev)
- rotary embeddings over four axes (time, height, width, position in the text), pairs interleaved; queries and
  keys pass an RMSNorm first; no attention mask, no biases

Float32 islands of float16 and bfloat16 graphs: the statistics of norms, softmax, rotary angles, timestep sinusoids
and products with quantized weights. A float16 graph clips each residual sum to finite values, as diffusers does for
the text stream and the joint one.

Parameter names are those of diffusers' ``Flux2Transformer2DModel``; the reference implementation is
https://github.com/black-forest-labs/flux2. Legend: B batch, I image tokens (references included), T text tokens,
S = T + I, D hidden width, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.architecture import Architecture, Input, Stage
from intaglio.exporters.bundle import Dim
from intaglio.exporters.checkpoints.flux2_spellings import (
    flux2_gguf_config,
    flux2_gguf_name,
    flux2_modules,
    recognize_flux2,
    respell_flux2,
)
from intaglio.exporters.config import ConfigKeys
from intaglio.exporters.layers.activation import silu
from intaglio.exporters.layers.attention import attention, image_part, merge_heads, text_part
from intaglio.exporters.layers.dtype import clip_float16
from intaglio.exporters.layers.linear import Linear
from intaglio.exporters.layers.mlp import FusedSwiGLU
from intaglio.exporters.layers.norm import AdaLayerNormContinuous, PlainLayerNorm, RMSNorm, modulate
from intaglio.exporters.layers.rotary import MultiAxisRotaryEmbedding, apply_interleaved_rotary
from intaglio.exporters.layers.taps import tap
from intaglio.exporters.layers.timestep import TimestepEmbedding, Timesteps

_AXES = 4
# Of each half of a double-stream modulation; the text's begin with c_.
_MODULATIONS = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")

# What no published model comes near, and what a lie would have us build.
_MAX_WIDTH = 2**22


@dataclass(frozen=True)
class Flux2Config:
    """The published keys that the graph depends on."""

    patch_size: int
    in_channels: int
    out_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    timestep_guidance_channels: int
    mlp_ratio: float
    axes_dims_rope: tuple[int, ...]
    rope_theta: float
    eps: float
    guidance_embeds: bool

    @property
    def hidden_size(self) -> int:
        """Width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def mlp_hidden_size(self) -> int:
        """Width between the two projections of a feed-forward layer."""
        return int(self.hidden_size * self.mlp_ratio)

    @classmethod
    def from_keys(cls, keys: ConfigKeys) -> Flux2Config:
        """Reads and checks a configuration. Raises ConfigError."""
        in_channels = keys.integer("in_channels")
        head_dim, axes = keys.integer("attention_head_dim"), keys.integers("axes_dims_rope", minimum=2)
        if sum(axes) != head_dim or len(axes) != _AXES or any(dim % 2 for dim in axes):
            raise keys.wrong(
                "axes_dims_rope", f"is {list(axes)}, expected {_AXES} even widths that add up to {head_dim}"
            )
        channels = keys.integer("timestep_guidance_channels", minimum=2)
        if channels % 2 or channels > _MAX_WIDTH:
            raise keys.wrong("timestep_guidance_channels", f"is {channels}, expected an even number to {_MAX_WIDTH}")
        heads, mlp_ratio = keys.integer("num_attention_heads"), keys.number("mlp_ratio")
        for key, width in (("num_attention_heads", heads * head_dim), ("mlp_ratio", heads * head_dim * mlp_ratio)):
            if not 1 <= width <= _MAX_WIDTH:
                raise keys.wrong(key, f"gives a width of {width:g}, expected 1 to {_MAX_WIDTH}")
        return cls(
            patch_size=keys.integer("patch_size"),
            in_channels=in_channels,
            # Null, or absent, means as many as go in: so diffusers writes it for the published models.
            out_channels=keys.integer("out_channels", absent=in_channels),
            num_layers=keys.integer("num_layers"),
            num_single_layers=keys.integer("num_single_layers"),
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=keys.integer("joint_attention_dim"),
            timestep_guidance_channels=channels,
            mlp_ratio=mlp_ratio,
            axes_dims_rope=axes,
            rope_theta=keys.number("rope_theta"),
            eps=keys.number("eps"),
            # Younger than FLUX.2 dev, whose config.json lacks it; without the embedder its weights would be missing.
            guidance_embeds=keys.boolean("guidance_embeds", absent=True),
        )


class Flux2TimestepGuidanceEmbeddings(nn.Module):
    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        channels, width = config.timestep_guidance_channels, config.hidden_size
        self.time_proj = Timesteps(channels)
        self.timestep_embedder = TimestepEmbedding(channels, width)
        self.guidance_embedder = TimestepEmbedding(channels, width) if config.guidance_embeds else None

    def forward(self, op: OpBuilder, timestep_B: ir.Value, guidance_B: ir.Value | None) -> ir.Value:
        temb_BD = self.timestep_embedder(op, self.time_proj(op, op.Mul(timestep_B, 1000.0)))
        if self.guidance_embedder is None:
            return temb_BD
        guided = self.guidance_embedder(op, self.time_proj(op, op.Mul(guidance_B, 1000.0)))
        return op.Add(temb_BD, guided)


class Flux2Modulation(nn.Module):
    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.linear = Linear(dim, parts * dim)
        self.parts = parts

    def forward(self, op: OpBuilder, silu_temb_BD: ir.Value) -> tuple[ir.Value, ...]:
        """Triples of shift, scale and gate, each ``[B, 1, D]``."""
        mod = op.Unsqueeze(self.linear(op, silu_temb_BD), [1])
        return op.Split(mod, num_outputs=self.parts, axis=-1, _outputs=self.parts)


class Flux2Attention(nn.Module):
    """Image and text tokens, projected apart, attend jointly."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.attention_head_dim
        self.heads, self.head_dim = config.num_attention_heads, head_dim
        self.to_q, self.to_k, self.to_v = Linear(width, width), Linear(width, width), Linear(width, width)
        self.norm_q, self.norm_k = RMSNorm(head_dim, config.eps), RMSNorm(head_dim, config.eps)
        self.to_out = nn.ModuleList([Linear(width, width)])
        self.norm_added_q, self.norm_added_k = RMSNorm(head_dim, config.eps), RMSNorm(head_dim, config.eps)
        self.add_q_proj, self.add_k_proj = Linear(width, width), Linear(width, width)
        self.add_v_proj, self.to_add_out = Linear(width, width), Linear(width, width)

    def forward(
        self, op: OpBuilder, x_BID: ir.Value, e_BTD: ir.Value, cos: ir.Value, sin: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        q_BIHE, k_BIHE, v_BIHE = (self._heads(op, proj(op, x_BID)) for proj in (self.to_q, self.to_k, self.to_v))
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        q_BTHE, k_BTHE, v_BTHE = (self._heads(op, proj(op, e_BTD)) for proj in added)
        q_BSHE = op.Concat(self.norm_added_q(op, q_BTHE), self.norm_q(op, q_BIHE), axis=1)
        k_BSHE = op.Concat(self.norm_added_k(op, k_BTHE), self.norm_k(op, k_BIHE), axis=1)
        out_BSD = _attend(op, q_BSHE, k_BSHE, op.Concat(v_BTHE, v_BIHE, axis=1), cos, sin, self.head_dim)
        image, text = image_part(op, out_BSD, e_BTD, x_BID), text_part(op, out_BSD, e_BTD)
        return self.to_out[0](op, image), self.to_add_out(op, text)

    def _heads(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return op.Reshape(x, [0, 0, self.heads, self.head_dim])


class Flux2TransformerBlock(nn.Module):
    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.eps
        self.norm1, self.norm1_context = PlainLayerNorm(width, eps), PlainLayerNorm(width, eps)
        self.attn = Flux2Attention(config)
        self.norm2, self.norm2_context = PlainLayerNorm(width, eps), PlainLayerNorm(width, eps)
        self.ff = FusedSwiGLU(width, config.mlp_hidden_size)
        self.ff_context = FusedSwiGLU(width, config.mlp_hidden_size)

    def forward(
        self,
        op: OpBuilder,
        x_BID: ir.Value,
        e_BTD: ir.Value,
        mod: tuple[ir.Value, ...],
        c_mod: tuple[ir.Value, ...],
        cos: ir.Value,
        sin: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = mod
        c_shift_msa, c_scale_msa, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = c_mod
        normed = modulate(op, self.norm1(op, x_BID), scale_msa, shift_msa)
        c_normed = modulate(op, self.norm1_context(op, e_BTD), c_scale_msa, c_shift_msa)
        attended, c_attended = self.attn(op, normed, c_normed, cos, sin)
        x_BID = _residual(op, x_BID, gate_msa, attended)
        e_BTD = _residual(op, e_BTD, c_gate_msa, c_attended)
        fed = self.ff(op, modulate(op, self.norm2(op, x_BID), scale_mlp, shift_mlp))
        c_fed = self.ff_context(op, modulate(op, self.norm2_context(op, e_BTD), c_scale_mlp, c_shift_mlp))
        return _residual(op, x_BID, gate_mlp, fed), _residual(op, e_BTD, c_gate_mlp, c_fed)


class Flux2ParallelSelfAttention(nn.Module):
    """Attention and SwiGLU side by side: both between one projection in and one out."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        width, self.mlp_width = config.hidden_size, config.mlp_hidden_size
        self.width, self.heads, self.head_dim = width, config.num_attention_heads, config.attention_head_dim
        self.to_qkv_mlp_proj = Linear(width, 3 * width + 2 * self.mlp_width)
        self.norm_q, self.norm_k = RMSNorm(self.head_dim, config.eps), RMSNorm(self.head_dim, config.eps)
        self.to_out = Linear(width + self.mlp_width, width)

    def forward(self, op: OpBuilder, x_BSD: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        sizes = [self.width] * 3 + [self.mlp_width] * 2
        q, k, v, gate, up = op.Split(self.to_qkv_mlp_proj(op, x_BSD), sizes, axis=-1, _outputs=5)
        q_BSHE, k_BSHE, v_BSHE = (op.Reshape(x, [0, 0, self.heads, self.head_dim]) for x in (q, k, v))
        out_BSD = _attend(op, self.norm_q(op, q_BSHE), self.norm_k(op, k_BSHE), v_BSHE, cos, sin, self.head_dim)
        return self.to_out(op, op.Concat(out_BSD, op.Mul(silu(op, gate), up), axis=-1))


class Flux2SingleTransformerBlock(nn.Module):
    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.norm = PlainLayerNorm(config.hidden_size, config.eps)
        self.attn = Flux2ParallelSelfAttention(config)

    def forward(
        self, op: OpBuilder, x_BSD: ir.Value, mod: tuple[ir.Value, ...], cos: ir.Value, sin: ir.Value
    ) -> ir.Value:
        shift, scale, gate = mod
        attended = self.attn(op, modulate(op, self.norm(op, x_BSD), scale, shift), cos, sin)
        return _residual(op, x_BSD, gate, attended)


class Flux2Transformer2DModel(nn.Module):
    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.pos_embed = MultiAxisRotaryEmbedding(config.axes_dims_rope, config.rope_theta)
        self.time_guidance_embed = Flux2TimestepGuidanceEmbeddings(config)
        self.double_stream_modulation_img = Flux2Modulation(width, 6)
        self.double_stream_modulation_txt = Flux2Modulation(width, 6)
        self.single_stream_modulation = Flux2Modulation(width, 3)
        self.x_embedder = Linear(config.in_channels, width)
        self.context_embedder = Linear(config.joint_attention_dim, width)
        self.transformer_blocks = nn.ModuleList([Flux2TransformerBlock(config) for _ in range(config.num_layers)])
        self.single_transformer_blocks = nn.ModuleList(
            [Flux2SingleTransformerBlock(config) for _ in range(config.num_single_layers)]
        )
        self.norm_out = AdaLayerNormContinuous(width, width, config.eps)
        self.proj_out = Linear(width, config.patch_size**2 * config.out_channels)

    def forward(
        self,
        op: OpBuilder,
        hidden_states_BIC: ir.Value,
        encoder_hidden_states_BTJ: ir.Value,
        timestep_B: ir.Value,
        img_ids_BIA: ir.Value,
        txt_ids_BTA: ir.Value,
        guidance_B: ir.Value | None,
    ) -> ir.Value:
        silu_temb_BD = silu(op, self.time_guidance_embed(op, timestep_B, guidance_B))
        mod = self.double_stream_modulation_img(op, silu_temb_BD)
        c_mod = self.double_stream_modulation_txt(op, silu_temb_BD)
        single_mod = self.single_stream_modulation(op, silu_temb_BD)
        for name, value, c_value in zip(_MODULATIONS, mod, c_mod, strict=True):
            tap(value, name)
            tap(c_value, f"c_{name}")
        for name, value in zip(("shift", "scale", "gate"), single_mod, strict=True):
            tap(value, f"single_mod_{name}")
        x_BID = tap(self.x_embedder(op, hidden_states_BIC), "x_emb_out")
        e_BTD = tap(self.context_embedder(op, encoder_hidden_states_BTJ), "ctx_emb_out")
        cos, sin = self.pos_embed(op, op.Concat(txt_ids_BTA, img_ids_BIA, axis=1))
        tap(cos, "rope_cos")
        tap(sin, "rope_sin")
        for i, block in enumerate(self.transformer_blocks):
            x_BID, e_BTD = block(op, x_BID, e_BTD, mod, c_mod, cos, sin)
            tap(e_BTD, f"double_block{i}_enc")
            tap(x_BID, f"double_block{i}_h")
        x_BSD = tap(op.Concat(e_BTD, x_BID, axis=1), "single_in_hidden_states")
        for i, block in enumerate(self.single_transformer_blocks):
            x_BSD = tap(block(op, x_BSD, single_mod, cos, sin), f"single_block{i}_h")
        x_BID = self.norm_out(op, image_part(op, x_BSD, e_BTD, x_BID), silu_temb_BD)
        return self.proj_out(op, x_BID)


def _attend(
    op: OpBuilder, q_BSHE: ir.Value, k_BSHE: ir.Value, v_BSHE: ir.Value, cos: ir.Value, sin: ir.Value, head_dim: int
) -> ir.Value:
    """Rotates queries and keys and attends without a mask: ``[B, S, D]``."""
    q_BHSE, k_BHSE, v_BHSE = (op.Transpose(x, perm=[0, 2, 1, 3]) for x in (q_BSHE, k_BSHE, v_BSHE))
    q_BHSE, k_BHSE = (apply_interleaved_rotary(op, x, cos, sin) for x in (q_BHSE, k_BHSE))
    return merge_heads(op, attention(op, q_BHSE, k_BHSE, v_BHSE, None, head_dim**-0.5))


def _residual(op: OpBuilder, x: ir.Value, gate_B1D: ir.Value, y: ir.Value) -> ir.Value:
    return clip_float16(op, op.Add(x, op.Mul(gate_B1D, y)))


def _stages(config: Flux2Config, hidden_state_layers: tuple[int, ...], dtype: ir.DataType) -> dict[str, Stage]:
    """``timestep`` is sigma, from 0 to 1, and ``guidance`` the guidance scale, as diffusers' model takes both."""
    inputs = [
        Input("hidden_states", dtype, ("batch", "image_tokens", config.in_channels)),
        Input("encoder_hidden_states", dtype, ("batch", "text_tokens", config.joint_attention_dim)),
        Input("timestep", ir.DataType.FLOAT, ("batch",)),
        Input("img_ids", ir.DataType.INT64, ("batch", "image_tokens", _AXES)),
        Input("txt_ids", ir.DataType.INT64, ("batch", "text_tokens", _AXES)),
    ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", ir.DataType.FLOAT, ("batch",)))

    def transformer(model: nn.Module, op: OpBuilder, x: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        tokens = (x["hidden_states"], x["encoder_hidden_states"], x["timestep"], x["img_ids"], x["txt_ids"])
        return {"noise_pred": model(op, *tokens, x.get("guidance"))}

    return {"transformer": Stage(tuple(inputs), transformer)}


def _dims(config: Flux2Config) -> dict[str, Dim]:
    return {
        "batch": Dim(min=1, opt=1, max=1024),
        "image_tokens": Dim(min=1, opt=1024, max=65536),
        "text_tokens": Dim(min=1, opt=512, max=65536),
    }


ARCHITECTURE = Architecture(
    roles=("transformer",),
    model_types=("flux2",),
    class_names=("Flux2Transformer2DModel",),
    gguf_architectures=("bonsai-image",),
    read_config=Flux2Config.from_keys,
    build=Flux2Transformer2DModel,
    stages=_stages,
    dims=_dims,
    gguf_config=flux2_gguf_config,
    gguf_name=flux2_gguf_name,
    unneeded=lambda name, config: False,
    recognize=recognize_flux2,
    respell=respell_flux2,
    spellings=flux2_modules,
)
