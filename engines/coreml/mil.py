"""What converters share: constants in a Var's dtype, integers of fewer bits, shapes of which some dims vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from intaglio.engines.coreml.node import Node

# A size of a tensor: known, or a Var ``[1]`` of int32 where it varies. No scalar, since MIL loses through expand_dims
# which dim it is.
Size: TypeAlias = int | Var

_NARROW = {
    ir.DataType.INT2: (2, True),
    ir.DataType.UINT2: (2, False),
    ir.DataType.INT4: (4, True),
    ir.DataType.UINT4: (4, False),
    ir.DataType.INT8: (8, True),
    ir.DataType.UINT8: (8, False),
    ir.DataType.INT16: (16, True),
    ir.DataType.UINT16: (16, False),
}
_FLOATS = (types.fp16, types.fp32)
_MIL_NAMES = {
    ir.DataType.BOOL: "bool",
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "fp32",
    ir.DataType.DOUBLE: "fp32",
}


def mil_dtype(dtype: ir.DataType) -> str | None:
    """The name of MIL's dtype that holds an ONNX dtype; None where none does."""
    if dtype.is_integer():
        return "int32"
    return _MIL_NAMES.get(dtype)


def dtype_of(var: Var) -> str:
    """MIL's name of the dtype of a Var: ``fp32``, ``fp16``, ``int32``, ``bool``."""
    return str(types.builtin_to_string(var.dtype))


def numpy_dtype(var: Var) -> Any:
    """NumPy's dtype of a Var."""
    return types.nptype_from_builtin(var.dtype)


def is_float(var: Var) -> bool:
    """Whether a Var is float16 or float32."""
    return var.dtype in _FLOATS


def is_bool(var: Var) -> bool:
    """Whether a Var is boolean."""
    return var.dtype == types.bool


def constant(value: Any, like: Var) -> Any:
    """A number or an array in the dtype of a Var: mb takes every Python float for float32."""
    return np.asarray(value).astype(numpy_dtype(like))[()]


def cast(var: Var, dtype: str) -> Var:
    """The Var in another MIL dtype, or itself."""
    return var if dtype_of(var) == dtype else mb.cast(x=var, dtype=dtype)


def as_float(var: Var) -> Var:
    """The Var, in float32 where it holds integers or booleans."""
    return var if is_float(var) else mb.cast(x=var, dtype="fp32")


