"""One tiny model for each variant of each architecture, made and saved by transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class TinyModel:
    """``config`` is the oracle's; ``save`` are arguments of ``save_pretrained``.

    ``own_graph`` says that its graph has a structure of its own, for which it is compared with a golden text and
    run by other runtimes; ``dynamic`` that its rotary embeddings depend on the length of the sequence.
    """

    name: str
    config: Callable[[], transformers.PretrainedConfig]
    save: dict[str, Any] = field(default_factory=dict)
    own_graph: bool = False
    dynamic: bool = False

    @property
    def taps_per_layer(self) -> int:
        """Two norms, q, k, v, o, the feed-forward output and the layer's own; Qwen3 norms q and k too."""
        return 10 if self.name.startswith("qwen3") else 8

    def build(self, folder: Path) -> transformers.PreTrainedModel:
        """Makes the model with seeded weights large enough to matter, saves it, and returns it in float32."""
        torch.manual_seed(20)
        model = transformers.AutoModelForCausalLM.from_config(self.config()).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    # Norm weights around one; biases that would be missed.
                    parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        model.save_pretrained(folder, **self.save)
        return model


_SETTINGS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def _config(family: type[transformers.PretrainedConfig], **changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    # Copied at each call: transformers writes into the dictionaries it is given.
    return lambda: family(**copy.deepcopy({**_SETTINGS, **changes}))


def _llama(**changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    return _config(transformers.LlamaConfig, **changes)


def _mistral(**changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    return _config(transformers.MistralConfig, **changes)


def _qwen2(**changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    return _config(transformers.Qwen2Config, **changes)


def _qwen3(**changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    return _config(transformers.Qwen3Config, **{"head_dim": 16, **changes})


def _scaled(rope_type: str, **parameters: Any) -> dict[str, Any]:
    """Heads of eight frequencies, from 4 turns in 25 positions to one in 470, so that each part of a scaling shows."""
    rope_parameters = {"rope_type": rope_type, "rope_theta": 100.0, **parameters}
    return {"head_dim": 16, "rope_parameters": rope_parameters}


_LLAMA3 = _scaled("llama3", factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = _scaled("yarn", factor=4.0, original_max_position_embeddings=32)
_YARN_BETAS = {"factor": 6.0, "original_max_position_embeddings": 24, "beta_fast": 3.0, "beta_slow": 0.4}
_YARN_ATTENTION = _scaled("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3)
_YARN_ALL = _scaled("yarn", **_YARN_BETAS, mscale=0.7, mscale_all_dim=1.2, truncate=False)
_WINDOWS = {"use_sliding_window": True, "sliding_window": 7}

TINY_MODELS = [
    TinyModel("llama-gqa", _llama(), own_graph=True),
    TinyModel("llama-tied", _llama(tie_word_embeddings=True), own_graph=True),
    TinyModel("llama-biases", _llama(attention_bias=True, mlp_bias=True, head_dim=16), own_graph=True),
    TinyModel("llama-mha-sharded", _llama(num_key_value_heads=6), {"max_shard_size": "30KB"}),
    TinyModel("llama-llama3", _llama(**_LLAMA3)),
    TinyModel("llama-linear", _llama(**_scaled("linear", factor=3.0))),
    TinyModel("llama-yarn", _llama(**_YARN), own_graph=True),
    TinyModel(
        "llama-dynamic",
        _llama(max_position_embeddings=12, **_scaled("dynamic", factor=4.0)),
        own_graph=True,
        dynamic=True,
    ),
    TinyModel("mistral-window", _mistral(sliding_window=7), own_graph=True),
    TinyModel("mistral-yarn", _mistral(sliding_window=None, **_YARN_ATTENTION)),
    TinyModel("qwen2-yarn", _qwen2(tie_word_embeddings=True, **_YARN)),
    TinyModel("qwen2-windows", _qwen2(max_window_layers=1, **_WINDOWS), own_graph=True),
    TinyModel("qwen3", _qwen3(), own_graph=True),
    TinyModel(
        "qwen3-yarn",
        _qwen3(
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **_WINDOWS,
            **_YARN_ALL,
        ),
    ),
]

# Widths that blocks of 32 divide.
_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
# And those of K-quants and ternary types 256.
_K_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}

GGUF_MODELS = {
    tiny.name: tiny
    for tiny in [
        TinyModel("llama-llama3", _llama(**_BLOCKS, **_LLAMA3)),
        TinyModel("llama-linear", _llama(**_BLOCKS, **_scaled("linear", factor=3.0))),
        TinyModel("llama-yarn", _llama(**_BLOCKS, **_YARN)),
        TinyModel("llama-biases", _llama(**_BLOCKS, attention_bias=True, tie_word_embeddings=True)),
        TinyModel("qwen2-yarn", _qwen2(**_BLOCKS, **_scaled("yarn", **_YARN_BETAS))),
        TinyModel("qwen3", _qwen3(**{**_BLOCKS, "head_dim": 32})),
        TinyModel("llama-wide", _llama(**_K_BLOCKS, num_hidden_layers=1)),
    ]
}
