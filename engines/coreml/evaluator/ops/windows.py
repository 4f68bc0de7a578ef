"""What convolutions and pooling share: padding by type, and the input's values at each place of the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor

Pads = list[tuple[int, int]]


def same_padding(total: int, lower: bool) -> tuple[int, int]:
    """``total`` in two halves. The odd one goes to the end, or with ``lower`` to the beginning."""
    small, large = total // 2, total - total // 2
    return (large, small) if lower else (small, large)


def padding(
    pad_type: str, pad: Sequence[int] | None, sizes: Sequence[int], extents: Sequence[int], strides: Sequence[int]
) -> Pads:
    """Values before and after each spatial dim of ``sizes``, for windows of ``extents`` (dilation included)."""
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type == "custom":
        if pad is None or len(pad) != 2 * len(sizes):
            raise ValueError(f"has the custom padding {pad}, expected {2 * len(sizes)} values")
        return [(pad[2 * i], pad[2 * i + 1]) for i in range(len(sizes))]
    if pad_type in ("same", "same_lower"):
        totals = [
            max(0, (-(-size // stride) - 1) * stride + extent - size)
            for size, extent, stride in zip(sizes, extents, strides, strict=True)
        ]
        return [same_padding(total, pad_type == "same_lower") for total in totals]
    raise ValueError(f"has the padding {pad_type!r}, expected valid, same, same_lower or custom")


def extents(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """How many input values a kernel spans in each dim."""
    return [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]


def places(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Each place of the kernel, and ``x`` ``[N, C, *D]`` (padded) there in all windows, ``sizes`` of them."""
    for place in itertools.product(*map(range, kernel)):
        spatial = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(place, dilations, sizes, strides, strict=True)
        )
        yield place, x[(slice(None), slice(None), *spatial)]


def pad_spatial(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    """``x`` ``[N, C, *D]`` with its spatial dims padded."""
    return np.pad(x, [(0, 0), (0, 0), *pads], constant_values=x.dtype.type(value))


def at_place(weight: Tensor, place: tuple[int, ...]) -> Tensor:
    """The weights ``[..., *K]`` at one place of the kernel."""
    index: tuple[Any, ...] = (..., *place)
    return weight[index]
