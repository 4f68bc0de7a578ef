"""Convolutions. Shapes: ``x`` ``[N, C, *D]`` with one to three spatial dims."""

from __future__ import annotations

import math

import numpy as np

from intaglio.engines.coreml.evaluator.ops.windows import at_place, extents, pad_spatial, padding, places, same_padding
from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _add_bias(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias.reshape(1, -1, *[1] * (result.ndim - 2))


@op
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """``weight`` ``[C_out, C / groups, *K]``."""
    kernel = weight.shape[2:]
    strides = strides or [1] * len(kernel)
    dilations = dilations or [1] * len(kernel)
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(f"has {x.shape[1]} channels for a weight of shape {list(weight.shape)} in {groups} groups")
    spans = extents(kernel, dilations)
    pads = padding(pad_type, pad, x.shape[2:], spans, strides)
    padded = pad_spatial(x, pads)
    sizes = [(size - span) // stride + 1 for size, span, stride in zip(padded.shape[2:], spans, strides, strict=True)]
    batch, out = x.shape[0], weight.shape[0]
    # [groups, C_out / groups, C / groups, *K] times [N, groups, C / groups, windows], summed over K.
    grouped = weight.reshape(groups, out // groups, *weight.shape[1:])
    result = np.zeros((batch, groups, out // groups, math.prod(sizes)), x.dtype)
    for place, values in places(padded, kernel, strides, dilations, sizes):
        columns = values.reshape(batch, groups, weight.shape[1], -1)
        result += np.matmul(at_place(grouped, place), columns)
    return _add_bias(result.reshape(batch, out, *sizes), bias)


@op
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    pad: list[int] | None = None,
    output_shape: list[int] | None = None,
    pad_type: str = "valid",
    strides: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """``weight`` ``[C, C_out / groups, *K]``. Padding is cut from the full result; ``output_shape`` may extend it."""
    kernel = weight.shape[2:]
    strides = strides or [1] * len(kernel)
    dilations = dilations or [1] * len(kernel)
    if x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ValueError(f"has {x.shape[1]} channels for a weight of shape {list(weight.shape)} in {groups} groups")
    spans = extents(kernel, dilations)
    full = [(size - 1) * stride + span for size, stride, span in zip(x.shape[2:], strides, spans, strict=True)]
    wanted = None if output_shape is None else output_shape[2:]
    begins, sizes = _cut(pad_type, pad, full, x.shape[2:], strides, wanted)

    batch, out = x.shape[0], weight.shape[1] * groups
    grouped = weight.reshape(groups, x.shape[1] // groups, *weight.shape[1:]).swapaxes(1, 2)
    columns = x.reshape(batch, groups, x.shape[1] // groups, -1)
    # Wide enough for a result that is longer than the full one: nothing reaches its end.
    reach = [max(length, begin + size) for length, begin, size in zip(full, begins, sizes, strict=True)]
    result = np.zeros((batch, out, *reach), x.dtype)
    for place, target in places(result, kernel, strides, dilations, x.shape[2:]):
        target += np.matmul(at_place(grouped, place), columns).reshape(target.shape)
    cut = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
    return _add_bias(result[(slice(None), slice(None), *cut)], bias)


def _cut(
    pad_type: str,
    pad: list[int] | None,
    full: list[int],
    inputs: tuple[int, ...],
    strides: list[int],
    wanted: list[int] | None,
) -> tuple[list[int], list[int]]:
    """Where the result begins in the full one, and how long it is, for each spatial dim."""
    if pad_type == "custom":
        pads = padding("custom", pad, full, full, strides)
        sizes = [length - before - after for length, (before, after) in zip(full, pads, strict=True)]
        return [before for before, _ in pads], wanted or sizes
    if pad_type == "valid":
        return [0] * len(full), wanted or full
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"has the padding {pad_type!r}, expected valid, same, same_lower or custom")
    sizes = wanted or [size * stride for size, stride in zip(inputs, strides, strict=True)]
    totals = [max(0, length - size) for length, size in zip(full, sizes, strict=True)]
    return [same_padding(total, pad_type == "same_lower")[0] for total in totals], sizes
