"""Activation functions."""

from __future__ import annotations

import math

import numpy as np

from intaglio.engines.coreml.evaluator.ops.elementwise import erf
from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A value per channel (axis 1 of ``x``), or one for all, ready to broadcast."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter.reshape(1, -1, *[1] * (x.ndim - 2))


@op
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Tensor:
    return np.minimum(np.where(x >= 0, x, x * x.dtype.type(alpha)), x.dtype.type(beta))


@op
def elu(x: Tensor, alpha: float) -> Tensor:
    return np.where(x > 0, x, x.dtype.type(alpha) * np.expm1(x))


@op
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    if mode == "EXACT":
        return x * (erf(x * x.dtype.type(math.sqrt(0.5))) + 1) / 2
    if mode == "TANH_APPROXIMATION":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return x * (np.tanh(inner) + 1) / 2
    if mode == "SIGMOID_APPROXIMATION":
        return x * sigmoid(1.702 * x)
    raise ValueError(f"has the mode {mode!r}, expected EXACT, TANH_APPROXIMATION or SIGMOID_APPROXIMATION")


@op
def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    return np.where(x >= 0, x, x * x.dtype.type(alpha))


@op
def linear_activation(x: Tensor, alpha: float, beta: float) -> Tensor:
    return x * x.dtype.type(alpha) + x.dtype.type(beta)


@op
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    return np.where(x > 0, x, x * _per_channel(alpha, x))


@op
def relu(x: Tensor) -> Tensor:
    return np.maximum(x, 0)


@op
def relu6(x: Tensor) -> Tensor:
    return np.minimum(np.maximum(x, 0), 6)


@op
def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Tensor:
    return x.dtype.type(alpha) * np.tanh(x * x.dtype.type(beta))


@op
def sigmoid(x: Tensor) -> Tensor:
    # Never the exponential of a large number: it would overflow.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


@op
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Tensor:
    return np.minimum(np.maximum(x * x.dtype.type(alpha) + x.dtype.type(beta), 0), 1)


@op
def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


@op
def softplus(x: Tensor) -> Tensor:
    return np.logaddexp(x, x.dtype.type(0))


@op
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return _per_channel(alpha, x) * np.logaddexp(x * _per_channel(beta, x), x.dtype.type(0))


@op
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    powers = np.exp(x - np.max(x, axis, keepdims=True))
    return powers / np.sum(powers, axis, keepdims=True)


@op
def softsign(x: Tensor) -> Tensor:
    return x / (1 + np.abs(x))


@op
def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    return np.where(x >= alpha, x, x.dtype.type(0))
