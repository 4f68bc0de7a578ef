"""Where Resize takes its values from: one matrix ``[out, in]`` an axis, from the definition of ONNX's op."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interpolation:
    """The attributes of a Resize that say how values are taken."""

    mode: str
    coordinates: str
    nearest: str = "round_prefer_floor"
    cubic_coefficient: float = -0.75
    exclude_outside: bool = False
    extrapolation_value: float = 0.0
    antialias: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis: its size before and after, the scale as it is stated, the region of tf_crop_and_resize."""

    size: int
    out: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)


def source_positions(axis: Axis, coordinates: str, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """Where in the input each value of the output lies, ``[out]``."""
    at, n, scale = np.arange(axis.out, dtype=dtype), axis.size, dtype(axis.scale)
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return at * (n - 1) / (axis.out - 1) if axis.out > 1 else np.zeros(axis.out)
    if coordinates == "pytorch_half_pixel" and axis.out == 1:
        return np.zeros(1)
    if coordinates == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale
    if coordinates == "half_pixel_symmetric":
        adjusted = axis.out / (scale * n)
        return n / 2 * (1 - adjusted) + (at + 0.5) / scale - 0.5
    if coordinates == "tf_crop_and_resize":
        start, end = axis.region
        if axis.out == 1:
            return np.full(1, 0.5 * (start + end) * (n - 1))
        return start * (n - 1) + at * (end - start) * (n - 1) / (axis.out - 1)
    return (at + 0.5) / scale - 0.5


def nearest_indices(axis: Axis, how: Interpolation) -> np.ndarray:
    """The index that each value of the output is copied from, int64 ``[out]``."""
    # In float32, as onnxruntime: what is to be rounded often lies half-way.
    at = source_positions(axis, how.coordinates, np.float32)
    roundings: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    }
    return np.clip(roundings[how.nearest](at), 0, axis.size - 1).astype(np.int64)


def matrix(axis: Axis, how: Interpolation) -> np.ndarray:
    """The weights of the inputs in each output, float64 ``[out, in]``."""
    if how.mode == "nearest":
        return np.eye(axis.size)[nearest_indices(axis, how)]
    # A kernel that is to smooth as it shrinks is as much wider.
    narrowing = min(axis.scale, 1.0) if how.antialias else 1.0
    reach = (2.0 if how.mode == "cubic" else 1.0) / narrowing
    weights = np.zeros((axis.out, axis.size))
    for row, at in enumerate(source_positions(axis, how.coordinates)):
        if how.coordinates == "tf_crop_and_resize" and not 0 <= at <= axis.size - 1:
            continue
        places = np.arange(math.floor(at - reach) + 1, math.ceil(at + reach))
        values = _kernel((places - at) * narrowing, how)
        is_outside = (places < 0) | (places >= axis.size)
        if how.exclude_outside:
            values = np.where(is_outside, 0.0, values)
        if how.exclude_outside or how.antialias:
            values = values / values.sum()
        np.add.at(weights[row], np.clip(places, 0, axis.size - 1), values)
    return weights


def is_outside(axis: Axis, how: Interpolation) -> np.ndarray:
    """Which outputs lie outside the input and get the extrapolation value, boolean ``[out]``."""
    at = source_positions(axis, how.coordinates)
    return (at < 0) | (at > axis.size - 1)


def _kernel(distance: np.ndarray, how: Interpolation) -> np.ndarray:
    x, a = np.abs(distance), how.cubic_coefficient
    if how.mode == "linear":
        return np.maximum(1.0 - x, 0.0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
