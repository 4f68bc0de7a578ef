"""Ops that move elements and leave them as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from intaglio.engines.coreml.mil import (
    axis_of,
    in_float,
    is_static,
    numpy_dtype,
    product,
    reshape,
    shape_vector,
    sizes,
)
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter


@converter
def Reshape(node: Node) -> Var:
    """A 0 keeps the dim of the input in its place, unless ``allowzero``; one -1 is what is left."""
    x = node.input(0)
    if not node.is_constant(1):
        shape = node.input(1)
        if shape.rank == 1 and shape.shape[0] == 0:
            return reshape(x, [])
        if not node.int("allowzero", 0) and isinstance(shape.shape[0], (int, np.integer)):
            return _reshape_at_run_time(x, shape, node.name)
        return mb.reshape(x=x, shape=shape, name=node.name)
    wanted = [int(size) for size in node.constant(1)]
    keeps = not node.int("allowzero", 0)
    if 0 in wanted and keeps:
        dims = sizes(x)
        return reshape(x, [dims[i] if size == 0 else size for i, size in enumerate(wanted)], node.name)
    if 0 in wanted:
        node.fail(f"makes the shape {wanted}, and Core ML holds no empty tensors")
    return reshape(x, wanted, node.name)


def _reshape_at_run_time(x: Var, shape: Var, name: str) -> Var:
    """A 0 keeps the dim of the input in its place; MIL counts the places of zeros from the end."""
    count = int(shape.shape[0])
    own = [*sizes(x), *[1] * count][:count]
    if shape.sym_val is None:
        kept = mb.equal(x=shape, y=np.int32(0))
        return mb.reshape(x=x, shape=mb.select(cond=kept, a=shape_vector(own), b=shape), name=name)
    values = [int(v) if isinstance(v, (int, np.integer)) else None for v in np.ravel(shape.sym_val)]
    if 0 not in values:
        return mb.reshape(x=x, shape=shape, name=name)
    dims: list[int | Var] = [
        mb.gather(x=shape, indices=np.int32(i), axis=0) if value is None else value or own[i]
        for i, value in enumerate(values)
    ]
    return reshape(x, dims, name)


@converter
def Transpose(node: Node) -> Var:
    x = node.input(0)
    perm = node.ints("perm", list(range(x.rank))[::-1])
    return mb.transpose(x=x, perm=perm, name=node.name) if x.rank > 1 else x


def _axes(node: Node) -> list[int] | None:
    if node.opset < 13:
        return node.ints("axes", []) or None
    axes = node.constant_or(1, None)
    return None if axes is None else [int(a) for a in np.ravel(axes)]


@converter
def Squeeze(node: Node) -> Var:
    x, axes = node.input(0), _axes(node)
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if isinstance(size, (int, np.integer)) and size == 1]
    return mb.squeeze(x=x, axes=axes, name=node.name) if axes else x


@converter
def Unsqueeze(node: Node) -> Var:
    x, axes = node.input(0), _axes(node) or []
    rank = x.rank + len(axes)
    return mb.expand_dims(x=x, axes=sorted(axis_of(a, rank) for a in axes), name=node.name) if axes else x


@converter
def Flatten(node: Node) -> Var:
    x = node.input(0)
    axis, dims = axis_of(node.int("axis", 1), x.rank), sizes(x)
    first = product(dims[:axis])
    # One of the two is always what is left.
    rest = product(dims[axis:]) if isinstance(first, Var) else -1
    return reshape(x, [first, rest], node.name)


@converter
def Concat(node: Node) -> Var:
    values = [node.input(i) for i in range(len(node.inputs))]
    # Parts of a shape may be empty; they are known, and add nothing.
    values = [v for v in values if 0 not in v.shape] or values[:1]
    if len(values) == 1:
        return values[0]
    return mb.concat(values=values, axis=node.int("axis", 1 if node.opset < 4 else None), name=node.name)


@converter
def Split(node: Node) -> Sequence[Var]:
    """In the sizes given, else in as many parts as there are outputs, the last of which may be smaller."""
    x = node.input(0)
    axis = axis_of(node.int("axis", 0), x.rank)
    if node.opset < 13:
        parts = node.ints("split", [])
    else:
        parts = [int(size) for size in node.constant_or(1, [])]
    count = len(node.outputs)
    if not parts:
        size = x.shape[axis]
        if not isinstance(size, (int, np.integer)):
            return mb.split(x=x, num_splits=count, axis=axis, name=node.name)
        step = -(-int(size) // count)
        parts = [min(step, int(size) - i * step) for i in range(count)]
    if parts.count(0) == len(parts) - 1:
        made = [x]
    else:
        made = list(mb.split(x=x, split_sizes=[size for size in parts if size], axis=axis, name=node.name))
    return [made.pop(0) if size else _nothing(node, x, axis) for size in parts]


def _nothing(node: Node, x: Var, axis: int) -> Var:
    """No elements. It is known, and what joins it to something leaves it out; as an output it is refused."""
    if not is_static(x):
        node.fail(f"leaves nothing of axis {axis}, and Core ML holds no empty tensors")
    shape = [0 if i == axis else int(size) for i, size in enumerate(x.shape)]
    return mb.const(val=np.zeros(shape, numpy_dtype(x)))


@converter
def Slice(node: Node) -> Var:
    """Starts, ends, axes and steps became inputs with opset 10; a step backwards starts from the end."""
    x = node.input(0)
    if x.rank == 0:
        return x
    if node.opset < 10:
        starts, ends = node.ints("starts"), node.ints("ends")
        axes, steps = node.ints("axes", list(range(len(starts)))), [1] * len(starts)
    else:
        if not (node.is_constant(1) and node.is_constant(2)):
            return _slice_at_run_time(node, x)
        starts, ends = ([int(v) for v in np.ravel(node.constant(i))] for i in (1, 2))
        axes = [int(a) for a in np.ravel(node.constant_or(3, list(range(len(starts)))))]
        steps = [int(s) for s in np.ravel(node.constant_or(4, [1] * len(starts)))]
    return slice_axes(node, x, starts, ends, axes, steps)


def slice_axes(
    node: Node, x: Var, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Var:
    """NumPy's slices of some axes, in any direction."""
    rank = x.rank
    begin, end, stride = [0] * rank, [0] * rank, [1] * rank
    begin_mask, end_mask = [True] * rank, [True] * rank
    backwards = []
    for start, stop, axis, step in zip(starts, ends, axes, steps, strict=True):
        at, size = axis_of(axis, rank), x.shape[axis_of(axis, rank)]
        if isinstance(size, (int, np.integer)):
            # Seen from the end, a step backwards is one forwards.
            places = range(int(size))[slice(start, stop, step)]
            if not places:
                return _nothing(node, x, at)
            if step < 0:
                backwards.append(at)
                places = range(int(size))[places[-1] : places[0] + 1 : -step]
            begin[at], end[at], stride[at] = places[0], places[-1] + 1, places.step
            begin_mask[at] = end_mask[at] = False
        elif step < 0:
            # Reversed first, so that what counts from the end counts from the start.
            if not (start >= 2**31 - 1 or start == -1) or stop > -(2**31):
                node.fail("steps backwards over a part of a dim that varies")
            x, stride[at] = mb.reverse(x=x, axes=[at]), -step
        else:
            begin[at], begin_mask[at] = max(min(start, 2**31 - 1), -(2**31)), start == 0
            end[at], end_mask[at] = max(min(stop, 2**31 - 1), -(2**31)), stop >= 2**31 - 1
            stride[at] = step
    if all(begin_mask) and all(end_mask) and set(stride) == {1}:
        return x
    cut = mb.slice_by_index(x=x, begin=begin, end=end, stride=stride, begin_mask=begin_mask, end_mask=end_mask)
    # A slice backwards takes the places of the slice forwards in the other order.
    return mb.reverse(x=cut, axes=backwards, name=node.name) if backwards else cut


