"""Llama (https://arxiv.org/abs/2302.13971): the decoder of LLaMA 1, 2 and 3, SmolLM and many others.

- pre-norm blocks: RMSNorm, grouped-query attention with rotary embeddings, RMSNorm, SwiGLU
- biases only where the config says so; the output head may be tied to the embedding
- Llama 3 stretches its rotary embeddings

Parameter names are those of transformers' ``LlamaForCausalLM``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.architecture import Architecture
from intaglio.exporters.checkpoints.gguf_decoder import decoder_config, decoder_name, interleaved_to_halves
from intaglio.exporters.config import ConfigKeys, RopeScaling, check_heads, rope_parameters, split_head_dim
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
class LlamaConfig:
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
    mlp_bias: bool

    @classmethod
    def from_keys(cls, keys: ConfigKeys) -> LlamaConfig:
        """Reads and checks a configuration. Raises ConfigError."""
        keys.choice("hidden_act", "silu")
        keys.refuse("sliding_window")
        heads = keys.integer("num_attention_heads")
        kv_heads = keys.integer("num_key_value_heads", absent=heads)
        head_dim = split_head_dim(keys, heads)
        check_heads(keys, heads, kv_heads, head_dim)
        rope_theta, rope_scaling = rope_parameters(keys, head_dim)
        return cls(
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_hidden_layers=keys.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=keys.integer("max_position_embeddings", minimum=2),
            # Absent means without: none of these adds arithmetic that the file did not ask for.
            tie_word_embeddings=keys.boolean("tie_word_embeddings", absent=False),
            attention_bias=keys.boolean("attention_bias", absent=False),
            mlp_bias=keys.boolean("mlp_bias", absent=False),
        )


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
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

    def forward(
        self,
        op: OpBuilder,
        x_BSD: ir.Value,
        mask: CausalMask,
        cos: ir.Value,
        sin: ir.Value,
        past: tuple[ir.Value, ir.Value] | None,
    ) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
        q_BHSE = split_heads(op, tap(self.q_proj(op, x_BSD)), self.heads, self.head_dim)
        k_BKSE = split_heads(op, tap(self.k_proj(op, x_BSD)), self.kv_heads, self.head_dim)
        v_BKSE = split_heads(op, tap(self.v_proj(op, x_BSD)), self.kv_heads, self.head_dim)
        q_BHSE, k_BKSE = apply_rotary(op, q_BHSE, cos, sin), apply_rotary(op, k_BKSE, cos, sin)
        k_BKTE = append_to_cache(op, past[0] if past else None, k_BKSE)
        v_BKTE = append_to_cache(op, past[1] if past else None, v_BKSE)
        out_BHSE = attention(op, q_BHSE, k_BKTE, v_BKTE, mask.visible, self.head_dim**-0.5)
        return tap(self.o_proj(op, merge_seeing_heads(op, out_BHSE, mask))), (k_BKTE, v_BKTE)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
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


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
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
        mask = causal_mask(op, attention_mask_BT, input_ids_BS, past[0][0] if past else None)
        cos, sin = self.rotary_emb(op, position_ids_BS)
        hidden_states, present = [tap(self.embed_tokens(op, input_ids_BS))], []
        for i, layer in zip(range(depth), self.layers, strict=False):
            x_BSD, cache = layer(op, hidden_states[-1], mask, cos, sin, past[i] if past else None)
            hidden_states.append(x_BSD)
            present.append(cache)
        if depth == len(self.layers):
            hidden_states[-1] = tap(self.norm(op, hidden_states[-1]))
        return hidden_states, present


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
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


def _gguf_row_order(name: str, rows: int, config: LlamaConfig) -> np.ndarray | None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2] if name.count(".") else ""
    if projection not in heads or rows % (2 * heads[projection]):
        return None  # a shape that disagrees is reported with all others
    return interleaved_to_halves(rows, heads[projection])


def _unneeded(name: str, config: LlamaConfig) -> bool:
    # Old checkpoints store the rotary frequencies; a tied head may be stored beside its embedding.
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


ARCHITECTURE = Architecture(
    roles=("language_model",),
    model_types=("llama",),
    class_names=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    read_config=LlamaConfig.from_keys,
    build=LlamaForCausalLM,
    stages=decoder_stages,
    dims=decoder_dims,
    gguf_config=decoder_config,
    gguf_name=decoder_name,
    gguf_row_order=_gguf_row_order,
    unneeded=_unneeded,
)
