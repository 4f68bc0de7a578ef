"""What several converters need: dims that may vary, dtypes, islands of float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from intaglio.engines.coreml.node import Node

# A size of a tensor: known, or a Var with one int32 where it is known only when the model runs.
Size: TypeAlias = int | Var


def dtype_of(x: Var) -> str:
    """MIL's name of the dtype: ``fp32``, ``fp16``, ``int32``, ``bool``."""
    return str(types.builtin_to_string(x.dtype))


def is_float(x: Var) -> bool:
    """Whether the dtype is fp32 or fp16."""
    return bool(types.is_float(x.dtype))


def cast(x: Var, dtype: str) -> Var:
    """``x`` in a dtype of MIL, itself where it has that."""
    return x if dtype_of(x) == dtype else mb.cast(x=x, dtype=dtype)


def floating(x: Var) -> Var:
    """``x``, in float32 where it is no float."""
    return x if is_float(x) else mb.cast(x=x, dtype="fp32")


def constant(array: np.ndarray, like: Var) -> np.ndarray:
    """The array in the dtype of a Var."""
    return np.asarray(array).astype(types.nptype_from_builtin(like.dtype))


def in_floats(x: Var, function: Callable[[Var], Var]) -> Var:
    """``function`` of ``x``, computed in float32 where ``x`` holds integers or booleans, which it holds again after."""
    return function(x) if is_float(x) else cast(function(mb.cast(x=x, dtype="fp32")), dtype_of(x))


def in_float32(x: Var, function: Callable[[Var], Var]) -> Var:
    """``function`` of ``x`` computed in float32, in the dtype of ``x``."""
    return cast(function(cast(x, "fp32")), dtype_of(x))


def is_static(sizes: Sequence[object]) -> bool:
    """Whether all sizes are known."""
    return not any(is_symbolic(size) for size in sizes)


def static_sizes(node: Node, x: Var, axes: Sequence[int], why: str) -> list[int]:
    """The sizes of some axes. Raises CompileError where one varies; ``why`` says what needs them."""
    sizes = [x.shape[axis] for axis in axes]
    if not is_static(sizes):
        node.fail(f"has a size that varies, and {why}", "fix it with --shapes, or export the model with fixed sizes")
    return [int(size) for size in sizes]


def size_of(x: Var, axis: int) -> Size:
    """The size of one axis, a Var ``[1]`` where it varies."""
    if not is_symbolic(x.shape[axis]):
        return int(x.shape[axis])
    axis %= x.rank
    return mb.slice_by_index(x=mb.shape(x=x), begin=[axis], end=[axis + 1])


def joined(sizes: Sequence[Size]) -> Var | list[int]:
    """A shape, or any list of integers of which some are known only when the model runs."""
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        return [int(size) for size in sizes]
    parts = [size if isinstance(size, Var) else np.array([size], np.int32) for size in sizes]
    return mb.concat(values=parts, axis=0)


def reshape(x: Var, sizes: Sequence[Size]) -> Var:
    """``x`` in another shape, of which one size may be -1."""
    sizes = list(sizes)
    varying = [i for i, size in enumerate(sizes) if isinstance(size, Var)]
    # One size that varies need not be computed.
    if len(varying) == 1 and -1 not in [size for size in sizes if not isinstance(size, Var)]:
        sizes[varying[0]] = -1
    return mb.reshape(x=x, shape=joined(sizes))


def shape_like(x: Var, other: Var) -> Var:
    """``x`` in the shape of another Var of as many elements."""
    return reshape(x, [size_of(other, axis) for axis in range(other.rank)])


def per_channel(x: Var, rank: int, axis: int = 1) -> Var:
    """A vector as a tensor of this rank, whose other axes have the size 1."""
    return reshape(x, [size_of(x, 0) if i == axis else 1 for i in range(rank)])


def arange(size: Size) -> Var:
    """``0, 1, …``, int32."""
    if not isinstance(size, Var):
        return mb.const(val=np.arange(size, dtype=np.int32))
    return mb.range_1d(start=0, end=mb.squeeze(x=size, axes=[0]), step=1)