def _slice_at_run_time(node: Node, x: Var) -> Var:
    count = node.input(1).shape[0]
    steps = [int(s) for s in np.ravel(node.constant_or(4, [1] * count))]
    if any(step < 1 for step in steps):
        node.constant(1)
    axes = [axis_of(int(a), x.rank) for a in np.ravel(node.constant_or(3, list(range(count))))]
    places = [axes.index(axis) if axis in axes else None for axis in range(x.rank)]
    bounds = []
    for i in (1, 2):
        given = node.input(i)
        parts = [
            np.array([0], np.int32)
            if place is None
            else mb.slice_by_index(x=given, begin=[place], end=[place + 1], stride=[1])
            for place in places
        ]
        bounds.append(mb.concat(values=parts, axis=0) if len(parts) > 1 else parts[0])
    free = [place is None for place in places]
    return mb.slice_by_index(
        x=x,
        begin=bounds[0],
        end=bounds[1],
        stride=[1 if place is None else steps[place] for place in places],
        begin_mask=free,
        end_mask=free,
        name=node.name,
    )


@converter
def Expand(node: Node) -> Var:
    """Broadcasts both ways: a 1 in the shape keeps the dim of the input."""
    x = node.input(0)
    if not node.is_constant(1):
        shape = node.input(1)
        if x.dtype == types.bool:
            return mb.logical_or(x=x, y=mb.fill(shape=shape, value=False), name=node.name)
        zero = np.zeros((), types.nptype_from_builtin(x.dtype))[()]
        return mb.add(x=x, y=mb.fill(shape=shape, value=zero), name=node.name)
    shape = [int(size) for size in node.constant(1)]
    if x.val is not None:
        node.check_size(shape)
    return broadcast(x, shape, node.name)