def through(dtype: str, function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function in another dtype and casts back."""
    return cast(function(cast(var, dtype)), dtype_of(var))


def without_bool(function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function that takes no booleans to a Var that may be one."""
    return through("int32", function, var) if is_bool(var) else function(var)


def in_float(function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function of floats to a Var that may hold integers or booleans, which it holds again after."""
    return function(var) if is_float(var) else through("fp32", function, var)


def wrap(var: Var, dtype: ir.DataType | None) -> Var:
    """An int32 brought into the range of an integer of fewer bits as overflow does; others as they are."""
    if dtype not in _NARROW or is_float(var) or is_bool(var):
        return var
    bits, signed = _NARROW[dtype]
    half = 1 << (bits - 1)
    if not signed:
        return mb.mod(x=var, y=np.int32(1 << bits))
    shifted = mb.mod(x=mb.add(x=var, y=np.int32(half)), y=np.int32(1 << bits))
    return mb.sub(x=shifted, y=np.int32(half))


def is_static(shape: Sequence[object]) -> bool:
    """Whether every size is known at conversion."""
    return not any(is_symbolic(size) for size in shape)


def static_sizes(node: Node, var: Var, axes: Sequence[int], why: str) -> list[int]:
    """The sizes of some axes. Raises CompileError where one varies; ``why`` says what needs them."""
    found = [var.shape[axis] for axis in axes]
    if not is_static(found):
        node.fail(f"has a size that varies, and {why}", "fix it with --shapes, or export the model with fixed sizes")
    return [int(size) for size in found]


def sizes(var: Var) -> list[Size]:
    """The sizes of all axes."""
    if is_static(var.shape):
        return [int(size) for size in var.shape]
    shape = mb.shape(x=var)
    return [_size_in(shape, axis) if is_symbolic(size) else int(size) for axis, size in enumerate(var.shape)]


def size_of(var: Var, axis: int) -> Size:
    """The size of one axis."""
    size = var.shape[axis]
    return _size_in(mb.shape(x=var), axis_of(axis, var.rank)) if is_symbolic(size) else int(size)


def _size_in(shape: Var, axis: int) -> Var:
    return mb.slice_by_index(x=shape, begin=[axis], end=[axis + 1])


def scalar(size: Size) -> Any:
    """A size as an operand of rank 0."""
    return mb.squeeze(x=size, axes=[0]) if isinstance(size, Var) else np.int32(size)


def shape_vector(dims: Sequence[Size]) -> Any:
    """A shape as MIL ops take it: an int32 array, or a Var where a dim is one."""
    if not any(isinstance(size, Var) for size in dims):
        return np.array(dims, np.int32)
    parts = [size if isinstance(size, Var) else np.array([size], np.int32) for size in dims]
    return mb.concat(values=parts, axis=0)


def reshape(var: Var, dims: Sequence[Size], name: str | None = None) -> Var:
    """``var`` with these dims, of which one may be -1; one that varies becomes -1 where the others say it."""
    dims = list(dims)
    unknown = [i for i, size in enumerate(dims) if isinstance(size, Var)]
    if len(unknown) == 1 and -1 not in [size for size in dims if not isinstance(size, Var)]:
        dims[unknown[0]] = -1
    if not dims:
        return mb.squeeze(x=var) if var.rank else var
    return mb.reshape(x=var, shape=shape_vector(dims), **({"name": name} if name else {}))


def shape_like(var: Var, other: Var) -> Var:
    """``var`` in the shape of another Var of as many elements."""
    return reshape(var, sizes(other))


def per_channel(var: Var, rank: int, axis: int = 1) -> Var:
    """A vector as a tensor of this rank, whose other axes have the size 1."""
    return reshape(var, [size_of(var, 0) if i == axis else 1 for i in range(rank)])


def arange(size: Size) -> Var:
    """``0, 1, …``, int32."""
    if not isinstance(size, Var):
        return mb.const(val=np.arange(size, dtype=np.int32))
    return mb.range_1d(start=0, end=scalar(size), step=1)


def product(dims: Sequence[Size]) -> Size:
    """The product of dims."""
    result: Size = int(np.prod([size for size in dims if not isinstance(size, Var)], dtype=np.int64))
    for size in dims:
        if isinstance(size, Var):
            factor = result if isinstance(result, Var) else np.int32(result)
            result = size if isinstance(result, int) and result == 1 else mb.mul(x=size, y=factor)
    return result


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def nonnegative(indices: Var, sizes_of_axes: Sequence[Size]) -> Any:
    """Indices, of which those below 0 count from the end, as Core ML takes them: from the start.

    ``sizes_of_axes`` has one size, or one for each element of the last dim of ``indices``.
    """
    size = scalar(sizes_of_axes[0]) if len(sizes_of_axes) == 1 else shape_vector(sizes_of_axes)
    known = not isinstance(size, Var)
    if indices.val is not None:
        if np.all(np.asarray(indices.val) >= 0):
            return indices
        if known:
            return np.where(np.asarray(indices.val) < 0, indices.val + np.asarray(size), indices.val).astype(np.int32)
    wrapped = mb.add(x=indices, y=np.asarray(size).astype(np.int32)[()] if known else size)
    return mb.select(cond=mb.less(x=indices, y=np.int32(0)), a=wrapped, b=indices)


def select(cond: Var, a: Any, b: Any, name: str | None = None) -> Var:
    """``a`` where the condition holds, else ``b``; all three broadcast.

    MIL infers the shape from ``a`` and ``b`` alone, so one of them is brought to that of the condition first.
    """
    shapes = [tuple(each.shape) if isinstance(each, Var) else np.shape(each) for each in (a, b)]
    if not _covers(shapes, tuple(cond.shape)):
        a = _spread(a, cond)
    return mb.select(cond=cond, a=a, b=b, **({"name": name} if name else {}))


def _covers(shapes: Sequence[tuple[Any, ...]], wanted: tuple[Any, ...]) -> bool:
    rank = max(len(shape) for shape in shapes)
    if rank < len(wanted):
        return False
    padded = [(1,) * (rank - len(shape)) + shape for shape in (*shapes, wanted)]
    return all(size == 1 or size in others for *others, size in zip(*padded, strict=True))


def _spread(a: Any, cond: Var) -> Any:
    if is_static(cond.shape):
        target = tuple(int(size) for size in cond.shape)
        known = None if isinstance(a, Var) and a.val is None else np.asarray(a.val if isinstance(a, Var) else a)
        if known is not None:
            return np.broadcast_to(known, np.broadcast_shapes(known.shape, target))
        zeros: Any = np.zeros(target, numpy_dtype(a))
    else:
        like = numpy_dtype(a) if isinstance(a, Var) else np.asarray(a).dtype
        zeros = mb.fill(shape=mb.shape(x=cond), value=np.zeros((), like)[()])
    both_bool = is_bool(a) if isinstance(a, Var) else np.asarray(a).dtype == np.bool_
    return mb.logical_or(x=a, y=zeros) if both_bool else mb.add(x=a, y=zeros)
