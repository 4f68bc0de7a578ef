"""Arrays of an ONNX graph in the dtypes that MIL computes with."""

from __future__ import annotations

import numpy as np

_INT32 = np.iinfo(np.int32)


def to_mil(array: np.ndarray) -> np.ndarray:
    """Booleans, float16 and float32 as they are, integers as int32, other floats as float32.

    The extremes of int64, with which graphs say "to the end", become those of int32. Raises ValueError saying what does
    not fit.
    """
    kind = array.dtype
    if kind == np.bool_ or kind in (np.float16, np.float32, np.int32):
        return array
    if kind.kind in "OSU":
        raise ValueError("holds text, and Core ML has no tensors of text")
    if kind.kind == "c":
        raise ValueError("holds complex numbers, and Core ML has none")
    if kind.kind in "iu" or "int" in kind.name:
        return _to_int32(array)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if kind == np.float64 and np.any((narrow == 0) & (array != 0)):
        smallest = array[(narrow == 0) & (array != 0)].flat[0]
        raise ValueError(f"holds the float64 {smallest:g}, and Core ML computes in float32, where it is 0")
    if kind == np.float64 and np.any(np.isinf(narrow) & np.isfinite(array)):
        largest = array[np.isinf(narrow) & np.isfinite(array)].flat[0]
        raise ValueError(f"holds the float64 {largest:g}, and Core ML computes in float32, which ends at 3.4e38")
    return narrow


def _to_int32(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu":  # the sub-byte types of ml_dtypes
        return array.astype(np.int32)
    if array.dtype == np.int64:
        ends = np.iinfo(np.int64)
        array = np.where(array == ends.max, _INT32.max, np.where(array == ends.min, _INT32.min, array))
    beyond = (array > _INT32.max) | (array < _INT32.min) if array.dtype.itemsize >= 4 else np.False_
    if np.any(beyond):
        found = array[beyond].flat[0]
        raise ValueError(
            f"holds the {array.dtype} {found}, and Core ML's integers are int32, from {_INT32.min} to {_INT32.max}"
        )
    return array.astype(np.int32)
