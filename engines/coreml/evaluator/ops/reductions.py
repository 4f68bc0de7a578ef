"""Reductions. Without ``axes`` all axes are reduced."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _axes(axes: list[int] | None) -> tuple[int, ...] | None:
    return None if axes is None else tuple(axes)


def _floats(x: Tensor) -> Tensor:
    if x.dtype.kind != "f":
        raise ValueError("has no integer result on integers; cast them")
    return x


@op
def reduce_argmax(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    """The first of equal values."""
    return np.argmax(x, axis, keepdims=keep_dims)


@op
def reduce_argmin(x: Tensor, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
    """The first of equal values."""
    return np.argmin(x, axis, keepdims=keep_dims)


@op
def reduce_l1_norm(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.sum(np.abs(x), _axes(axes), keepdims=keep_dims)


@op
def reduce_l2_norm(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.sqrt(np.sum(np.square(_floats(x)), _axes(axes), keepdims=keep_dims))


@op
def reduce_log_sum(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.log(np.sum(_floats(x), _axes(axes), keepdims=keep_dims))


@op
def reduce_log_sum_exp(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    greatest = np.max(_floats(x), _axes(axes), keepdims=True)
    shift = np.where(np.isfinite(greatest), greatest, x.dtype.type(0))
    result = np.log(np.sum(np.exp(x - shift), _axes(axes), keepdims=True)) + shift
    return result if keep_dims else np.squeeze(result, _axes(axes))


@op
def reduce_max(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.max(x, _axes(axes), keepdims=keep_dims)


@op
def reduce_mean(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.mean(_floats(x), _axes(axes), keepdims=keep_dims)


@op
def reduce_min(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.min(x, _axes(axes), keepdims=keep_dims)


@op
def reduce_prod(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.prod(x, _axes(axes), keepdims=keep_dims)


@op
def reduce_sum(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.sum(x, _axes(axes), keepdims=keep_dims)


@op
def reduce_sum_square(x: Tensor, axes: list[int] | None = None, keep_dims: bool = False) -> Tensor:
    return np.sum(np.square(x), _axes(axes), keepdims=keep_dims)


@op
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    ordered = np.flip(x, axis) if reverse else x
    result = np.cumsum(ordered, axis, dtype=x.dtype)
    if exclusive:
        result = result - ordered
    return np.flip(result, axis) if reverse else result
