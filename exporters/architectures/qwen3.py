"""Qwen3 (https://arxiv.org/abs/2505.09388): Llama's decoder with normed queries and keys.

- pre-norm blocks: RMSNorm, grouped-query attention, RMSNorm, SwiGLU; biases only where the config says so
- each head of q and k passes an RMSNorm before its rotary embedding; heads have a width of their own
- layers see all positions, or the last ``sliding_window`` where ``layer_types`` says so

Parameter names are those of transformers' ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.architecture import Architecture
from intaglio.exporters.checkpoints.gguf_decoder import decoder_config, decoder_name
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor
from intaglio.exporters.config import ConfigKeys, RopeScaling, check_heads, rope_parameters, window_layers
from intaglio.exporters.layers.attention import (
    CausalMask,
    append_to_cache,
    attention,
    causal_mask,
    merge_seeing_heads,
    split_heads,
)
from intaglio.exporters.layers.causal_lm import Cache, decoder_dims, decoder_stages
from intaglio.exporters.layers.linear import Embedding, Linear, OutputHead
from intaglio.exporters.layers.mlp import SwiGLU
from intaglio.exporters.layers.norm import RMSNorm
from intaglio.exporters.layers.rotary import RotaryEmbedding, apply_rotary
from intaglio.exporters.layers.taps import tap


@dataclass(frozen=True)
class Qwen3Config:
    """The published keys that the graph depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    sliding_window: int | None
    layer_types: tuple[str, ...]

    @classmethod
    def from_keys(cls, keys: ConfigKeys) -> Qwen3Config:
        """Reads and checks a configuration. Raises ConfigError."""
        keys.choice("hidden_act", "silu")
        heads = keys.integer("num_attention_heads")
        kv_heads = keys.integer_or_null("num_key_value_heads") or heads
        # Absent means 128 in transformers, not an even split: a default that would change the numbers.
        head_dim = keys.integer("head_dim")
        check_heads(keys, heads, kv_heads, head_dim)
        rope_theta, rope_scaling = rope_parameters(keys, head_dim)
        layers = keys.integer("num_hidden_layers")
        sliding_window, layer_types = window_layers(keys, layers)
        return cls(
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=keys.integer("max_position_embeddings", minimum=2),
            # Absent means without: neither adds arithmetic that the file did not ask for.
            tie_word_embeddings=keys.boolean("tie_word_embeddings", absent=False),
            attention_bias=keys.boolean("attention_bias", absent=False),
            sliding_window=sliding_window,
            layer_types=layer_types,
        )


class Qwen3Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        op: OpBuilder,
        x_BSD: ir.Value,
        mask: CausalMask,
        cos: ir.Value,
        sin: ir.Value,
        past: tuple[ir.Value, ir.Value] | None,
    ) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
        q_BSHE = op.Reshape(tap(self.q_proj(op, x_BSD)), [0, 0, self.heads, self.head_dim])
        k_BSKE = op.Reshape(tap(self.k_proj(op, x_BSD)), [0, 0, self.kv_heads, self.head_dim])
        q_BHSE = op.Transpose(tap(self.q_norm(op, q_BSHE)), perm=[0, 2, 1, 3])
        k_BKSE = op.Transpose(tap(self.k_norm(op, k_BSKE)), perm=[0, 2, 1, 3])
        v_BKSE = split_heads(op, tap(self.v_proj(op, x_BSD)), self.kv_heads, self.head_dim)
        q_BHSE, k_BKSE = apply_rotary(op, q_BHSE, cos, sin), apply_rotary(op, k_BKSE, cos, sin)
        k_BKTE = append_to_cache(op, past[0] if past else None, k_BKSE)
        v_BKTE = append_to_cache(op, past[1] if past else None, v_BKSE)
        out_BHSE = attention(op, q_BHSE, k_BKTE, v_BKTE, mask.visible, self.head_dim**-0.5)
        return tap(self.o_proj(op, merge_seeing_heads(op, out_BHSE, mask))), (k_BKTE, v_BKTE)


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        op: OpBuilder,
        x_BSD: ir.Value,
        mask: CausalMask,
        cos: ir.Value,
        sin: ir.Value,
        past: tuple[ir.Value, ir.Value] | None,
    ) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
        attended, present = self.self_attn(op, tap(self.input_layernorm(op, x_BSD)), mask, cos, sin, past)
        x_BSD = op.Add(x_BSD, attended)
        fed = tap(self.mlp(op, tap(self.post_attention_layernorm(op, x_BSD))))
        return tap(op.Add(x_BSD, fed)), present


