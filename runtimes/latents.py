"""Latents of FLUX.2, packed and as a grid, and the position ids of their tokens.

Shape suffixes: B batch, C channels, H rows and W columns of the latent grid, S tokens.

A latent grid has one row and one column for each 16 pixels. Position ids have four axes: picture (t), row (h), column
(w) and text position (l).
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from intaglio.errors import InputError

# How far apart reference pictures lie on the axis t; the picture that is made lies at 0.
_REFERENCE_SPACING = 10


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


def initial_latents(latents: Any, batch: int, channels: int, height: int, width: int) -> np.ndarray:
    """Latents that a caller gave, as a grid or as tokens: finite float32 ``[batch, height * width, channels]``.

    ``height`` and ``width`` are those of the latent grid, a 16th of the pixels. Any floating dtype is taken. Raises
    InputError for another shape or dtype and for values that are not finite in float32.
    """
    array = np.asarray(latents)
    # bfloat16 comes from ml_dtypes, and NumPy does not know that it is floating.
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"latents are {array.dtype}; expected float32, or another floating dtype")
    grid, tokens = (batch, channels, height, width), (batch, height * width, channels)
    if array.shape not in (grid, tokens):
        raise InputError(
            f"latents are {list(array.shape)}; expected {list(grid)} or packed {list(tokens)} for pictures of "
            f"{16 * width} by {16 * height} pixels"
        )
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    finite = np.isfinite(array)
    if not finite.all():
        raise InputError(
            f"{array.size - np.count_nonzero(finite)} of {array.size} values of the latents are not finite in float32"
        )
    return pack(array) if array.ndim == 4 else array


def image_ids(height: int, width: int) -> np.ndarray:
    """Position ids of the picture that is made: int64 ``[height * width, 4]``, ``(0, row, column, 0)`` row by row."""
    return _grid_ids(0, height, width)


def reference_ids(index: int, height: int, width: int) -> np.ndarray:
    """Position ids of reference picture ``index``: int64 ``[height * width, 4]``, with t = 10 + 10 * index."""
    index = _integer("index", index, 0)
    return _grid_ids(_REFERENCE_SPACING * (index + 1), height, width)


def text_ids(length: int) -> np.ndarray:
    """Position ids of text: int64 ``[length, 4]``, ``(0, 0, 0, position)``."""
    ids_S4 = np.zeros((_integer("length", length, 0), 4), np.int64)
    ids_S4[:, 3] = np.arange(len(ids_S4))
    return ids_S4


def _grid_ids(t: int, height: int, width: int) -> np.ndarray:
    height, width = _integer("height", height, 1), _integer("width", width, 1)
    ids_HW4 = np.zeros((height, width, 4), np.int64)
    ids_HW4[..., 0] = t
    ids_HW4[..., 1] = np.arange(height)[:, None]
    ids_HW4[..., 2] = np.arange(width)
    return ids_HW4.reshape(-1, 4)


def _integer(name: str, value: object, least: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < least:
        raise InputError(f"{name} is {value!r}; expected an integer of at least {least}")
    return int(value)