def broadcast(x: Var, shape: Sequence[int], name: str) -> Var:
    """``x`` repeated along the dims that are 1 in it and more in ``shape``."""
    rank = max(x.rank, len(shape))
    wanted = [1] * (rank - len(shape)) + list(shape)
    if x.rank < rank:
        x = mb.reshape(x=x, shape=[1] * rank) if x.rank == 0 else mb.expand_dims(x=x, axes=list(range(rank - x.rank)))
    repeats = [
        size if isinstance(own, (int, np.integer)) and own == 1 else 1
        for own, size in zip(x.shape, wanted, strict=True)
    ]
    return x if all(r == 1 for r in repeats) else mb.tile(x=x, reps=repeats, name=name)


@converter
def Tile(node: Node) -> Var:
    x = node.input(0)
    if not node.is_constant(1):
        return mb.tile(x=x, reps=node.input(1), name=node.name)
    repeats = [int(r) for r in node.constant(1)]
    if any(r < 1 for r in repeats):
        node.fail(f"repeats {repeats} times, and Core ML holds no empty tensors")
    if x.val is not None:
        node.check_size([int(size) * times for size, times in zip(x.shape, repeats, strict=True)])
    return mb.tile(x=x, reps=repeats, name=node.name) if any(r != 1 for r in repeats) else x


@converter
def Shape(node: Node) -> Var:
    x = node.input(0)
    rank = x.rank
    start, end = node.int("start", 0), node.int("end", rank)
    start, end = (min(max(axis_of(v, rank), 0), rank) for v in (start, end))
    if is_static(x) or end <= start:
        return mb.const(val=np.array([int(s) for s in x.shape[start:end]], np.int32), name=node.name)
    shape = mb.shape(x=x)
    if (start, end) == (0, rank):
        return shape
    return mb.slice_by_index(x=shape, begin=[start], end=[end], name=node.name)


@converter
def Size(node: Node) -> Var:
    total = product(sizes(node.input(0)))
    return total if isinstance(total, Var) else mb.const(val=np.int32(total), name=node.name)


@converter
def DepthToSpace(node: Node) -> Var:
    """Depth first in mode DCR, which is MIL's; columns first in CRD, which is MIL's pixel_shuffle."""
    size = node.int("blocksize")
    if node.string("mode", "DCR") == "CRD":
        return in_float(lambda x: mb.pixel_shuffle(x=x, upscale_factor=size), node.input(0))
    return in_float(lambda x: mb.depth_to_space(x=x, block_size=size), node.input(0))


@converter
def SpaceToDepth(node: Node) -> Var:
    size = node.int("blocksize")
    if node.string("mode", "DCR") == "CRD":
        return in_float(lambda x: mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(size)), node.input(0))
    return in_float(lambda x: mb.space_to_depth(x=x, block_size=size), node.input(0))


@converter
def ReverseSequence(node: Node) -> Var:
    return mb.reverse_sequence(
        x=node.input(0),
        lengths=node.input(1),
        seq_axis=node.int("time_axis", 0),
        batch_axis=node.int("batch_axis", 1),
        name=node.name,
    )


@converter
def Einsum(node: Node) -> Var:
    from intaglio.engines.coreml.einsum import einsum

    return einsum(node, [node.input(i) for i in range(len(node.inputs))], node.string("equation"))
