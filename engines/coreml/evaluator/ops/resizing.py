"""Resizing of the last dims.

Where the result's values lie in the input follows from the sampling mode. Of nearest neighbours, Core ML's ``resize``
and ``resize_nearest_neighbor`` take the input value whose cell holds the middle of the result's;
``upsample_nearest_neighbor`` takes the one that holds its beginning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def grid(mode: str, inputs: int, outputs: int) -> Tensor:
    """For each of ``outputs`` values its place among ``inputs``, float64."""
    places = np.arange(outputs, dtype=np.float64)
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if outputs == 1:
            points = np.array([(inputs - 1) / 2 if mode == "ALIGN_CORNERS" else 0.0])
        else:
            points = places * (inputs - 1) / (outputs - 1)
    elif mode == "DEFAULT":
        points = places * inputs / outputs
    elif mode == "OFFSET_CORNERS":
        points = (places + 0.5) * max(1, inputs - 1) / outputs
    elif mode == "UNALIGN_CORNERS":
        points = (places + 0.5) * inputs / outputs - 0.5
    else:
        raise ValueError(f"has the sampling mode {mode!r}, which is not known")
    return np.clip(points, 0, inputs - 1)


def _linear(x: Tensor, axis: int, points: Tensor) -> Tensor:
    below = np.floor(points).astype(np.int64)
    above = np.minimum(below + 1, x.shape[axis] - 1)
    weights = (points - below).astype(x.dtype).reshape([-1] + [1] * (x.ndim - 1 - axis % x.ndim))
    low, high = np.take(x, below, axis), np.take(x, above, axis)
    return low * (1 - weights) + high * weights


def _nearest(x: Tensor, axis: int, points: Tensor) -> Tensor:
    return np.take(x, np.clip(np.floor(points).astype(np.int64), 0, x.shape[axis] - 1), axis)


def _middles(inputs: int, outputs: int) -> Tensor:
    return (np.arange(outputs) + 0.5) * inputs / outputs


def _each(
    x: Tensor, sizes: dict[int, int], points: Callable[[int, int], Tensor], interpolate: Callable[..., Tensor]
) -> Tensor:
    """Interpolates axis by axis to the ``sizes`` wanted."""
    for axis, size in sizes.items():
        x = interpolate(x, axis, points(x.shape[axis], size))
    return x


@op
def resize_bilinear(
    x: Tensor, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    sizes = {-2: target_size_height, -1: target_size_width}
    return _each(x, sizes, lambda inputs, outputs: grid(sampling_mode, inputs, outputs), _linear)


@op(widen=False)
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    return _each(x, {-2: target_size_height, -1: target_size_width}, _middles, _nearest)


@op
def resize(
    x: Tensor,
    shape: list[int],
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """The last ``resized_dims`` dims become the last ones of ``shape``; a 0 leaves its dim."""
    wanted = {axis - resized_dims: size for axis, size in enumerate(shape[len(shape) - resized_dims :]) if size}
    if interpolation_mode == "LINEAR":
        return _each(x, wanted, lambda inputs, outputs: grid(sampling_mode, inputs, outputs), _linear)
    if interpolation_mode != "NEAREST_NEIGHBOR":
        raise ValueError(f"has the interpolation {interpolation_mode!r}, expected LINEAR or NEAREST_NEIGHBOR")
    if sampling_mode != "DEFAULT":
        raise ValueError(f"takes nearest neighbours with the sampling mode {sampling_mode}, which is not documented")
    return _each(x, wanted, _middles, _nearest)


@op
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """The spacing follows from the sizes, not from the factors."""
    if align_corners:
        mode = "STRICT_ALIGN_CORNERS"
    else:
        mode = "DEFAULT" if half_pixel_centers is False else "UNALIGN_CORNERS"
    sizes = {-2: int(x.shape[-2] * scale_factor_height), -1: int(x.shape[-1] * scale_factor_width)}
    return _each(x, sizes, lambda inputs, outputs: grid(mode, inputs, outputs), _linear)


@op(widen=False)
def upsample_nearest_neighbor(x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1) -> Tensor:
    for axis, factor in ((-2, scale_factor_height), (-1, scale_factor_width)):
        x = _nearest(x, axis, np.arange(int(x.shape[axis] * factor)) / factor)
    return x
