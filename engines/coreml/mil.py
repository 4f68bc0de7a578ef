"""What converters share: numbers in a Var's dtype, integers of fewer bits, shapes of which some dims vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

Size = int | Var

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


def numpy_dtype(var: Var) -> Any:
    """NumPy's dtype of a Var."""
    return types.nptype_from_builtin(var.dtype)


def is_float(var: Var) -> bool:
    """Whether a Var is float16 or float32."""
    return var.dtype in _FLOATS


def is_bool(var: Var) -> bool:
    """Whether a Var is boolean."""
    return var.dtype == types.bool


def number(value: Any, like: Var) -> Any:
    """A constant in the dtype of a Var: mb takes every Python float for float32."""
    return np.asarray(value).astype(numpy_dtype(like))[()]


def cast(var: Var, dtype: str) -> Var:
    """The Var in another MIL dtype, or itself."""
    return var if types.builtin_to_string(var.dtype) == dtype else mb.cast(x=var, dtype=dtype)


def as_float(var: Var) -> Var:
    """Integers and booleans as float32."""
    return var if is_float(var) else mb.cast(x=var, dtype="fp32")


def through(dtype: str, function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function in another dtype and casts back."""
    before = types.builtin_to_string(var.dtype)
    return cast(function(cast(var, dtype)), before)


def without_bool(function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function that takes no booleans to a Var that may be one."""
    return through("int32", function, var) if is_bool(var) else function(var)


def in_float(function: Callable[[Var], Var], var: Var) -> Var:
    """Applies a function of floats to a Var that may be an integer."""
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


def is_static(var: Var) -> bool:
    """Whether every dim is known at conversion."""
    return all(isinstance(size, (int, np.integer)) for size in var.shape)


def sizes(var: Var) -> list[Size]:
    """The dims of a Var: integers where they are known, scalar Vars elsewhere."""
    if is_static(var):
        return [int(size) for size in var.shape]
    shape = mb.shape(x=var)
    return [
        int(size) if isinstance(size, (int, np.integer)) else mb.gather(x=shape, indices=np.int32(i), axis=0)
        for i, size in enumerate(var.shape)
    ]


def shape_vector(dims: Sequence[Size]) -> Any:
    """A shape as MIL ops take it: an int32 array, or a Var where a dim is one."""
    if not any(isinstance(size, Var) for size in dims):
        return np.array(dims, np.int32)
    parts = [mb.expand_dims(x=size, axes=[0]) if isinstance(size, Var) else np.array([size], np.int32) for size in dims]
    return mb.concat(values=parts, axis=0)


def reshape(var: Var, dims: Sequence[Size], name: str | None = None) -> Var:
    """``var`` with these dims; one that varies becomes -1 where the others say it."""
    dims = list(dims)
    unknown = [i for i, size in enumerate(dims) if isinstance(size, Var)]
    if len(unknown) == 1 and -1 not in [d for d in dims if isinstance(d, int)]:
        dims[unknown[0]] = -1
    if not dims:
        return mb.squeeze(x=var, name=name) if var.rank else var
    return mb.reshape(x=var, shape=shape_vector(dims), **({"name": name} if name else {}))


def product(dims: Sequence[Size]) -> Size:
    """The product of dims."""
    known = int(np.prod([d for d in dims if isinstance(d, int)], dtype=np.int64))
    result: Size = known
    for size in dims:
        if isinstance(size, Var):
            result = size if isinstance(result, int) and result == 1 else mb.mul(x=size, y=_operand(result))
    return result


def _operand(size: Size) -> Any:
    return size if isinstance(size, Var) else np.int32(size)


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def full(value: Any, shape: Sequence[int], like: Var) -> np.ndarray:
    """An array of one value in the dtype of a Var."""
    return np.full(shape, value, numpy_dtype(like))


def nonnegative(indices: Var, sizes_of_axes: Sequence[Size]) -> Any:
    """Indices, of which those below 0 count from the end, as Core ML takes them: from the start.

    ``sizes_of_axes`` has one size, or one for each element of the last dim of ``indices``.
    """
    size = sizes_of_axes[0] if len(sizes_of_axes) == 1 else shape_vector(sizes_of_axes)
    known = not isinstance(size, Var)
    if indices.val is not None:
        if np.all(np.asarray(indices.val) >= 0):
            return indices
        if known:
            return np.where(np.asarray(indices.val) < 0, indices.val + np.asarray(size), indices.val).astype(np.int32)
    wrapped = mb.add(x=indices, y=np.asarray(size).astype(np.int32)[()] if known else size)
    return mb.select(cond=mb.less(x=indices, y=np.int32(0)), a=wrapped, b=indices)
