"""A small llama checkpoint written without torch, with a tokenizer, for tests of everything around the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors that CONFIG declares."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (260, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (32,),
            f"{prefix}post_attention_layernorm.weight": (32,),
            f"{prefix}self_attn.q_proj.weight": (32, 32),
            f"{prefix}self_attn.k_proj.weight": (16, 32),
            f"{prefix}self_attn.v_proj.weight": (16, 32),
            f"{prefix}self_attn.o_proj.weight": (32, 32),
            f"{prefix}mlp.gate_proj.weight": (48, 32),
            f"{prefix}mlp.up_proj.weight": (48, 32),
            f"{prefix}mlp.down_proj.weight": (32, 48),
        }
    return {name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, *, config: dict[str, Any] | None = None, weights: dict[str, np.ndarray] | None = None) -> Path:
    """Writes a Hugging Face folder; keys of ``config`` that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**CONFIG, **(config or {})}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    return folder


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
