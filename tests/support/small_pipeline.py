"""A tiny pipeline of random weights for pictures of 64 pixels: FLUX.2's parts, with latents of 8 pixels.

Its autoencoder has the three blocks of ``tiny_painter`` where FLUX.2's has four, prompts go to the text encoder as
they are, and noise levels have a static shift. ``model_index.json`` says how long prompts are and which hidden states
make the conditioning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from klein import make_checkpoint
from klein_sizes import TINY
from tiny_painter import VAE

import intaglio

TEXT_LENGTH, SHIFT, FACTOR, CHANNELS = 16, 2.5, 8, 32
# An empty prompt has no tokens at all.
CHAT_TEMPLATE = "{%- for message in messages %}{{- message.content }}{%- endfor %}"
SMALL = replace(
    TINY,
    transformer={**TINY.transformer, "in_channels": CHANNELS},
    vae={**TINY.vae, **VAE, "latent_channels": CHANNELS // 4, "sample_size": 64},
)


def write_checkpoint(folder: Path) -> Path:
    """The pipeline as diffusers saves it, its ternary matrices dense."""
    make_checkpoint.write_pipeline(folder, SMALL)
    _change(folder / "tokenizer" / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})
    _change(folder / "scheduler" / "scheduler_config.json", {"use_dynamic_shifting": False, "shift": SHIFT})
    index = {"is_distilled": False, "max_sequence_length": TEXT_LENGTH, "text_encoder_out_layers": list(SMALL.layers)}
    _change(folder / "model_index.json", index)
    return folder


def write_bundle(folder: Path, **options: Any) -> Path:
    """``folder/checkpoint`` and ``folder/bundle``, whose path is returned, compiled for the CPU."""
    write_checkpoint(folder / "checkpoint")
    intaglio.export(folder / "checkpoint", folder / "bundle", **options)
    intaglio.compile(folder / "bundle")
    return folder / "bundle"


def _change(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
