"""The configurations of FLUX.2-klein, of the published size and a tiny one, with the published keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The configurations of one pipeline, with the keys of the published ``config.json`` files.

    ``small_decoder`` are the channels of the VAE's small decoder, ``layers`` those whose hidden states the
    transformer is conditioned on.
    """

    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    vae: Mapping[str, Any]
    small_decoder: tuple[int, ...]
    layers: tuple[int, int, int]


def _transformer(**sizes: Any) -> dict[str, Any]:
    return {
        "_class_name": "Flux2Transformer2DModel",
        "_diffusers_version": "0.37.0",
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": None,
        **sizes,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": False,
    }


def _text_encoder(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _vae(channels: tuple[int, ...], norm_num_groups: int) -> dict[str, Any]:
    return {
        "_class_name": "AutoencoderKLFlux2",
        "_diffusers_version": "0.37.0",
        "act_fn": "silu",
        "batch_norm_eps": 1e-4,
        "batch_norm_momentum": 0.1,
        "block_out_channels": list(channels),
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "in_channels": 3,
        "latent_channels": 32,
        "layers_per_block": 2,
        "mid_block_add_attention": True,
        "norm_num_groups": norm_num_groups,
        "out_channels": 3,
        "patch_size": [2, 2],
        "sample_size": 1024,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "use_post_quant_conv": True,
        "use_quant_conv": True,
    }


# Each ternary matrix of the tiny one has two groups a row or more, and no two widths are the same by accident.
TINY = Sizes(
    transformer=_transformer(
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=384,
        axes_dims_rope=[16, 16, 16, 16],
    ),
    text_encoder=_text_encoder(
        vocab_size=261,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        bos_token_id=256,
        eos_token_id=258,
    ),
    vae=_vae((16, 32, 48, 48), 8),
    small_decoder=(8, 16, 32, 32),
    layers=(1, 2, 3),
)
KLEIN_4B = Sizes(
    transformer=_transformer(
        num_layers=5,
        num_single_layers=20,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=7680,
        axes_dims_rope=[32, 32, 32, 32],
    ),
    text_encoder=_text_encoder(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    vae=_vae((128, 256, 512, 512), 32),
    small_decoder=(96, 192, 384, 384),
    layers=(9, 18, 27),
)
SIZES = {"tiny": TINY, "4B": KLEIN_4B}

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.37.0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "shift_terminal": None,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
