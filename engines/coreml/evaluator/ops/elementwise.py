"""Arithmetic, functions, comparison and logic, value by value with NumPy's broadcasting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


@op
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@op
def sub(x: Tensor, y: Tensor) -> Tensor:
    return x - y


@op
def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@op
def real_div(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.kind != "f":
        raise ValueError("divides integers, for which Core ML does not say how it rounds; cast them or use floor_div")
    return x / y


@op
def floor_div(x: Tensor, y: Tensor) -> Tensor:
    return np.floor_divide(x, y)


@op
def mod(x: Tensor, y: Tensor) -> Tensor:
    """The result has the sign of ``y``, as Python's."""
    return np.mod(x, y)


@op
def pow_(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.kind == "f":
        return np.power(x, y)
    if np.any(y < 0):
        raise ValueError("raises integers to a negative power, which has no integer result")
    return np.power(x, y)


@op
def maximum(x: Tensor, y: Tensor) -> Tensor:
    return np.maximum(x, y)


@op
def minimum(x: Tensor, y: Tensor) -> Tensor:
    return np.minimum(x, y)


@op
def equal(x: Tensor, y: Tensor) -> Tensor:
    return x == y


@op
def not_equal(x: Tensor, y: Tensor) -> Tensor:
    return x != y


@op
def greater(x: Tensor, y: Tensor) -> Tensor:
    return x > y


@op
def greater_equal(x: Tensor, y: Tensor) -> Tensor:
    return x >= y


@op
def less(x: Tensor, y: Tensor) -> Tensor:
    return x < y


@op
def less_equal(x: Tensor, y: Tensor) -> Tensor:
    return x <= y


@op
def logical_and(x: Tensor, y: Tensor) -> Tensor:
    return np.logical_and(x, y)


@op
def logical_or(x: Tensor, y: Tensor) -> Tensor:
    return np.logical_or(x, y)


@op
def logical_xor(x: Tensor, y: Tensor) -> Tensor:
    return np.logical_xor(x, y)


@op
def logical_not(x: Tensor) -> Tensor:
    return np.logical_not(x)


@op
def abs_(x: Tensor) -> Tensor:
    return np.abs(x)


@op
def acos(x: Tensor) -> Tensor:
    return np.arccos(x)


@op
def asin(x: Tensor) -> Tensor:
    return np.arcsin(x)


@op
def atan(x: Tensor) -> Tensor:
    return np.arctan(x)


@op
def atanh(x: Tensor) -> Tensor:
    return np.arctanh(x)


@op
def ceil(x: Tensor) -> Tensor:
    return np.ceil(x)


@op
def clip(x: Tensor, alpha: float, beta: float) -> Tensor:
    return np.minimum(np.maximum(x, x.dtype.type(alpha)), x.dtype.type(beta))


@op
def cos(x: Tensor) -> Tensor:
    return np.cos(x)


@op
def cosh(x: Tensor) -> Tensor:
    return np.cosh(x)


@op
def erf(x: Tensor) -> Tensor:
    flat = np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size)
    return flat.reshape(x.shape).astype(x.dtype)


@op
def exp(x: Tensor) -> Tensor:
    return np.exp(x)


@op
def exp2(x: Tensor) -> Tensor:
    return np.exp2(x) if x.dtype.kind == "f" else np.exp2(x.astype(np.float64)).astype(x.dtype)


@op
def floor(x: Tensor) -> Tensor:
    return np.floor(x)


@op
def inverse(x: Tensor, epsilon: float = 1e-4) -> Tensor:
    return 1 / (x + x.dtype.type(epsilon))


@op
def log(x: Tensor, epsilon: float = 1e-45) -> Tensor:
    return np.log(x + x.dtype.type(epsilon))


@op
def round_(x: Tensor) -> Tensor:
    """Halves go to the even neighbour."""
    return np.rint(x)


@op
def rsqrt(x: Tensor, epsilon: float = 1e-12) -> Tensor:
    return 1 / np.sqrt(x + x.dtype.type(epsilon))


@op
def sign(x: Tensor) -> Tensor:
    return np.sign(x)


@op
def sin(x: Tensor) -> Tensor:
    return np.sin(x)


@op
def sinh(x: Tensor) -> Tensor:
    return np.sinh(x)


@op
def sqrt(x: Tensor) -> Tensor:
    return np.sqrt(x)


@op
def square(x: Tensor) -> Tensor:
    return x * x


@op
def tan(x: Tensor) -> Tensor:
    return np.tan(x)


@op
def tanh(x: Tensor) -> Tensor:
    return np.tanh(x)


@op
def threshold(x: Tensor, alpha: float) -> Tensor:
    return np.maximum(x, x.dtype.type(alpha))


@op(widen=False)
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return np.where(cond, a, b)


_CASTS: dict[str, type[np.generic]] = {
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "bool": np.bool_,
}


@op(widen=False)
def cast(x: Tensor, dtype: str) -> Tensor:
    """Floats are truncated to integers; those out of range end at its limits and NaN gives 0, as on ARM processors."""
    if dtype not in _CASTS:
        raise ValueError(f"casts to {dtype!r}; known are {sorted(_CASTS)}")
    target: np.dtype[Any] = np.dtype(_CASTS[dtype])
    if x.dtype.kind == "f" and target.kind in "iu":
        limits = np.iinfo(target)
        return np.clip(np.trunc(np.nan_to_num(x.astype(np.float64))), limits.min, limits.max).astype(target)
    return x.astype(target)
