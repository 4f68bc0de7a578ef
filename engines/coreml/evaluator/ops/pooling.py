"""Pooling. Shapes: ``x`` ``[N, C, *D]`` with one to three spatial dims."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.engines.coreml.evaluator.ops.windows import Pads, pad_spatial, padding, places
from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _sizes(
    inputs: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Pads, ceil_mode: bool
) -> list[int]:
    """Number of windows in each dim. With ``ceil_mode`` the last one may reach beyond the padding, as in PyTorch."""
    sizes = []
    for size, span, stride, (before, after) in zip(inputs, kernel, strides, pads, strict=True):
        room = size + before + after - span
        count = (-(-room // stride) if ceil_mode else room // stride) + 1
        if ceil_mode and before + after > 0 and (count - 1) * stride >= size + before:
            count -= 1
        sizes.append(count)
    return sizes


def _prepare(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pad_type: str,
    pad: Sequence[int] | None,
    ceil_mode: bool,
) -> tuple[Pads, Pads, list[int]]:
    """Padding, what must follow after it so that the last windows fit, and the number of windows."""
    if ceil_mode and pad_type in ("same", "same_lower"):
        raise ValueError("has ceil_mode with same padding, which Core ML does not take")
    pads = padding(pad_type, pad, x.shape[2:], kernel, strides)
    sizes = _sizes(x.shape[2:], kernel, strides, pads, ceil_mode)
    beyond = [
        (0, max(0, (count - 1) * stride + span - (size + before + after)))
        for count, stride, span, size, (before, after) in zip(sizes, strides, kernel, x.shape[2:], pads, strict=True)
    ]
    return pads, beyond, sizes


def _sum(x: Tensor, kernel: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> Tensor:
    ones = [1] * len(kernel)
    return np.sum([values for _, values in places(x, kernel, strides, ones, sizes)], axis=0)


@op
def max_pool(
    x: Tensor,
    kernel_sizes: list[int],
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    strides = strides or [1] * len(kernel_sizes)
    pads, beyond, sizes = _prepare(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = pad_spatial(pad_spatial(x, pads, -np.inf), beyond, -np.inf)
    ones = [1] * len(kernel_sizes)
    return np.max([values for _, values in places(padded, kernel_sizes, strides, ones, sizes)], axis=0)


@op
def avg_pool(
    x: Tensor,
    kernel_sizes: list[int],
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    strides = strides or [1] * len(kernel_sizes)
    pads, beyond, sizes = _prepare(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = pad_spatial(pad_spatial(x, pads), beyond)
    counted = np.ones((1, 1, *x.shape[2:]), x.dtype)
    counted = pad_spatial(counted, pads, 0.0 if exclude_padding_from_average else 1.0)
    counts = _sum(pad_spatial(counted, beyond), kernel_sizes, strides, sizes)
    return _sum(padded, kernel_sizes, strides, sizes) / counts


@op
def l2_pool(
    x: Tensor,
    kernel_sizes: list[int],
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    strides = strides or [1] * len(kernel_sizes)
    pads, beyond, sizes = _prepare(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = pad_spatial(pad_spatial(np.square(x), pads), beyond)
    return np.sqrt(_sum(padded, kernel_sizes, strides, sizes))
