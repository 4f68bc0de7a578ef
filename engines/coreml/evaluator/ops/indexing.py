"""Gathering and scattering.

From iOS 17 on an index that is negative or too large is undefined behaviour, so it is an error here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op

_MODES: dict[str, Callable[..., None]] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _check(indices: Tensor, size: int) -> Tensor:
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        wrong = indices[(indices < 0) | (indices >= size)].flat[0]
        raise ValueError(f"has the index {wrong} for a dim of {size}; Core ML defines only 0 to {size - 1}")
    return indices.astype(np.int64)


def _scatter(data: Tensor, index: tuple[Any, ...], updates: Tensor, mode: str) -> Tensor:
    result = data.copy()
    if mode == "update":
        result[index] = updates
    elif mode in _MODES:
        _MODES[mode](result, index, updates)
    else:
        raise ValueError(f"has the mode {mode!r}, expected update or one of {sorted(_MODES)}")
    return result


@op(widen=False)
def gather(x: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    axis %= x.ndim
    _check(indices, x.shape[axis])
    if batch_dims == 0:
        return np.take(x, indices, axis)
    batch = x.shape[:batch_dims]
    if indices.shape[:batch_dims] != batch or axis < batch_dims:
        raise ValueError(f"has {batch_dims} batch dims for indices of shape {list(indices.shape)} along axis {axis}")
    results = [np.take(x[at], indices[at], axis - batch_dims) for at in np.ndindex(*batch)]
    return np.stack(results).reshape(*batch, *results[0].shape)


@op(widen=False)
def gather_along_axis(x: Tensor, indices: Tensor, axis: int = 0, validate_indices: bool = False) -> Tensor:
    checked = _check(indices, x.shape[axis])
    axis %= x.ndim
    for dim in range(x.ndim):
        if dim != axis and x.shape[dim] != indices.shape[dim]:
            raise ValueError(f"has indices of shape {list(indices.shape)} for {list(x.shape)} along axis {axis}")
    return np.take_along_axis(x, checked, axis)


@op(widen=False)
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    return x[_nd_index(x, indices, batch_dims)]


def _nd_index(x: Tensor, indices: Tensor, batch_dims: int = 0) -> tuple[Tensor, ...]:
    """NumPy's index for index vectors in the last axis of ``indices``, after ``batch_dims`` axes that both share."""
    rank = indices.ndim - 1
    batch = [
        np.arange(size).reshape([size if dim == place else 1 for dim in range(rank)])
        for place, size in enumerate(x.shape[:batch_dims])
    ]
    vectors = [_check(indices[..., i], x.shape[batch_dims + i]) for i in range(indices.shape[-1])]
    return (*batch, *vectors)


@op(widen=False)
def scatter(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    """``updates`` has the axes of ``indices`` in the place of ``axis``."""
    axis %= data.ndim
    checked = _check(indices, data.shape[axis])
    if updates.shape != (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]):
        raise ValueError(f"has updates of shape {list(updates.shape)} for {list(data.shape)} along axis {axis}")
    return _scatter(data, (*[slice(None)] * axis, checked), updates, mode)


@op(widen=False)
def scatter_along_axis(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    if indices.shape != updates.shape or indices.ndim != data.ndim:
        raise ValueError(f"has updates of shape {list(updates.shape)} for indices of shape {list(indices.shape)}")
    checked = _check(indices, data.shape[axis])
    index: list[Any] = list(np.indices(indices.shape, sparse=True))
    index[axis] = checked
    return _scatter(data, tuple(index), updates, mode)


@op(widen=False)
def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    if updates.shape != (*indices.shape[:-1], *data.shape[indices.shape[-1] :]):
        raise ValueError(f"has updates of shape {list(updates.shape)} for indices of shape {list(indices.shape)}")
    return _scatter(data, _nd_index(data, indices), updates, mode)
