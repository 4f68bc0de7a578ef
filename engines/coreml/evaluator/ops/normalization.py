"""Normalizations."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.reshape(1, -1, *[1] * (x.ndim - 2))


def _scaled(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    if gamma is not None:
        x = x * gamma
    return x if beta is None else x + beta


def _normalized(x: Tensor, axes: tuple[int, ...], epsilon: float) -> Tensor:
    centred = x - np.mean(x, axes, keepdims=True)
    variance = np.mean(np.square(centred), axes, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(epsilon))


@op
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    deviation = np.sqrt(variance + variance.dtype.type(epsilon))
    result = (x - _per_channel(mean, x)) / _per_channel(deviation, x)
    return _scaled(
        result,
        None if gamma is None else _per_channel(gamma, x),
        None if beta is None else _per_channel(beta, x),
    )


@op
def instance_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    if not 3 <= x.ndim <= 4:
        raise ValueError(f"takes 3 or 4 dims, found {x.ndim}")
    return _scaled(
        _normalized(x, tuple(range(2, x.ndim)), epsilon),
        None if gamma is None else _per_channel(gamma, x),
        None if beta is None else _per_channel(beta, x),
    )


@op
def layer_norm(
    x: Tensor,
    axes: list[int] | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    chosen = tuple(axis % x.ndim for axis in (range(x.ndim) if axes is None else axes))
    shape = [size if axis in chosen else 1 for axis, size in enumerate(x.shape)]
    return _scaled(
        _normalized(x, chosen, epsilon),
        None if gamma is None else gamma.reshape(shape),
        None if beta is None else beta.reshape(shape),
    )


@op
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Over the last three axes."""
    squares = np.sum(np.square(x), (-3, -2, -1), keepdims=True)
    return x / np.sqrt(squares + x.dtype.type(epsilon))


@op
def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    if size % 2 == 0:
        raise ValueError(f"has the even size {size}; which channels it then takes is not documented")
    channels = x.shape[1]
    padded = np.pad(np.square(x), [(0, 0), (size // 2, size // 2), *[(0, 0)] * (x.ndim - 2)])
    squares = sum(padded[:, offset : offset + channels] for offset in range(size))
    return x / np.power(x.dtype.type(k) + x.dtype.type(alpha / size) * squares, x.dtype.type(beta))
