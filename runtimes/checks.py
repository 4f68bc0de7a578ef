"""Checks of what a caller gives: integers, and tensors of floating numbers."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from intaglio.errors import InputError


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """``value`` where it is an integer from ``least`` to ``most``. Raises InputError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        whole = int(value)
        if least <= whole and (most is None or whole <= most):
            return whole
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(f"{name} is {value!r:.100}; expected an integer {expected}")


def floats(name: str, value: Any) -> np.ndarray:
    """An array of any floating dtype, bfloat16 of ml_dtypes included. Raises InputError."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} are no array of numbers ({error}); expected float32") from error
    # NumPy does not know that bfloat16 is floating.
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{name} are {array.dtype}; expected float32, or another floating dtype")
    return array


def finite_float32(name: str, array: np.ndarray) -> np.ndarray:
    """``array`` as float32. Raises InputError where a value is not finite in it."""
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    finite = np.isfinite(array)
    if not finite.all():
        raise InputError(
            f"{array.size - np.count_nonzero(finite)} of {array.size} values of the {name} are not finite in float32"
        )
    return array


def tensor(name: str, value: Any, shape: Sequence[int | str]) -> np.ndarray:
    """Finite float32 of ``shape``, whose named axes may have any size but 0. Raises InputError."""
    array = floats(name, value)
    fits = array.ndim == len(shape) and all(
        found == size or (isinstance(size, str) and found) for found, size in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name} are {list(array.shape)}; expected [{', '.join(map(str, shape))}]")
    return finite_float32(name, array)


def sha256_of(array: np.ndarray) -> str:
    """Of the array's bytes, row by row, in the order of a little-endian machine."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()
