"""What the decoder architectures of llama.cpp share in a GGUF file: metadata keys and tensor names.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from intaglio.errors import ConfigError
from intaglio.exporters.checkpoints.tensors import Checkpoint
from intaglio.exporters.config import ConfigKeys

# Hugging Face key -> GGUF key after the architecture's name.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}

# Parameter of rotary scaling -> GGUF key.
_ROPE_SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# What each type takes.
_ROPE_TYPES = {
    "linear": ("rope_type", "factor"),
    "yarn": ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}

# Tensors that are read into the configuration: Llama 3's scaling, as what each frequency is divided by.
CONFIG_TENSORS = ("rope_freqs.weight",)

# Keys that change the arithmetic and have no counterpart above.
_REFUSED = (
    "expert_count",
    "attention.scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "use_parallel_residual",
    "attention.sliding_window",
    "rope.dimension_sections",
    "rope.scale_linear",
)

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def decoder_config(checkpoint: Checkpoint) -> ConfigKeys:
    """The configuration of a decoder, from the metadata and, where no key says it, from the tensors."""
    metadata, source = checkpoint.metadata, str(checkpoint.path)
    architecture = metadata["general.architecture"]
    spelling = {key: f"{architecture}.{suffix}" for key, suffix in _KEYS.items()}
    spelling |= {f"rope_scaling.{key}": f"{architecture}.{suffix}" for key, suffix in _ROPE_SCALING.items()}
    spelling["rope_freqs"] = CONFIG_TENSORS[0]
    values: dict[str, Any] = {
        key: metadata[name] for key, name in spelling.items() if key in _KEYS and name in metadata
    }
    values |= _rope_scaling(checkpoint, architecture)
    for suffix in _REFUSED:
        value = metadata.get(f"{architecture}.{suffix}")
        if value is not None and (np.size(value) > 1 or np.any(value)):  # some are arrays
            raise ConfigError(f"{source}: {architecture}.{suffix} is set, which is not built yet")
    if "vocab_size" not in values and isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        values["vocab_size"] = len(metadata["tokenizer.ggml.tokens"])
    tensors = checkpoint.tensors
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values["attention_bias"] = any(re.fullmatch(r"blk\.\d+\.attn_q\.bias", name) for name in tensors)
    values["mlp_bias"] = any(re.fullmatch(r"blk\.\d+\.ffn_gate\.bias", name) for name in tensors)
    values["hidden_act"] = "silu"
    values["use_sliding_window"] = False
    _check_head_dims(metadata, architecture, values, source)
    return ConfigKeys(values, source, spelling)


def _rope_scaling(checkpoint: Checkpoint, architecture: str) -> dict[str, Any]:
    """``rope_scaling`` or ``rope_freqs`` where a file has them. Raises ConfigError for parameters not built."""
    prefix, source = f"{architecture}.rope.scaling.", str(checkpoint.path)
    found = {name: value for name, value in checkpoint.metadata.items() if name.startswith(prefix)}
    found.pop(f"{prefix}finetuned", None)  # says how the model was trained, not what to compute
    result: dict[str, Any] = {}
    rope_type = found.pop(f"{prefix}type", "none")
    if not isinstance(rope_type, str) or rope_type != "none":
        if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
            built = ", ".join(_ROPE_TYPES)
            raise ConfigError(f"{source}: {prefix}type is {rope_type!r}, which is not built; built are {built}")
        names = {key: f"{architecture}.{_ROPE_SCALING[key]}" for key in _ROPE_TYPES[rope_type][1:]}
        values = {key: found.pop(name) for key, name in names.items() if name in found}
        result["rope_scaling"] = {"rope_type": rope_type, **values}
    # llama.cpp multiplies yarn's attention factor where transformers replaces it, so a file's own is ambiguous.
    inert = ("original_context_length",) if rope_type in ("none", "linear") else ()
    for name, value in found.items():
        if name.removeprefix(prefix) not in inert:
            raise ConfigError(f"{source}: {name} is {value!r}, which is not built with rope scaling {rope_type!r}")
    for name in CONFIG_TENSORS:
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue
        if architecture != "llama":
            raise ConfigError(f"{source}: has {name}, which {architecture} models do not use in llama.cpp")
        rows = tensor.read()
        if not isinstance(rows, np.ndarray) or rows.ndim != 1:
            raise ConfigError(f"{source}: {name} is {tensor.storage} {list(tensor.shape)}, expected a plain vector")
        result["rope_freqs"] = rows.astype(np.float64).tolist()
    return result


def _check_head_dims(metadata: Mapping[str, Any], architecture: str, values: Mapping[str, Any], source: str) -> None:
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    head_dim = values.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads:
        head_dim = width // heads
    for suffix in ("rope.dimension_count", "attention.value_length"):
        found = metadata.get(f"{architecture}.{suffix}")
        if found is not None and found != head_dim:
            raise ConfigError(
                f"{source}: {architecture}.{suffix} is {found!r}, but heads are {head_dim!r} wide; "
                "partial rotary embeddings and uneven heads are not built yet"
            )


def decoder_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if it is not one of a decoder's."""
    stem, _, part = name.rpartition(".")
    if part not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{part}"
    return None


def interleaved_to_halves(rows: int, heads: int) -> np.ndarray:
    """The row order that undoes llama's GGUF permutation of q and k.

    GGUF keeps the two numbers that a rotation mixes in neighbouring rows of a head, transformers in its two
    halves: row ``(head, half, i)`` here is row ``(head, i, half)`` there.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
