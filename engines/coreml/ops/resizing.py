"""Resizing: by MIL's own ops where one says what the node does, else by a matrix for each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import as_float, constant, in_float, is_float, is_static
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.interpolation import Axis, Interpolation, is_outside, matrix, nearest_indices
from intaglio.engines.coreml.registry import converter

# MIL's names of the coordinates that it has for linear interpolation.
_SAMPLING = {
    "half_pixel": "UNALIGN_CORNERS",
    "pytorch_half_pixel": "UNALIGN_CORNERS",
    "align_corners": "STRICT_ALIGN_CORNERS",
    "asymmetric": "DEFAULT",
}


@converter
def Resize(node: Node) -> Var:
    x = node.input(0)
    how = _interpolation(node)
    if how.mode not in ("nearest", "linear", "cubic"):
        node.fail(f"has the mode {how.mode!r}; expected nearest, linear or cubic")
    scales_at = 1 if node.opset < 11 else 2
    sizes_at = 3 if node.opset >= 11 else -1
    axes = [axis % x.rank for axis in node.ints("axes", list(range(x.rank)))]
    if sizes_at > 0 and node.optional(sizes_at) is not None:
        if not node.is_constant(sizes_at):
            return _to_sizes_at_run_time(node, x, how, node.input(sizes_at), sizes_at)
        return _to_sizes(node, x, how, axes, [int(s) for s in np.ravel(node.constant(sizes_at))])
    scales = [float(s) for s in np.ravel(node.constant(scales_at))]
    return _by_scales(node, x, how, axes, scales)


@converter
def Upsample(node: Node) -> Var:
    x, mode = node.input(0), node.string("mode", "nearest")
    scales = node.floats("scales") if node.opset < 9 else [float(s) for s in np.ravel(node.constant(1))]
    # Both round down, and neither knows half pixels.
    how = Interpolation("linear" if mode in ("linear", "bilinear") else "nearest", "asymmetric", "floor")
    return _by_scales(node, x, how, list(range(x.rank)), scales)


def _interpolation(node: Node) -> Interpolation:
    if node.opset < 11:
        return Interpolation(node.string("mode", "nearest"), "asymmetric", "floor")
    return Interpolation(
        mode=node.string("mode", "nearest"),
        coordinates=node.string("coordinate_transformation_mode", "half_pixel"),
        nearest=node.string("nearest_mode", "round_prefer_floor"),
        cubic_coefficient=node.float("cubic_coeff_a", -0.75),
        exclude_outside=node.int("exclude_outside", 0) != 0,
        extrapolation_value=node.float("extrapolation_value", 0.0),
        antialias=node.int("antialias", 0) != 0,
    )


def _by_scales(node: Node, x: Var, how: Interpolation, axes: Sequence[int], scales: Sequence[float]) -> Var:
    if len(scales) != len(axes):
        node.fail(f"has {len(scales)} scales for {len(axes)} axes")
    stated = dict(zip(axes, scales, strict=True))
    moved = [axis for axis in axes if stated[axis] != 1.0 or how.coordinates == "tf_crop_and_resize"]
    if is_static([x.shape[axis] for axis in moved]):
        sizes = {axis: int(x.shape[axis]) for axis in moved}
        return _along_axes(
            node,
            x,
            how,
            {a: Axis(n, math.floor(n * stated[a]), stated[a], _region(node, axes, a)) for a, n in sizes.items()},
        )
    factors = [stated.get(axis, 1.0) for axis in range(x.rank)]
    return _varying(node, x, how, factors)


def _to_sizes(node: Node, x: Var, how: Interpolation, axes: Sequence[int], sizes: Sequence[int]) -> Var:
    if len(sizes) != len(axes):
        node.fail(f"has {len(sizes)} sizes for {len(axes)} axes")
    if not is_static([x.shape[axis] for axis in axes]):
        whole = [0] * x.rank
        for axis, size in zip(axes, sizes, strict=True):
            whole[axis] = size
        return _to_sizes_at_run_time(node, x, how, mb.const(val=np.array(whole, np.int32)), 0)
    have = [int(x.shape[axis]) for axis in axes]
    scales = [out / n for out, n in zip(sizes, have, strict=True)]
    policy = node.string("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        scale = min(scales) if policy == "not_larger" else max(scales)
        scales = [scale] * len(scales)
        sizes = [math.floor(scale * n + 0.5) for n in have]
    parts = zip(axes, have, sizes, scales, strict=True)
    moved = {a: Axis(n, out, scale, _region(node, axes, a)) for a, n, out, scale in parts}
    keep = how.coordinates == "tf_crop_and_resize"
    return _along_axes(node, x, how, {a: axis for a, axis in moved.items() if keep or axis.size != axis.out})


def _region(node: Node, axes: Sequence[int], axis: int) -> tuple[float, float]:
    if node.op_type != "Resize" or node.string("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return 0.0, 1.0
    region = np.ravel(node.constant(1))
    i = list(axes).index(axis)
    return float(region[i]), float(region[len(axes) + i])


def _along_axes(node: Node, x: Var, how: Interpolation, axes: dict[int, Axis]) -> Var:
    """Axis after axis. The order does not matter: the weights of an axis do not look at the others."""
    if how.mode == "nearest" and how.coordinates != "tf_crop_and_resize":
        factors = _whole_factors(x, how, axes)
        if factors is not None:
            return in_float(lambda v: _repeated(v, *factors), x)
        for axis, sizes in axes.items():
            x = mb.gather(x=x, indices=nearest_indices(sizes, how).astype(np.int32), axis=axis)
        return mb.identity(x=x, name=node.name)
    if is_float(x) and _is_bilinear(x, how, axes):
        return _bilinear(x, how, axes)
    return in_float(lambda v: _by_matrices(v, how, axes), x)


def _whole_factors(x: Var, how: Interpolation, axes: dict[int, Axis]) -> tuple[int, int] | None:
    """By how much height and width grow, where each value is simply repeated."""
    if not is_float(x) or x.rank < 3 or set(axes) - {x.rank - 2, x.rank - 1}:
        return None
    factors = [1, 1]
    for axis, sizes in axes.items():
        times = sizes.out // sizes.size
        if times * sizes.size != sizes.out:
            return None
        if not np.array_equal(nearest_indices(sizes, how), np.repeat(np.arange(sizes.size), times)):
            return None
        factors[axis - x.rank + 2] = times
    return factors[0], factors[1]


def _repeated(x: Var, height: int, width: int) -> Var:
    return mb.upsample_nearest_neighbor(x=x, scale_factor_height=height, scale_factor_width=width)


def _is_bilinear(x: Var, how: Interpolation, axes: dict[int, Axis]) -> bool:
    """Whether MIL's bilinear op does it: the last two axes, scales that are the sizes' ratios."""
    plain = how.mode == "linear" and not how.antialias and not how.exclude_outside and how.coordinates in _SAMPLING
    if not plain or x.rank < 3 or not set(axes) <= {x.rank - 2, x.rank - 1} or not is_static(x.shape[-2:]):
        return False
    return all(
        axis.out > 1
        and (how.coordinates == "align_corners" or math.isclose(axis.scale, axis.out / axis.size, rel_tol=1e-6))
        for axis in axes.values()
    )


def _bilinear(x: Var, how: Interpolation, axes: dict[int, Axis]) -> Var:
    height, width = (axes[a].out if a in axes else int(x.shape[a]) for a in (x.rank - 2, x.rank - 1))
    mode = _SAMPLING[how.coordinates]
    return mb.resize_bilinear(x=x, target_size_height=height, target_size_width=width, sampling_mode=mode)


def _by_matrices(x: Var, how: Interpolation, axes: dict[int, Axis]) -> Var:
    outside: Var | None = None
    for axis, sizes in axes.items():
        weights = constant(matrix(sizes, how), x)
        if axis == x.rank - 1:
            x = mb.matmul(x=x, y=weights, transpose_y=True)
        elif axis == x.rank - 2:
            x = mb.matmul(x=weights, y=x)
        else:
            order = [a for a in range(x.rank) if a != axis] + [axis]
            moved = mb.matmul(x=mb.transpose(x=x, perm=order), y=weights, transpose_y=True)
            x = mb.transpose(x=moved, perm=list(np.argsort(order)))
    if how.coordinates != "tf_crop_and_resize":
        return x
    marks = np.zeros([1] * x.rank, bool)
    for axis, sizes in axes.items():
        marks = marks | is_outside(sizes, how).reshape([-1 if a == axis else 1 for a in range(x.rank)])
    if not marks.any():
        return x
    outside = mb.const(val=np.broadcast_to(marks, [axes[a].out if a in axes else 1 for a in range(x.rank)]).copy())
    return mb.select(cond=outside, a=constant(np.array(how.extrapolation_value), x), b=x)


def _varying(node: Node, x: Var, how: Interpolation, factors: Sequence[float]) -> Var:
    """Height and width that vary, by scales that are known."""
    if any(f != 1.0 for f in factors[:-2]) or x.rank < 3:
        node.fail("resizes a size that varies on an axis other than the last two", "fix it with --shapes")
    height, width = factors[-2:]
    whole = height == int(height) and width == int(width)
    if how.mode == "nearest" and whole and _repeats(how, height) and _repeats(how, width):
        return in_float(lambda v: _repeated(v, int(height), int(width)), x)
    if how.mode == "linear" and whole and how.coordinates in ("half_pixel", "pytorch_half_pixel") and not how.antialias:
        return mb.upsample_bilinear(
            x=as_float(x), scale_factor_height=int(height), scale_factor_width=int(width), align_corners=False
        )
    node.fail(
        f"resizes sizes that vary by {list(factors)} with mode {how.mode}, coordinates {how.coordinates}, "
        f"rounding {how.nearest}, which Core ML has no op for",
        "fix the sizes with --shapes",
    )


def _repeats(how: Interpolation, factor: float) -> bool:
    """Whether nearest values by a whole factor repeat each one, whatever the size."""
    times = int(factor)
    indices = nearest_indices(Axis(8, 8 * times, factor), how)
    return bool(how.coordinates != "align_corners" and np.array_equal(indices, np.repeat(np.arange(8), times)))


def _to_sizes_at_run_time(node: Node, x: Var, how: Interpolation, sizes: Var, sizes_at: int) -> Var:
    """Sizes of the last two axes that are known only when the model runs."""
    linear = how.mode == "linear" and how.coordinates in _SAMPLING and not how.antialias and not how.exclude_outside
    nearest = how.mode == "nearest" and how.coordinates == "asymmetric" and how.nearest == "floor"
    if how.coordinates == "pytorch_half_pixel" and is_static(x.shape[-2:]):
        linear = False  # an output of one row or column would differ
    is_plain = (
        x.rank >= 3 and sizes.shape[0] == x.rank and node.string("keep_aspect_ratio_policy", "stretch") == "stretch"
    )
    if not is_plain or not (linear or nearest):
        if sizes_at:
            node.constant(sizes_at)  # which says that it must be known
        node.fail(
            f"resizes what varies with mode {how.mode}, coordinates {how.coordinates}, rounding {how.nearest}, "
            "which Core ML has no op for",
            "fix the sizes with --shapes",
        )
    return mb.resize(
        x=x,
        shape=mb.slice_by_index(x=sizes, begin=[x.rank - 2], end=[x.rank]),
        resized_dims=np.uint32(2),
        interpolation_mode="LINEAR" if linear else "NEAREST_NEIGHBOR",
        sampling_mode=_SAMPLING[how.coordinates],
        name=node.name,
    )
