"""Ops that change shapes and move no values, or move whole axes."""

from __future__ import annotations

import math

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


@op(widen=False)
def identity(x: Tensor) -> Tensor:
    return x


@op(widen=False)
def shape(x: Tensor) -> Tensor:
    return np.array(x.shape, np.int32)


@op(widen=False)
def reshape(x: Tensor, shape: list[int]) -> Tensor:
    """A 0 stands for the dim of ``x`` in the same place from the right, or 1 where ``x`` has none; -1 for the rest."""
    wanted = list(shape)
    for place, size in enumerate(wanted):
        if size == 0 and x.size > 0:
            source = place - len(wanted) + x.ndim
            wanted[place] = x.shape[source] if source >= 0 else 1
    return x.reshape(wanted)


@op(widen=False)
def reshape_like(
    x: Tensor, ref_tensors: list[Tensor], begins: list[int], ends: list[int], end_masks: list[bool]
) -> Tensor:
    wanted: list[int] = []
    for reference, begin, end, to_the_end in zip(ref_tensors, begins, ends, end_masks, strict=True):
        wanted += reference.shape[begin:] if to_the_end else reference.shape[begin:end]
    return x.reshape(wanted)


@op(widen=False)
def expand_dims(x: Tensor, axes: list[int]) -> Tensor:
    return np.expand_dims(x, tuple(axes))


@op(widen=False)
def squeeze(x: Tensor, axes: list[int] | None = None) -> Tensor:
    """Dims that are not 1 are left, as in PyTorch."""
    chosen = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    return np.squeeze(x, tuple(axis for axis in chosen if x.shape[axis] == 1))


@op(widen=False)
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op(widen=False)
def transpose(x: Tensor, perm: list[int]) -> Tensor:
    return np.transpose(x, perm)


@op(widen=False)
def reverse(x: Tensor, axes: list[int] | None = None) -> Tensor:
    return np.flip(x, None if axes is None else tuple(axes))


@op(widen=False)
def reverse_sequence(x: Tensor, lengths: list[int], seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    result = np.moveaxis(x, (batch_axis, seq_axis), (0, 1)).copy()
    for row, length in enumerate(lengths):
        result[row, :length] = result[row, :length][::-1].copy()
    return np.moveaxis(result, (0, 1), (batch_axis, seq_axis))


@op(widen=False)
def tile(x: Tensor, reps: list[int]) -> Tensor:
    if len(reps) != x.ndim:
        raise ValueError(f"has {len(reps)} repetitions for {x.ndim} dims")
    return np.tile(x, reps)


@op(widen=False)
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    """Windows in the place of ``axis``, their values in the axis after it."""
    axis %= x.ndim
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis)
    windows = windows[(slice(None),) * axis + (slice(None, None, stride),)]
    return np.moveaxis(windows, -1, axis + 1)
