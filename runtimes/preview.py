"""Small pictures of what is coming, while it is being made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from intaglio.runtimes.denoising import Step
from intaglio.runtimes.images import to_image, to_pixels
from intaglio.runtimes.latents import FACTOR, unpack
from intaglio.runtimes.stage_run import run_stage

if TYPE_CHECKING:
    from PIL.Image import Image

# Pixels of a preview on its longer side, which decode in a moment.
_MOST_PIXELS = 128


def most_latents(factor: int) -> int:
    """Latents of a preview on its longer side, each ``factor`` pixels wide."""
    return max(1, _MOST_PIXELS // factor)


def preview_image(decoder: Any, step: Step, sigmas: np.ndarray, height: int, width: int, factor: int = FACTOR) -> Image:
    """The picture that a step expects at the end, small: all pictures of the batch side by side.

    ``decoder`` is a session of ``vae_decoder``, ``sigmas`` the schedule's, ``height`` and ``width`` those of the grid
    of latents, each ``factor`` pixels wide. The latents expected are ``latents - sigma * noise_pred`` before the step.
    """
    expected_BSC = step.before - sigmas[step.index] * step.noise_pred
    small_BCHW = shrink(unpack(expected_BSC, height, width), most_latents(factor))
    sample = run_stage(decoder, {"latents": small_BCHW}, "sample", where=f"the preview of step {step.index}", rows=1)
    return to_image(np.concatenate(list(to_pixels(sample)), axis=1))


def shrink(latents_BCHW: np.ndarray, most: int) -> np.ndarray:
    """Means over squares of latents, so that no side has more than ``most``; those at the edges may be smaller."""
    side = -(-max(latents_BCHW.shape[2:]) // most)
    for axis in (2, 3):
        starts = np.arange(0, latents_BCHW.shape[axis], side)
        counts = np.diff(np.append(starts, latents_BCHW.shape[axis])).astype(np.float32)
        shape = [1, 1, 1, 1]
        shape[axis] = len(counts)
        latents_BCHW = np.add.reduceat(latents_BCHW, starts, axis=axis) / counts.reshape(shape)
    return latents_BCHW
