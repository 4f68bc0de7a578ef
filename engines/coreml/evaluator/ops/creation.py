"""Tensors from shapes and numbers, and padding."""

from __future__ import annotations

import math

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op

_ZERO = np.zeros((), np.float32)


@op(widen=False)
def fill(shape: list[int], value: Tensor = _ZERO) -> Tensor:
    return np.full(shape, value.reshape(()), value.dtype)


@op(widen=False)
def fill_like(ref_tensor: Tensor, value: Tensor = _ZERO) -> Tensor:
    return np.full(ref_tensor.shape, value.reshape(()), value.dtype)


@op
def range_1d(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    first, last, by = (value.reshape(()).item() for value in (start, end, step))
    count = max(0, math.ceil((last - first) / by))
    return (first + np.arange(count) * by).astype(start.dtype)


@op(widen=False)
def one_hot(indices: Tensor, one_hot_vector_size: int, on_value: Tensor, off_value: Tensor, axis: int = -1) -> Tensor:
    """An index out of range gives ``off_value`` everywhere."""
    hot = np.expand_dims(indices, axis)
    axis = axis + hot.ndim if axis < 0 else axis
    numbers = np.arange(one_hot_vector_size).reshape([-1 if dim == axis else 1 for dim in range(hot.ndim)])
    return np.where(hot == numbers, on_value.reshape(()), off_value.reshape(()))


@op(widen=False)
def non_zero(x: Tensor) -> Tensor:
    """``[N, rank]``: the index of each value that is not zero."""
    return np.argwhere(x)


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@op(widen=False)
def pad(x: Tensor, pad: list[int], mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """``pad`` has two numbers for each of the last dims, the first of these first."""
    if mode not in _PAD_MODES:
        raise ValueError(f"has the mode {mode!r}, expected one of {sorted(_PAD_MODES)}")
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ValueError(f"has {len(pad)} pads for {x.ndim} dims")
    if min(pad, default=0) < 0:
        raise ValueError(f"has the negative pads {pad}")
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        return np.pad(x, widths, constant_values=x.dtype.type(constant_val))
    if mode == "reflect" and any(max(width) >= size for width, size in zip(widths, x.shape, strict=True) if any(width)):
        raise ValueError(f"reflects {widths} in a tensor of shape {list(x.shape)}, at most each dim less one")
    return np.pad(x, widths, mode=_PAD_MODES[mode])  # type: ignore[call-overload]
