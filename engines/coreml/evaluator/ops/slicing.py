"""Slices, and updates of slices."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _index(
    shape: tuple[int, ...],
    begin: list[int],
    end: list[int],
    stride: list[int] | None,
    begin_mask: list[bool] | None,
    end_mask: list[bool] | None,
    squeeze_mask: list[bool] | None,
) -> tuple[slice | int, ...]:
    """NumPy's index for the arguments of slice_by_index. Negative numbers count from the end, as in Python."""
    rank = len(shape)
    if len(begin) != rank or len(end) != rank:
        raise ValueError(f"has {len(begin)} begins and {len(end)} ends for {rank} dims")
    no_mask = [False] * rank
    index: list[slice | int] = []
    for first, last, step, from_start, to_end, squeeze in zip(
        begin,
        end,
        stride or [1] * rank,
        begin_mask or no_mask,
        end_mask or no_mask,
        squeeze_mask or no_mask,
        strict=True,
    ):
        if squeeze:
            index.append(0 if from_start else first)
        else:
            index.append(slice(None if from_start else first, None if to_end else last, step))
    return tuple(index)


@op(widen=False)
def slice_by_index(
    x: Tensor,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    squeeze_mask: list[bool] | None = None,
) -> Tensor:
    return x[_index(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


@op(widen=False)
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    squeeze_mask: list[bool] | None = None,
) -> Tensor:
    index = _index(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if x[index].shape != update.shape:
        raise ValueError(f"writes {list(update.shape)} into a slice of {list(x[index].shape)}")
    result = x.copy()
    result[index] = update
    return result


@op(widen=False)
def slice_by_size(x: Tensor, begin: list[int], size: list[int]) -> Tensor:
    """A size of -1 takes the rest."""
    index = []
    for dim, first, count in zip(x.shape, begin, size, strict=True):
        first = first + dim if first < 0 else first
        last = dim if count == -1 else first + count
        if not 0 <= first <= last <= dim:
            raise ValueError(f"takes {count} values from {first} on in a dim of {dim}")
        index.append(slice(first, last))
    return x[tuple(index)]


@op(widen=False)
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """Zeros outside of a band of the last two axes: at most ``lower`` below the diagonal and ``upper`` above it."""
    below = np.arange(x.shape[-2])[:, None] - np.arange(x.shape[-1])[None, :]
    inside = ((lower < 0) | (below <= lower)) & ((upper < 0) | (-below <= upper))
    return np.where(inside, x, x.dtype.type(0))
