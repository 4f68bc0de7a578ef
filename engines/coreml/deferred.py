"""Large constants of a MIL program: those that coremltools does not compare, and those whose data are read late.

Full-size models hold billions of codes, and in a MIL program each takes a byte. What stands for them here has a shape
and a dtype and no data; these are read when the package is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

# coremltools compares smaller constants by their values.
_SMALLEST = 1024


class Large(np.ndarray[Any, Any]):
    """An array that equals only itself.

    Each time that coremltools infers values anew, it compares every constant with an object, value by value.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = None


class Deferred(Large):
    """An array without data: every element is one zero. ``packed`` reads the bytes that the weight file holds.

    What would compute with its elements raises TypeError.
    """

    packed: Callable[[], np.ndarray]

    def __array_finalize__(self, base: Any) -> None:
        if isinstance(base, Deferred):
            self._refuse()

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __array_function__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise TypeError("a weight that is read when the package is written was asked for its values before")


def large(array: np.ndarray) -> np.ndarray:
    """The array as ``Large``, if it is."""
    return array if array.size < _SMALLEST else array.view(Large)


def deferred(shape: tuple[int, ...], dtype: np.dtype[Any], bits: int, packed: Callable[[], np.ndarray]) -> np.ndarray:
    """A constant of ``shape`` in one of MIL's dtypes, whose values take ``bits`` each.

    ``packed`` gives them as uint8 bytes, the first in the lowest bits. It is called when the package is written.
    """
    if math.prod(shape) < _SMALLEST:
        return _unpacked(packed(), bits, math.prod(shape)).astype(dtype).reshape(shape)
    array = Deferred(shape, dtype, buffer=np.zeros(1, np.uint8), strides=(0,) * len(shape))
    array.packed = packed
    return array


def _unpacked(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    stream = np.unpackbits(packed.ravel(), bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(stream, axis=1, bitorder="little")[:, 0]


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers of ``bits`` bits, one a byte, as uint8 bytes without gaps, the first in the lowest bits."""
    stream = np.unpackbits(values.ravel().view(np.uint8)[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(stream, bitorder="little")
