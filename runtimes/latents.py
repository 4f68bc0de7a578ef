"""Latents of FLUX.2, packed and as a grid, and the position ids of their tokens.

Shape suffixes: B batch, C channels, H rows and W columns of the latent grid, S tokens.

A latent grid has one row and one column for each 16 pixels in all of FLUX.2; an autoencoder of fewer blocks makes
them smaller. Position ids have four axes: picture (t), row (h), column
(w) and text position (l).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intaglio.errors import InputError
from intaglio.runtimes.checks import finite_float32, floats, integer

# Pixels that a packed latent is wide and high in all of FLUX.2: what is taken where no autoencoder says its own.
FACTOR = 16

# How far apart reference pictures lie on the axis t; the picture that is made lies at 0.
_REFERENCE_SPACING = 10


def latent_pixels(vae: Mapping[str, Any]) -> int:
    """Pixels that a packed latent is wide and high, of the configuration of an autoencoder in a bundle; {} for none."""
    return 2 ** (len(vae["block_out_channels"]) - 1) * vae["patch_size"] if vae else FACTOR


def pack(latents_BCHW: np.ndarray) -> np.ndarray:
    """A grid ``[batch, channels, height, width]`` as tokens ``[batch, height * width, channels]``, row by row."""
    if latents_BCHW.ndim != 4:
        raise InputError(f"latents are {list(latents_BCHW.shape)}; expected [batch, channels, height, width]")
    batch, channels, height, width = latents_BCHW.shape
    latents_BCS = latents_BCHW.reshape(batch, channels, height * width)
    return np.ascontiguousarray(latents_BCS.transpose(0, 2, 1))


def unpack(latents_BSC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Tokens ``[batch, height * width, channels]`` as a grid ``[batch, channels, height, width]``."""
    if latents_BSC.ndim != 3 or latents_BSC.shape[1] != height * width:
        raise InputError(f"latents are {list(latents_BSC.shape)}; expected [batch, {height * width}, channels]")
    batch, _, channels = latents_BSC.shape
    return np.ascontiguousarray(latents_BSC.transpose(0, 2, 1)).reshape(batch, channels, height, width)


def initial_latents(
    latents: Any, batch: int | None, channels: int, height: int, width: int, factor: int = FACTOR
) -> np.ndarray:
    """Latents that a caller gave, as a grid or as tokens: finite float32 ``[batch, height * width, channels]``.

    ``height`` and ``width`` are those of the latent grid, and a latent is ``factor`` pixels wide. A ``batch`` of None
    takes any but 0. Any floating dtype is taken. Raises InputError for another shape or dtype and for values that are
    not finite in float32.
    """
    array = floats("latents", latents)
    batch = batch or max(1, len(array) if array.ndim else 0)
    grid, tokens = (batch, channels, height, width), (batch, height * width, channels)
    if array.shape not in (grid, tokens):
        raise InputError(
            f"latents are {list(array.shape)}; expected {list(grid)} or packed {list(tokens)} for pictures of "
            f"{factor * width} by {factor * height} pixels"
        )
    array = finite_float32("latents", array)
    return pack(array) if array.ndim == 4 else array


def image_ids(height: int, width: int) -> np.ndarray:
    """Position ids of the picture that is made: int64 ``[height * width, 4]``, ``(0, row, column, 0)`` row by row."""
    return _grid_ids(0, height, width)


def reference_ids(index: int, height: int, width: int) -> np.ndarray:
    """Position ids of reference picture ``index``: int64 ``[height * width, 4]``, with t = 10 + 10 * index."""
    index = integer("index", index, 0)
    return _grid_ids(_REFERENCE_SPACING * (index + 1), height, width)


def text_ids(length: int) -> np.ndarray:
    """Position ids of text: int64 ``[length, 4]``, ``(0, 0, 0, position)``."""
    ids_S4 = np.zeros((integer("length", length, 0), 4), np.int64)
    ids_S4[:, 3] = np.arange(len(ids_S4))
    return ids_S4


def _grid_ids(t: int, height: int, width: int) -> np.ndarray:
    height, width = integer("height", height, 1), integer("width", width, 1)
    ids_HW4 = np.zeros((height, width, 4), np.int64)
    ids_HW4[..., 0] = t
    ids_HW4[..., 1] = np.arange(height)[:, None]
    ids_HW4[..., 2] = np.arange(width)
    return ids_HW4.reshape(-1, 4)
