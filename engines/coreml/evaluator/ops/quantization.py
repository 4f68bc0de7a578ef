"""Quantizing and dequantizing at run time, with one scale or one per index of an axis."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def along(parameter: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """A scalar, or a vector along ``axis`` of ``x``, ready to broadcast."""
    if parameter.ndim == 0:
        return parameter
    if axis is None:
        raise ValueError("has a vector of scales but no axis")
    if parameter.shape != (x.shape[axis],):
        raise ValueError(f"has {list(parameter.shape)} scales for axis {axis} of {list(x.shape)}")
    return parameter.reshape([-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)])


@op
def quantize(
    input: Tensor,  # noqa: A002
    scale: Tensor,
    output_dtype: str,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> Tensor:
    if output_dtype not in ("int8", "uint8"):
        raise ValueError(f"quantizes to {output_dtype!r}, expected int8 or uint8")
    values = np.rint(input / along(scale, input, axis))
    if zero_point is not None:
        values = values + along(zero_point.astype(np.float32), input, axis)
    limits = np.iinfo(output_dtype)
    return np.clip(values, limits.min, limits.max).astype(output_dtype)


@op
def dequantize(
    input: Tensor,  # noqa: A002
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int | None = None,
) -> Tensor:
    values = input.astype(np.float32)
    if zero_point is not None:
        values = values - along(zero_point.astype(np.float32), input, axis)
    return values * along(scale, input, axis)
