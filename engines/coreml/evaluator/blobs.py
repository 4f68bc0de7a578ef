"""Reader of the weight file of a Core ML package (``weights/weight.bin``).

The file begins with 64 bytes: the number of blobs and the version (2), both uint32. Each blob has a record of 64 bytes:
the uint32 0xDEADBEEF, the uint32 dtype, the size of the data in bytes and its offset in the file, both uint64, and how
many bits at the end are padding. Data begin at multiples of 64. Values of less than a byte follow each other without
gaps, the first in the lowest bits, across bytes too. A program refers to a blob by the offset of its record.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from intaglio.errors import EngineError

_SENTINEL = 0xDEADBEEF
_VERSION = 2
_RECORD = struct.Struct("<IIQQQ")
_RECORD_BYTES = 64
# Codes of dtypes in records, as the names of MIL's data types.
_DTYPES = {
    1: "FLOAT16",
    2: "FLOAT32",
    3: "UINT8",
    4: "INT8",
    5: "BFLOAT16",
    6: "INT16",
    7: "UINT16",
    8: "INT4",
    9: "UINT1",
    10: "UINT2",
    11: "UINT4",
    12: "UINT3",
    13: "UINT6",
    14: "INT32",
    15: "UINT32",
}
# Bits of the types that take less than a byte.
SUB_BYTE = {"INT4": 4, "UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6}
_NUMPY: dict[str, type[np.generic]] = {
    "FLOAT16": np.float16,
    "FLOAT32": np.float32,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "INT16": np.int16,
    "UINT16": np.uint16,
    "INT32": np.int32,
    "UINT32": np.uint32,
}


class Blobs:
    """One weight file, mapped. Whole-byte blobs are read as views of the map."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError if the file is missing or is not a weight file of version 2."""
        self.path = path
        try:
            self._bytes = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot read the weight file {path}: {error}. Compile the model again.") from error
        if len(self._bytes) < _RECORD_BYTES:
            raise EngineError(f"{path} has {len(self._bytes)} bytes, expected a header of {_RECORD_BYTES}")
        self.count, version = struct.unpack("<II", self._bytes[:8].tobytes())
        if version != _VERSION:
            raise EngineError(f"{path} is a weight file of version {version}, expected {_VERSION}")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """The blob whose record lies at ``offset``, of MIL's ``dtype``, as an array of ``shape``.

        Values of less than a byte come as uint8 (INT4: int8), one a byte. Raises EngineError if the record differs.
        """
        where = f"the blob at {offset} of {self.path}"
        code, nbytes, start = self._record(offset)
        stored = _DTYPES.get(code)
        if stored != dtype:
            raise EngineError(f"{where}: it holds {stored or f'dtype {code}'}, the program expects {dtype}")
        if start % _RECORD_BYTES or start + nbytes > len(self._bytes):
            raise EngineError(f"{where}: {nbytes} bytes at {start} are not in the file of {len(self._bytes)}")
        expected = math.ceil(math.prod(shape) * _bits(dtype) / 8)
        if nbytes != expected:
            raise EngineError(f"{where}: it has {nbytes} bytes, shape {list(shape)} of {dtype} needs {expected}")
        data = self._bytes[start : start + nbytes]
        if dtype in SUB_BYTE:
            return unpack_bits(data, dtype, math.prod(shape)).reshape(shape)
        return np.asarray(data.view(_numpy(dtype))).reshape(shape)

    def stored_bytes(self, offset: int) -> int:
        """What the blob whose record lies at ``offset`` takes in the file, with its record. Raises EngineError."""
        return _RECORD_BYTES + self._record(offset)[1]

    def _record(self, offset: int) -> tuple[int, int, int]:
        """The code of the dtype, the size in bytes and the offset of the data."""
        where = f"the blob at {offset} of {self.path}"
        if offset % _RECORD_BYTES or not 0 < offset <= len(self._bytes) - _RECORD_BYTES:
            raise EngineError(f"{where}: no record can lie there")
        sentinel, code, nbytes, start, _ = _RECORD.unpack(self._bytes[offset : offset + _RECORD.size].tobytes())
        if sentinel != _SENTINEL:
            raise EngineError(f"{where}: the record begins with {sentinel:#x}, expected {_SENTINEL:#x}")
        return code, nbytes, start


def unpack_bits(data: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """``count`` values of a sub-byte ``dtype`` from packed bytes, one a byte: uint8, or int8 for INT4."""
    bits = SUB_BYTE[dtype]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        values = (data[:, None] >> shifts & np.uint8((1 << bits) - 1)).ravel()[:count]
    else:
        stream = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
        values = stream @ (1 << np.arange(bits, dtype=np.uint8))
    if dtype == "INT4":
        return ((values ^ 8).astype(np.int8) - np.int8(8)).astype(np.int8)
    return values.astype(np.uint8)


def _bits(dtype: str) -> int:
    return SUB_BYTE.get(dtype) or 8 * np.dtype(_numpy(dtype)).itemsize


def _numpy(dtype: str) -> type[np.generic]:
    if dtype not in _NUMPY:
        raise EngineError(f"weights of MIL's data type {dtype} are not read; known are {sorted({*_NUMPY, *SUB_BYTE})}")
    return _NUMPY[dtype]
