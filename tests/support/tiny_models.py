"""One tiny model for each variant of each architecture, made and saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class TinyModel:
    """``config`` is the oracle's; ``save`` are arguments of ``save_pretrained``."""

    name: str
    config: Callable[[], transformers.PretrainedConfig]
    save: dict[str, Any] = field(default_factory=dict)

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


def _llama(**changes: Any) -> Callable[[], transformers.PretrainedConfig]:
    settings: dict[str, Any] = {
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
    return lambda: transformers.LlamaConfig(**{**settings, **changes})


TINY_MODELS = [
    TinyModel("llama-gqa", _llama()),
    TinyModel("llama-tied", _llama(tie_word_embeddings=True)),
    TinyModel("llama-biases", _llama(attention_bias=True, mlp_bias=True, head_dim=16)),
    TinyModel("llama-mha-sharded", _llama(num_key_value_heads=6), {"max_shard_size": "30KB"}),
]