class Qwen3Model(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        self.windows = [config.sliding_window if slides else None for slides in sliding]
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(
        self,
        op: OpBuilder,
        input_ids_BS: ir.Value,
        attention_mask_BT: ir.Value,
        position_ids_BS: ir.Value,
        past: Cache | None,
        depth: int,
    ) -> tuple[list[ir.Value], Cache]:
        """Runs the first ``depth`` layers; the norm belongs to the last one of the model."""
        past_key = past[0][0] if past else None
        masks = {
            window: causal_mask(op, attention_mask_BT, input_ids_BS, past_key, window)
            for window in dict.fromkeys(self.windows[:depth])
        }
        cos, sin = self.rotary_emb(op, position_ids_BS)
        hidden_states, present = [tap(self.embed_tokens(op, input_ids_BS))], []
        for i, layer in zip(range(depth), self.layers, strict=False):
            x_BSD, cache = layer(op, hidden_states[-1], masks[self.windows[i]], cos, sin, past[i] if past else None)
            hidden_states.append(x_BSD)
            present.append(cache)
        if depth == len(self.layers):
            hidden_states[-1] = tap(self.norm(op, hidden_states[-1]))
        return hidden_states, present


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.model = Qwen3Model(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else OutputHead(config.hidden_size, config.vocab_size)

    def forward(
        self,
        op: OpBuilder,
        input_ids_BS: ir.Value,
        attention_mask_BT: ir.Value,
        position_ids_BS: ir.Value,
        past: Cache | None,
        last_only: bool,
    ) -> tuple[ir.Value, Cache, list[ir.Value]]:
        depth = len(self.model.layers)
        hidden_states, present = self.model(op, input_ids_BS, attention_mask_BT, position_ids_BS, past, depth)
        x_BSD = hidden_states[-1]
        if last_only:
            x_BSD = op.Slice(x_BSD, [-1], [np.iinfo(np.int64).max], [1])
        head = self.lm_head(op, x_BSD) if self.lm_head else self.model.embed_tokens.as_linear(op, x_BSD)
        return head, present, hidden_states


def _unneeded(name: str, config: Qwen3Config) -> bool:
    # Old checkpoints store the rotary frequencies; a tied head may be stored beside its embedding.
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


# What no tensor tells, of the two models that serve as text encoders, by layers, hidden_size, heads, key-value heads,
# head_dim, intermediate_size and vocab_size: the config.json of Qwen/Qwen3-4B and Qwen/Qwen3-8B, which agree.
_PUBLISHED = {(36, 2560, 32, 8, 128, 9728, 151936), (36, 4096, 32, 8, 128, 12288, 151936)}
_CONSTANTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}


def _respell(tensors: Mapping[str, CheckpointTensor], config: Qwen3Config | None) -> dict[str, CheckpointTensor]:
    """A model saved without its head, as text encoders are, has no ``model.`` before its names."""
    bare = "embed_tokens.weight" in tensors
    return {f"model.{name}" if bare and name != "lm_head.weight" else name: t for name, t in tensors.items()}


def _recognize(checkpoint: Checkpoint) -> ConfigKeys | None:
    """The configuration of a Qwen3 that comes without one; only norms of queries and keys are its own."""
    tensors = _respell(checkpoint.tensors, None)
    first = "model.layers.0."
    names = {
        "vocab_size": "model.embed_tokens",
        "hidden_size": f"{first}input_layernorm",
        "intermediate_size": f"{first}mlp.gate_proj",
        "head_dim": f"{first}self_attn.q_norm",
        "num_attention_heads": f"{first}self_attn.q_proj",
        "num_key_value_heads": f"{first}self_attn.k_proj",
    }
    shapes = {key: tensors[f"{name}.weight"].shape for key, name in names.items() if f"{name}.weight" in tensors}
    if len(shapes) < len(names) or not all(shape and shape[0] for shape in shapes.values()):
        return None
    values: dict[str, Any] = {key: shape[0] for key, shape in shapes.items()}
    for key in ("num_attention_heads", "num_key_value_heads"):
        values[key] //= values["head_dim"]
    values["num_hidden_layers"] = sum(
        re.fullmatch(r"model\.layers\.\d+\.input_layernorm\.weight", n) is not None for n in tensors
    )
    order = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    published = tuple(values[key] for key in (*order, "intermediate_size", "vocab_size")) in _PUBLISHED
    assumed = {key: value for key, value in _CONSTANTS.items() if published and key not in checkpoint.config}
    values["tie_word_embeddings"] = "lm_head.weight" not in tensors
    values["attention_bias"] = f"{first}self_attn.q_proj.bias" in tensors
    source = f"{checkpoint.path} (without a config.json)"
    return ConfigKeys({**values, **assumed, **checkpoint.config}, source, assumed=assumed)


ARCHITECTURE = Architecture(
    roles=("language_model", "text_encoder"),
    model_types=("qwen3",),
    class_names=("Qwen3ForCausalLM", "Qwen3Model"),
    gguf_architectures=("qwen3",),
    read_config=Qwen3Config.from_keys,
    build=Qwen3ForCausalLM,
    stages=decoder_stages,
    dims=decoder_dims,
    gguf_config=decoder_config,
    gguf_name=decoder_name,
    unneeded=_unneeded,
    recognize=_recognize,
    respell=_respell,
)
