"""Convolutions over one to three axes, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import per_channel, static_sizes
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.windows import Window, read_window, same_pad_type
from intaglio.engines.coreml.registry import converter


@converter
def Conv(node: Node) -> Var:
    return convolution(node, node.input(0), node.input(1), node.optional(2))


@converter
def ConvTranspose(node: Node) -> Var:
    x, weight, bias = node.input(0), node.input(1), node.optional(2)
    _check_rank(node, x)
    kernel = static_sizes(node, weight, range(2, weight.rank), "the kernel of a convolution must be known")
    before, after, window = _transposed_pads(node, x, kernel)
    weight, dilations = _undilated(weight, window.dilations)
    # What would be cut off where a pad is negative is not there: it is zeros.
    cut = [p for pair in zip(before, after, strict=True) for p in (max(pair[0], 0), max(pair[1], 0))]
    more = [p for pair in zip(before, after, strict=True) for p in (max(-pair[0], 0), max(-pair[1], 0))]
    padding = {"pad_type": "custom", "pad": cut} if any(cut) else {"pad_type": "valid"}
    held = {"bias": bias} if bias is not None and bias.val is not None and not any(more) else {}
    y = mb.conv_transpose(
        x=x,
        weight=weight,
        strides=list(window.strides),
        dilations=dilations,
        groups=node.int("group", 1),
        **padding,
        **held,
    )
    if any(more):
        y = mb.pad(x=y, pad=[0, 0, 0, 0, *more], mode="constant")
    if bias is not None and not held:
        y = mb.add(x=y, y=per_channel(bias, y.rank))
    return mb.identity(x=y, name=node.name)


def convolution(node: Node, x: Var, weight: Var, bias: Var | None) -> Var:
    """A convolution with the attributes of the node; float32 or float16."""
    _check_rank(node, x)
    kernel = static_sizes(node, weight, range(2, weight.rank), "the kernel of a convolution must be known")
    n = len(kernel)
    strides, stated = node.ints("strides", [1] * n), node.ints("dilations", [1] * n)
    weight, dilations = _undilated(weight, stated)
    same = same_pad_type(node, x, strides)
    pads = read_window(node, x, kernel).pads if same is None else []
    padding = {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": same or "valid"}
    held = {"bias": bias} if bias is not None and bias.val is not None else {}
    y = mb.conv(
        x=x,
        weight=weight,
        strides=strides,
        dilations=dilations,
        groups=node.int("group", 1),
        **padding,
        **held,
    )
    if bias is not None and not held:
        y = mb.add(x=y, y=per_channel(bias, y.rank))
    return mb.identity(x=y, name=node.name)


def _check_rank(node: Node, x: Var) -> None:
    if not 3 <= x.rank <= 5:
        node.fail(f"convolves over {x.rank - 2} axes; Core ML does so over 1 to 3")


def _transposed_pads(node: Node, x: Var, kernel: Sequence[int]) -> tuple[list[int], list[int], Window]:
    """How much of the full result is cut off before and after each axis; negative is added."""
    n = len(kernel)
    strides, dilations = node.ints("strides", [1] * n), node.ints("dilations", [1] * n)
    window = Window(tuple(kernel), tuple(strides), tuple(dilations), (0,) * n, (0,) * n)
    extra = node.ints("output_padding", [0] * n)
    pads = node.ints("pads", [0] * (2 * n))
    auto = node.string("auto_pad", "NOTSET")
    # The full result is so much larger than the strides times the input.
    beyond = [e - s for e, s in zip(window.extent, strides, strict=True)]
    if node.has("output_shape"):
        sizes = static_sizes(node, x, range(2, x.rank), "output_shape needs those of its input")
        wanted = node.ints("output_shape")[-n:]
        total = [s * size + b + e - w for s, size, b, e, w in zip(strides, sizes, beyond, extra, wanted, strict=True)]
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        total = [b + e for b, e in zip(beyond, extra, strict=True)]
    else:
        before = [0] * n if auto == "VALID" else pads[:n]
        after = [0] * n if auto == "VALID" else pads[n:]
        return before, [a - e for a, e in zip(after, extra, strict=True)], window
    # Where more is wanted than there is, it is added at the end.
    halves = [max(t, 0) // 2 for t in total]
    before = halves if auto == "SAME_UPPER" else [max(t, 0) - h for t, h in zip(total, halves, strict=True)]
    return before, [t - b - e for t, b, e in zip(total, before, extra, strict=True)], window


def _undilated(weight: Var, dilations: Sequence[int]) -> tuple[Var, list[int]]:
    """MIL dilates constant weights only: zeros are put between the values of any other."""
    compressed = weight.op is not None and weight.op.op_type.startswith("constexpr_")
    if weight.val is not None or compressed or all(d == 1 for d in dilations):
        return weight, list(dilations)
    for i, dilation in enumerate(dilations):
        if dilation == 1:
            continue
        axis, shape = i + 2, [int(s) for s in weight.shape]
        size = shape[axis]
        spread = mb.reshape(x=weight, shape=[int(np.prod(shape[:axis])), size, 1, int(np.prod(shape[axis + 1 :]))])
        spread = mb.pad(x=spread, pad=[0, 0, 0, 0, 0, dilation - 1, 0, 0], mode="constant")
        shape[axis] = size * dilation
        full = mb.reshape(x=spread, shape=shape)
        shape[axis] = (size - 1) * dilation + 1
        weight = mb.slice_by_size(x=full, begin=[0] * len(shape), size=shape)
    return weight, [1] * len(dilations)
