"""Gathering and scattering. Negative indices count from the end in ONNX and mean nothing in Core ML."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import axis_of, cast, is_static, nonnegative, sizes, without_bool
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

_MODES = {"none": "update", "add": "add", "mul": "mul", "max": "max", "min": "min"}


@converter
def Gather(node: Node) -> Var:
    x, indices = node.input(0), node.input(1)
    axis = axis_of(node.int("axis", 0), x.rank)
    places = nonnegative(indices, [sizes(x)[axis]])
    return without_bool(lambda v: mb.gather(x=v, indices=places, axis=axis, name=node.name), x)


@converter
def GatherElements(node: Node) -> Var:
    """Where the indices are shorter than the data along another axis, the rest of the data is not looked at."""
    x, indices = node.input(0), node.input(1)
    axis = axis_of(node.int("axis", 0), x.rank)
    places = nonnegative(indices, [sizes(x)[axis]])
    end = [x.shape[i] if i == axis else size for i, size in enumerate(indices.shape)]
    if is_static(x.shape) and is_static(indices.shape) and tuple(end) != tuple(x.shape):
        x = mb.slice_by_index(x=x, begin=[0] * x.rank, end=[int(e) for e in end])
    return without_bool(lambda v: mb.gather_along_axis(x=v, indices=places, axis=axis, name=node.name), x)


@converter
def GatherND(node: Node) -> Var:
    x, indices, batch = node.input(0), node.input(1), node.int("batch_dims", 0)
    depth = indices.shape[-1]
    if not isinstance(depth, (int, np.integer)):
        node.fail("has indices whose last dim varies, and Core ML must know it")
    places = nonnegative(indices, sizes(x)[batch : batch + int(depth)])
    return without_bool(lambda v: mb.gather_nd(x=v, indices=places, batch_dims=batch, name=node.name), x)


@converter
def ScatterElements(node: Node) -> Var:
    x, indices, updates = node.input(0), node.input(1), node.input(2)
    axis, mode = axis_of(node.int("axis", 0), x.rank), _mode(node)
    places = nonnegative(indices, [sizes(x)[axis]])
    others = [i for i in range(x.rank) if i != axis]
    if all(x.shape[i] == indices.shape[i] for i in others):

        def along(v: Var) -> Var:
            return mb.scatter_along_axis(
                data=v, indices=places, updates=_like(updates, v), axis=axis, mode=mode, name=node.name
            )

        return without_bool(along, x)
    if not is_static(indices.shape):
        node.fail("has indices that are shorter than the data along a dim that varies")
    # Each update with its whole place.
    shape = [int(size) for size in indices.shape]
    grid = [np.broadcast_to(g, shape).astype(np.int32) for g in np.ogrid[tuple(slice(size) for size in shape)]]
    whole = mb.stack(values=[places if i == axis else grid[i] for i in range(x.rank)], axis=x.rank)
    return _scatter_nd(node, x, whole, updates, mode)


@converter
def Scatter(node: Node) -> Var:
    """What ScatterElements was called in opset 9 and 10."""
    return ScatterElements(node)


@converter
def ScatterND(node: Node) -> Var:
    x, indices = node.input(0), node.input(1)
    depth = indices.shape[-1]
    if not isinstance(depth, (int, np.integer)):
        node.fail("has indices whose last dim varies, and Core ML must know it")
    places = nonnegative(indices, sizes(x)[: int(depth)])
    return _scatter_nd(node, x, places, node.input(2), _mode(node))


def _scatter_nd(node: Node, x: Var, places: Var, updates: Var, mode: str) -> Var:
    return without_bool(
        lambda v: mb.scatter_nd(data=v, indices=places, updates=_like(updates, v), mode=mode, name=node.name), x
    )


def _like(updates: Var, data: Var) -> Var:
    return updates if updates.dtype == data.dtype else cast(updates, "int32")


def _mode(node: Node) -> str:
    reduction = node.string("reduction", "none")
    if reduction not in _MODES:
        node.fail(f"has the reduction {reduction!r}; expected one of {', '.join(_MODES)}")
    return _MODES[reduction]
