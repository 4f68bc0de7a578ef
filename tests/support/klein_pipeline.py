"""What is shared by tests of picture pipelines: the bundle of a run, made once, and diffusers' pipeline of the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from klein import make_checkpoint

from intaglio.exporters.bundle import BUNDLE_FILE

PROMPT = "a tiny bonsai tree in a ceramic pot"
# Shorter than the published 512, so that runs are quick; the tokens are bytes.
TEXT_LENGTH = 96
# Options of a picture that is made in a moment.
SMALL: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 2}


@cache
def diffusers_pipeline(folder: Path) -> Any:
    """``Flux2KleinPipeline`` of a checkpoint, in float32."""
    import diffusers
    import torch

    pipeline = diffusers.Flux2KleinPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def embeds_of_diffusers(folder: Path, prompts: list[str]) -> np.ndarray:
    """The conditioning of prompts, float32 ``[batch, tokens, width]``."""
    import torch

    with torch.no_grad():
        embeds, _ = diffusers_pipeline(folder).encode_prompt(
            prompts, text_encoder_out_layers=make_checkpoint.TINY.layers, max_sequence_length=TEXT_LENGTH
        )
    return embeds.numpy()


def paint_with_diffusers(folder: Path, *, is_distilled: bool = True, **options: Any) -> np.ndarray:
    """Pictures as float64 ``[batch, height, width, 3]`` from 0 to 255, not rounded."""
    settings: Mapping[str, Any] = {
        "text_encoder_out_layers": make_checkpoint.TINY.layers,
        "max_sequence_length": TEXT_LENGTH,
        "guidance_scale": 1.0,
        "output_type": "np",
    }
    pipeline = diffusers_pipeline(folder)
    pipeline.register_to_config(is_distilled=is_distilled)
    return 255 * np.asarray(pipeline(**{**settings, **options}).images, np.float64)


def pixels(images: list[Any]) -> np.ndarray:
    """Pillow pictures as float64 ``[batch, height, width, 3]``."""
    return np.stack([np.asarray(image) for image in images]).astype(np.float64)


def picture(width: int, height: int) -> np.ndarray:
    """Random pixels, uint8 ``[height, width, 3]``."""
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


def changed(klein: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the bundle that says something else of its model."""
    shutil.copytree(klein, folder / "bundle")
    file = folder / "bundle" / BUNDLE_FILE
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return folder / "bundle"
