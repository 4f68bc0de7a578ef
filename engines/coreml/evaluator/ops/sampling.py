"""Sampling of ``[N, C, H, W]`` at given places."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _pixels(places: Tensor, size: int, mode: str, align_corners: bool) -> Tensor:
    """Coordinates in pixels, the first pixel's centre at 0."""
    if mode == "unnormalized":
        return places
    if mode == "normalized_minus_one_to_one":
        places = (places + 1) / 2
    elif mode != "normalized_zero_to_one":
        raise ValueError(f"has the coordinates {mode!r}, which are not known")
    return places * (size - 1) if align_corners else places * size - 0.5


def _fold(pixels: Tensor, size: int, mode: str) -> Tensor:
    """Coordinates outside of the picture, brought back by its padding mode."""
    if mode == "border":
        return np.clip(pixels, 0, size - 1)
    # Reflection turns at the centres of the first and last pixel, symmetric at their outer edges.
    low, span = (0.0, size - 1) if mode == "reflection" else (-0.5, size)
    if span == 0:
        return np.zeros_like(pixels)
    distance = np.mod(pixels - low, 2 * span)
    return np.clip(np.minimum(distance, 2 * span - distance) + low, 0, size - 1)


@op
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """``coordinates`` ``[N, H2, W2, 2]``, first across, then down."""
    if padding_mode not in ("constant", "border", "reflection", "symmetric"):
        raise ValueError(f"has the padding {padding_mode!r}, which is not known")
    height, width = x.shape[2:]
    places = coordinates.astype(np.float32)
    across = _pixels(places[..., 0], width, coordinates_mode, align_corners)
    down = _pixels(places[..., 1], height, coordinates_mode, align_corners)
    if padding_mode != "constant":
        across, down = _fold(across, width, padding_mode), _fold(down, height, padding_mode)

    def pixel(row: Tensor, column: Tensor) -> Tensor:
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        rows = np.clip(row, 0, height - 1).astype(np.int64)
        columns = np.clip(column, 0, width - 1).astype(np.int64)
        batch = np.arange(x.shape[0])[:, None, None]
        values = x[batch, :, rows, columns]
        return np.where(inside[..., None], values, x.dtype.type(padding_value))

    if sampling_mode == "nearest":
        result = pixel(np.rint(down), np.rint(across))
    elif sampling_mode == "bilinear":
        top, left = np.floor(down), np.floor(across)
        below, right = (down - top)[..., None], (across - left)[..., None]
        upper = pixel(top, left) * (1 - right) + pixel(top, left + 1) * right
        lower = pixel(top + 1, left) * (1 - right) + pixel(top + 1, left + 1) * right
        result = upper * (1 - below) + lower * below
    else:
        raise ValueError(f"has the sampling mode {sampling_mode!r}, expected bilinear or nearest")
    return np.moveaxis(result, -1, 1)
