"""Joining and splitting tensors."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


@op(widen=False)
def concat(values: list[Tensor], axis: int, interleave: bool = False) -> Tensor:
    parts = [np.atleast_1d(value) for value in values]
    if not interleave:
        return np.concatenate(parts, axis)
    axis %= parts[0].ndim
    joined = np.stack(parts, axis + 1)
    sizes = list(parts[0].shape)
    sizes[axis] *= len(parts)
    return joined.reshape(sizes)


@op(widen=False)
def stack(values: list[Tensor], axis: int) -> Tensor:
    return np.stack(values, axis)


@op(widen=False)
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: list[int] | None = None
) -> tuple[Tensor, ...]:
    if split_sizes is None:
        if num_splits is None:
            raise ValueError("has neither num_splits nor split_sizes")
        return tuple(np.split(x, num_splits, axis))
    if sum(split_sizes) != x.shape[axis]:
        raise ValueError(f"splits {x.shape[axis]} values into {split_sizes}")
    return tuple(np.split(x, np.cumsum(split_sizes)[:-1], axis))
