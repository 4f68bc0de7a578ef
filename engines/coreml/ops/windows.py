"""Windows that slide over the last axes of a tensor: sizes, pads, and pooling by hand where MIL has no op for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import constant, is_static
from intaglio.engines.coreml.node import Node

# So many slices of a tensor are a program of reasonable size.
_MOST_TAPS = 512
_SAME_TYPES = {"SAME_UPPER": "same", "SAME_LOWER": "same_lower"}


@dataclass(frozen=True)
class Window:
    """Sizes of each spatial axis: kernel, strides, dilations, and pads before and after."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """How far a kernel reaches, with its dilations."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def pads(self) -> list[int]:
        """In MIL's order: before and after of each axis in turn."""
        return [p for pair in zip(self.before, self.after, strict=True) for p in pair]

    def out_sizes(self, sizes: Sequence[int]) -> list[int]:
        """How many windows there are along each axis."""
        return [self.out_sizes_along(i, size) for i, size in enumerate(sizes)]

    def out_sizes_along(self, i: int, size: int) -> int:
        """How many windows there are along one axis."""
        return (size + self.before[i] + self.after[i] - self.extent[i]) // self.strides[i] + 1


def same_pad_type(node: Node, x: Var, strides: Sequence[int]) -> str | None:
    """MIL's pad type for SAME over a size that varies, which has no pads that are known; None for all else."""
    known = all(s == 1 or is_static([size]) for size, s in zip(x.shape[2:], strides, strict=True))
    return None if known else _SAME_TYPES.get(node.string("auto_pad", "NOTSET"))


def read_window(node: Node, x: Var, kernel: Sequence[int]) -> Window:
    """The attributes ``strides``, ``dilations``, ``pads`` and ``auto_pad`` of a node."""
    n = len(kernel)
    strides, dilations = node.ints("strides", [1] * n), node.ints("dilations", [1] * n)
    pads = node.ints("pads", [0] * (2 * n))
    before, after = pads[:n], pads[n:]
    auto = node.string("auto_pad", "NOTSET")
    if auto == "VALID":
        before, after = [0] * n, [0] * n
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        before, after = _same(node, x.shape[2:], Window(tuple(kernel), tuple(strides), tuple(dilations), (), ()), auto)
    elif auto != "NOTSET":
        node.fail(f"has the auto_pad {auto!r}; expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
    if min([*before, *after], default=0) < 0:
        node.fail(f"has the negative pads {pads}, which are not converted", "slice its input instead")
    return Window(tuple(kernel), tuple(strides), tuple(dilations), tuple(before), tuple(after))


def _same(node: Node, sizes: Sequence[object], window: Window, auto: str) -> tuple[list[int], list[int]]:
    before, after = [], []
    for size, extent, stride in zip(sizes, window.extent, window.strides, strict=True):
        if isinstance(size, (int, np.integer)):
            total = max((-(-int(size) // stride) - 1) * stride + extent - int(size), 0)
        elif stride == 1:
            total = extent - 1
        else:
            node.fail(
                f"has the auto_pad {auto!r} over an axis whose size varies, with strides {list(window.strides)}",
                "fix the size with --shapes, or export the model with explicit pads",
            )
        small, large = total // 2, total - total // 2
        before.append(small if auto == "SAME_UPPER" else large)
        after.append(large if auto == "SAME_UPPER" else small)
    return before, after


def with_ceiling(node: Node, sizes: Sequence[object], window: Window) -> Window:
    """The window with so much more padding at the end that flooring gives what a ceiling would.

    A last window that would start in the padding is left out.
    """
    if not is_static(sizes):
        if all(s == 1 for s in window.strides):
            return window
        node.fail(
            "has ceil_mode over an axis whose size varies",
            "fix the size with --shapes, or export the model without ceil_mode",
        )
    after = []
    for i, size in enumerate(sizes):
        n, stride, extent = int(size), window.strides[i], window.extent[i]  # type: ignore[call-overload]
        out = -(-(n + window.before[i] + window.after[i] - extent) // stride) + 1
        if (out - 1) * stride >= n + window.before[i]:
            out -= 1
        after.append(max((out - 1) * stride + extent - n - window.before[i], 0))
    return Window(window.kernel, window.strides, window.dilations, window.before, tuple(after))


def pad_spatial(x: Var, window: Window, value: float) -> Var:
    """``x`` with the window's pads around its spatial axes."""
    if not any(window.pads):
        return x
    return mb.pad(x=x, pad=[0, 0, 0, 0, *window.pads], mode="constant", constant_val=constant(np.array(value), x))


def taps(node: Node, x: Var, window: Window) -> list[Var]:
    """For each place of the kernel what it sees, from an ``x`` that is padded already."""
    count = int(np.prod(window.kernel))
    if count > _MOST_TAPS:
        node.fail(f"has a dilated kernel of {count} values; by slices, up to {_MOST_TAPS} are converted")
    if not is_static(x.shape[2:]):
        node.fail("has a dilated window over an axis whose size varies", "fix the size with --shapes")
    bare = Window(window.kernel, window.strides, window.dilations, *((0,) * len(window.kernel),) * 2)
    out = bare.out_sizes([int(s) for s in x.shape[2:]])
    slices = []
    for place in product(*(range(k) for k in window.kernel)):
        begin = [p * d for p, d in zip(place, window.dilations, strict=True)]
        end = [b + (o - 1) * s + 1 for b, o, s in zip(begin, out, window.strides, strict=True)]
        slices.append(
            mb.slice_by_index(
                x=x,
                begin=[0, 0, *begin],
                end=[0, 0, *end],
                stride=[1, 1, *window.strides],
                begin_mask=[True, True, *(False for _ in begin)],
                end_mask=[True, True, *(False for _ in begin)],
            )
        )
    return slices


def reduced(values: Sequence[Var], combine: Callable[..., Var]) -> Var:
    """The values combined by twos, as ``mb.maximum`` does."""
    total = values[0]
    for value in values[1:]:
        total = combine(x=total, y=value)
    return total
