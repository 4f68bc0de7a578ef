"""Padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import (
    constant,
    is_float,
    is_static,
    shape_vector,
    size_of,
    static_sizes,
)
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

# MIL's names of ONNX's modes; it has none for wrap.
_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": ""}


@converter
def Pad(node: Node) -> Var:
    x, mode = node.input(0), node.string("mode", "constant")
    if mode not in _MODES:
        node.fail(f"has the mode {mode!r}; expected one of {sorted(_MODES)}")
    if node.opset >= 11 and not node.is_constant(1):
        return _pad_at_run_time(node, x, mode)
    before, after = _pads(node, x)
    x = _cut(x, before, after)
    before, after = [max(p, 0) for p in before], [max(p, 0) for p in after]
    if not any(before) and not any(after):
        return mb.identity(x=x, name=node.name)
    if mode == "constant":
        return _with_constant(node, x, before, after)
    # MIL's own pads by reflection are for the last two axes.
    only_last = not any(before[:-2]) and not any(after[:-2])
    if is_float(x) and only_last and _MODES[mode] and _is_within(x, before, after, mode):
        return mb.pad(x=x, pad=_in_mil_order(before, after), mode=_MODES[mode], name=node.name)
    return _by_gathering(node, x, before, after, mode)


def _pads(node: Node, x: Var) -> tuple[list[int], list[int]]:
    """How much is added before and after each axis."""
    pads = node.ints("pads") if node.opset < 11 else [int(p) for p in np.ravel(node.constant(1))]
    axes = [int(a) % x.rank for a in np.ravel(node.constant_or(3, np.arange(x.rank)))]
    if len(pads) != 2 * len(axes):
        node.fail(f"has {len(pads)} pads for {len(axes)} axes; expected two an axis")
    before, after = [0] * x.rank, [0] * x.rank
    for i, axis in enumerate(axes):
        before[axis], after[axis] = pads[i], pads[len(axes) + i]
    return before, after


def _in_mil_order(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [p for pair in zip(before, after, strict=True) for p in pair]


def _cut(x: Var, before: Sequence[int], after: Sequence[int]) -> Var:
    """Negative pads cut."""
    if min([*before, *after]) >= 0:
        return x
    begin, end = [max(-p, 0) for p in before], [min(p, 0) for p in after]
    return mb.slice_by_index(x=x, begin=begin, end=end, end_mask=[e == 0 for e in end])


def _is_within(x: Var, before: Sequence[int], after: Sequence[int], mode: str) -> bool:
    """Whether no pad is larger than MIL allows."""
    spare = 1 if mode == "reflect" else 0
    return all(
        max(b, a) == 0 or not is_static([size]) or max(b, a) <= size - spare
        for size, b, a in zip(x.shape, before, after, strict=True)
    )


def _value(node: Node) -> Var | None:
    """What is padded with, where the graph says it by an input."""
    return node.optional(2) if node.opset >= 11 else None


def _with_constant(node: Node, x: Var, before: Sequence[int], after: Sequence[int]) -> Var:
    value = _value(node)
    known = value is None or value.val is not None
    number = node.float("value", 0.0) if value is None else np.ravel(value.val)[0] if known else 0
    if not is_float(x):
        return _with_integers(node, x, before, after, number if known else np.ravel(node.constant(2))[0])
    pads = _in_mil_order(before, after)
    if known:
        return mb.pad(x=x, pad=pads, mode="constant", constant_val=constant(np.array(number), x), name=node.name)
    inside = mb.pad(x=mb.fill_like(ref_tensor=x, value=1.0), pad=pads, mode="constant")
    padded = mb.pad(x=x, pad=pads, mode="constant")
    is_inside = mb.greater(x=inside, y=constant(np.array(0.5), inside))
    return mb.select(cond=is_inside, a=padded, b=mb.reshape(x=value, shape=[1] * x.rank), name=node.name)


def _with_integers(node: Node, x: Var, before: Sequence[int], after: Sequence[int], value: object) -> Var:
    """MIL pads floats only; those hold not every integer, so pieces are joined."""
    for axis, (b, a) in enumerate(zip(before, after, strict=True)):
        if not b and not a:
            continue
        pieces = [_filled(x, axis, b, value), x, _filled(x, axis, a, value)]
        x = mb.concat(values=[piece for piece in pieces if piece is not None], axis=axis)
    return mb.identity(x=x, name=node.name)


def _filled(x: Var, axis: int, count: int, value: object) -> Var | None:
    if not count:
        return None
    sizes = [count if i == axis else size_of(x, i) for i in range(x.rank)]
    number = constant(np.array(value), x)
    return mb.fill(shape=shape_vector(sizes), value=number)


def _by_gathering(node: Node, x: Var, before: Sequence[int], after: Sequence[int], mode: str) -> Var:
    for axis, (b, a) in enumerate(zip(before, after, strict=True)):
        if not b and not a:
            continue
        (size,) = static_sizes(node, x, [axis], f"pads of mode {mode} over such an axis need it")
        indices = np.pad(np.arange(size, dtype=np.int32), (b, a), mode=mode)  # type: ignore[call-overload]
        x = mb.gather(x=x, indices=indices, axis=axis)
    return mb.identity(x=x, name=node.name)


def _pad_at_run_time(node: Node, x: Var, mode: str) -> Var:
    """Pads that are known only when the model runs: zeros around floats."""
    if not is_float(x) or mode != "constant" or node.optional(3) is not None:
        node.constant(1)  # which says what is wrong
    value = _value(node)
    number = 0.0 if value is None else np.ravel(node.constant(2))[0]
    pads = mb.reshape(x=mb.transpose(x=mb.reshape(x=node.input(1), shape=[2, -1]), perm=[1, 0]), shape=[-1])
    return mb.pad(x=x, pad=pads, mode=mode, constant_val=constant(np.array(number), x), name=node.name)
