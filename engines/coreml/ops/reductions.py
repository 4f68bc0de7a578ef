"""Reductions, the places of extremes, and the greatest k."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import axis_of, cast, constant, in_float, without_bool, wrap
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

Build = Callable[[Var, list[int], bool], Var]

# Since which opset the axes are an input.
_AXES_INPUT = {"ReduceSum": 13}


def _reduce(node: Node, build: Build, alone: Callable[[Var], Var] = lambda x: x) -> Var:
    """``alone`` is what the reduction does to a single element, and so to all where none is reduced."""
    x, keep = node.input(0), bool(node.int("keepdims", 1))
    if node.opset >= _AXES_INPUT.get(node.op_type, 18):
        axes = [int(a) for a in np.ravel(node.constant_or(1, []))]
    else:
        axes = node.ints("axes", [])
    if x.rank == 0 or (not axes and node.int("noop_with_empty_axes", 0)):
        return alone(x)
    axes = sorted(axis_of(a, x.rank) for a in axes) or list(range(x.rank))
    return build(x, axes, keep)


def _log(x: Var) -> Var:
    return in_float(lambda v: mb.log(x=v, epsilon=constant(0, v)), x)


def _sum(x: Var, axes: list[int], keep: bool) -> Var:
    return mb.reduce_sum(x=x, axes=axes, keep_dims=keep)


@converter
def ReduceSum(node: Node) -> Var:
    return wrap(_reduce(node, _sum), node.dtype(0))


@converter
def ReduceMean(node: Node) -> Var:
    return _reduce(node, lambda x, axes, keep: in_float(lambda v: mb.reduce_mean(x=v, axes=axes, keep_dims=keep), x))


@converter
def ReduceMax(node: Node) -> Var:
    return _reduce(node, lambda x, axes, keep: without_bool(lambda v: mb.reduce_max(x=v, axes=axes, keep_dims=keep), x))


@converter
def ReduceMin(node: Node) -> Var:
    return _reduce(node, lambda x, axes, keep: without_bool(lambda v: mb.reduce_min(x=v, axes=axes, keep_dims=keep), x))


@converter
def ReduceProd(node: Node) -> Var:
    return wrap(_reduce(node, lambda x, axes, keep: mb.reduce_prod(x=x, axes=axes, keep_dims=keep)), node.dtype(0))


@converter
def ReduceL1(node: Node) -> Var:
    return _reduce(node, lambda x, axes, keep: _sum(mb.abs(x=x), axes, keep), lambda x: mb.abs(x=x))


@converter
def ReduceL2(node: Node) -> Var:
    def build(x: Var, axes: list[int], keep: bool) -> Var:
        return in_float(lambda v: mb.reduce_l2_norm(x=v, axes=axes, keep_dims=keep), x)

    return _reduce(node, build, lambda x: mb.abs(x=x))


@converter
def ReduceSumSquare(node: Node) -> Var:
    def build(x: Var, axes: list[int], keep: bool) -> Var:
        return mb.reduce_sum_square(x=x, axes=axes, keep_dims=keep)

    return wrap(_reduce(node, build, lambda x: mb.square(x=x)), node.dtype(0))


@converter
def ReduceLogSum(node: Node) -> Var:
    return _reduce(node, lambda x, axes, keep: _log(_sum(x, axes, keep)), _log)


@converter
def ReduceLogSumExp(node: Node) -> Var:
    def build(x: Var, axes: list[int], keep: bool) -> Var:
        return in_float(lambda v: mb.reduce_log_sum_exp(x=v, axes=axes, keep_dims=keep), x)

    return _reduce(node, build)


def _place(node: Node, build: Callable[..., Var]) -> Var:
    x, keep = node.input(0), bool(node.int("keepdims", 1))
    axis = axis_of(node.int("axis", 0), x.rank)
    if not node.int("select_last_index", 0):
        return build(x=x, axis=axis, keep_dims=keep, name=node.name)
    # The first from behind.
    size = x.shape[axis]
    if not isinstance(size, (int, np.integer)):
        node.fail("selects the last index along a dim that varies, whose size Core ML must know")
    behind = build(x=mb.reverse(x=x, axes=[axis]), axis=axis, keep_dims=keep)
    return mb.sub(x=np.int32(size - 1), y=behind, name=node.name)


@converter
def ArgMax(node: Node) -> Var:
    return _place(node, mb.reduce_argmax)


@converter
def ArgMin(node: Node) -> Var:
    return _place(node, mb.reduce_argmin)


@converter
def TopK(node: Node) -> tuple[Var, Var]:
    """``k`` became an input with opset 10, the least instead of the greatest with 11."""
    x = node.input(0)
    k = node.int("k") if node.opset < 10 else int(node.constant(1).item())
    axis = axis_of(node.int("axis", -1), x.rank)
    values, indices = mb.topk(
        x=x, k=k, axis=axis, ascending=not node.int("largest", 1), sort=True, return_indices=True, name=node.name
    )
    return values, cast(indices, "int32")
