"""Pooling over windows and over whole axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import constant, in_float, static_sizes
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.windows import (
    Window,
    pad_spatial,
    read_window,
    reduced,
    same_pad_type,
    taps,
    with_ceiling,
)
from intaglio.engines.coreml.registry import converter

# Below every float16, so that it never is the maximum, and finite, so that nothing becomes NaN.
_LOWEST = {"fp16": -65504.0, "fp32": -3.4028235e38}


@converter
def MaxPool(node: Node) -> Var | Sequence[Var]:
    if len(node.outputs) > 1 and node.outputs[1]:
        return _max_pool_with_indices(node)
    return in_float(lambda x: max_pool(node, x), node.input(0))


@converter
def AveragePool(node: Node) -> Var:
    return average_pool(node, node.input(0))


@converter
def LpPool(node: Node) -> Var:
    x, p = node.input(0), node.int("p", 2)
    _check_rank(node, x)
    stated = _window(node, x)
    window = with_ceiling(node, x.shape[2:], stated) if node.int("ceil_mode", 0) else stated
    return _root(_sums(node, _power(x, p), window), p, node.name)


@converter
def GlobalMaxPool(node: Node) -> Var:
    return in_float(lambda x: mb.reduce_max(x=x, axes=_spatial(x), keep_dims=True), node.input(0))


@converter
def GlobalAveragePool(node: Node) -> Var:
    x = node.input(0)
    return mb.reduce_mean(x=x, axes=_spatial(x), keep_dims=True, name=node.name)


@converter
def GlobalLpPool(node: Node) -> Var:
    x, p = node.input(0), node.int("p", 2)
    return _root(mb.reduce_sum(x=_power(x, p), axes=_spatial(x), keep_dims=True), p, node.name)


def max_pool(node: Node, x: Var) -> Var:
    """The maximum of each window; ``x`` is a float."""
    _check_rank(node, x)
    if (same := _over_varying(node, x)) is not None:
        return mb.max_pool(x=x, **same)
    window = _window(node, x)
    if node.int("ceil_mode", 0):
        window = with_ceiling(node, x.shape[2:], window)
    if any(d != 1 for d in window.dilations):
        return reduced(taps(node, pad_spatial(x, window, _lowest(x)), window), mb.maximum)
    return mb.max_pool(x=x, kernel_sizes=list(window.kernel), strides=list(window.strides), **_padding(window))


def average_pool(node: Node, x: Var) -> Var:
    """The mean of each window; without its padding, unless the node counts it."""
    _check_rank(node, x)
    counts_pads = node.int("count_include_pad", 0) != 0
    if (same := _over_varying(node, x)) is not None:
        return mb.avg_pool(x=x, exclude_padding_from_average=not counts_pads, **same)
    stated = _window(node, x)
    window = with_ceiling(node, x.shape[2:], stated) if node.int("ceil_mode", 0) else stated
    if all(d == 1 for d in window.dilations) and (not counts_pads or window == stated):
        return mb.avg_pool(
            x=x,
            kernel_sizes=list(window.kernel),
            strides=list(window.strides),
            exclude_padding_from_average=not counts_pads,
            **_padding(window),
        )
    # What a ceiling adds is never counted.
    sizes = static_sizes(node, x, range(2, x.rank), "what a dilated or ceiled window counts must be known")
    counted = stated if counts_pads else replace(stated, before=(0,) * len(sizes), after=(0,) * len(sizes))
    counts = [_counts(i, size, window, counted) for i, size in enumerate(sizes)]
    count = np.ones([1, 1] + [1] * len(counts))
    for i, along in enumerate(counts):
        count = count * along.reshape([-1 if axis == i + 2 else 1 for axis in range(x.rank)])
    return mb.mul(x=_sums(node, x, window), y=constant(1.0 / count, x))


def _counts(i: int, size: int, window: Window, counted: Window) -> np.ndarray:
    """How many values of axis ``i`` each window counts, the pads of ``counted`` among them."""
    begins = np.arange(window.out_sizes_along(i, size)) * window.strides[i] - window.before[i]
    places = begins[:, None] + np.arange(window.kernel[i]) * window.dilations[i]
    return ((places >= -counted.before[i]) & (places < size + counted.after[i])).sum(axis=1).astype(np.float64)


def _sums(node: Node, x: Var, window: Window) -> Var:
    if any(d != 1 for d in window.dilations):
        return reduced(taps(node, pad_spatial(x, window, 0.0), window), mb.add)
    mean = mb.avg_pool(
        x=x,
        kernel_sizes=list(window.kernel),
        strides=list(window.strides),
        exclude_padding_from_average=False,
        **_padding(window),
    )
    return mb.mul(x=mean, y=constant(np.array(float(np.prod(window.kernel))), x))


def _max_pool_with_indices(node: Node) -> tuple[Var, Var]:
    """The maxima and where they are in the whole flattened input, the first of equals."""
    x = node.input(0)
    _check_rank(node, x)
    shape = static_sizes(node, x, range(x.rank), "the indices of MaxPool count in the whole input")
    window = _window(node, x)
    if node.int("ceil_mode", 0):
        window = with_ceiling(node, shape[2:], window)
    stacked = mb.stack(values=taps(node, pad_spatial(x, window, _lowest(x)), window), axis=0)
    places = list(product(*(range(k) for k in window.kernel)))
    by_columns = node.int("storage_order", 0) != 0
    spatial = shape[2:]
    strides = np.cumprod([1, *spatial[:-1]]) if by_columns else np.cumprod([1, *spatial[:0:-1]])[::-1]
    steps = np.array(
        [sum(p * d * s for p, d, s in zip(place, window.dilations, strides, strict=True)) for place in places]
    )
    starts = np.zeros([1] * x.rank, np.int64) + np.arange(shape[0] * shape[1]).reshape(
        [shape[0], shape[1]] + [1] * len(strides)
    ) * int(np.prod(shape[2:]))
    for i, out in enumerate(window.out_sizes(shape[2:])):
        along = (np.arange(out) * window.strides[i] - window.before[i]) * strides[i]
        starts = starts + along.reshape([-1 if axis == i + 2 else 1 for axis in range(x.rank)])
    chosen = mb.gather(x=steps.astype(np.int32), indices=mb.reduce_argmax(x=stacked, axis=0, keep_dims=False), axis=0)
    return mb.reduce_max(x=stacked, axes=[0], keep_dims=False), mb.add(x=chosen, y=starts.astype(np.int32))


def _check_rank(node: Node, x: Var) -> None:
    if not 3 <= x.rank <= 5:
        node.fail(f"pools over {x.rank - 2} axes; Core ML does so over 1 to 3")


def _window(node: Node, x: Var) -> Window:
    return read_window(node, x, node.ints("kernel_shape"))


def _over_varying(node: Node, x: Var) -> dict[str, object] | None:
    """The arguments of a pool whose pads depend on a size that varies, which MIL finds itself."""
    kernel = node.ints("kernel_shape")
    strides = node.ints("strides", [1] * len(kernel))
    pad_type = same_pad_type(node, x, strides)
    if pad_type is None or any(d != 1 for d in node.ints("dilations", [1] * len(kernel))):
        return None
    return {"kernel_sizes": kernel, "strides": strides, "pad_type": pad_type}


def _padding(window: Window) -> dict[str, object]:
    return {"pad_type": "custom", "pad": window.pads} if any(window.pads) else {"pad_type": "valid"}


def _lowest(x: Var) -> float:
    return _LOWEST["fp16" if str(constant(np.zeros(1), x).dtype) == "float16" else "fp32"]


def _spatial(x: Var) -> list[int]:
    return list(range(2, x.rank))


def _power(x: Var, p: int) -> Var:
    if p == 1:
        return mb.abs(x=x)
    return mb.square(x=x) if p == 2 else mb.pow(x=mb.abs(x=x), y=constant(np.array(float(p)), x))


def _root(x: Var, p: int, name: str) -> Var:
    if p == 1:
        return mb.identity(x=x, name=name)
    return mb.sqrt(x=x, name=name) if p == 2 else mb.pow(x=x, y=constant(np.array(1.0 / p), x), name=name)
