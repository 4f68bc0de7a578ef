"""Tiny autoencoders of FLUX.2 from diffusers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

FULL: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 8,
    "block_out_channels": (8, 16, 32, 32),
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "batch_norm_eps": 1e-4,
}
SMALL = {**FULL, "decoder_block_out_channels": (4, 12, 24, 24)}


def tiny_vae(folder: Path, *, seed: int = 0, **config: Any) -> diffusers.AutoencoderKLFlux2:
    """A model with random weights, written to ``folder`` as diffusers does."""
    torch.manual_seed(seed)
    model = diffusers.AutoencoderKLFlux2(**config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # Norms and biases are made as ones and zeros, which would hide that they are mixed up.
        if parameter.ndim == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0))
    model.bn.running_mean.copy_(torch.randn_like(model.bn.running_mean))
    model.bn.running_var.copy_(torch.rand_like(model.bn.running_var) * 3 + 0.2)
    model.save_pretrained(folder)
    return model
