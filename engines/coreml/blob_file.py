"""Writer of the weight file of a Core ML package; ``evaluator/blobs.py`` says what lies where in it.

Equal data are stored once.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

SENTINEL = 0xDEADBEEF
RECORD = struct.Struct("<IIQQQ")
_VERSION = 2
_ALIGNMENT = 64
# Codes and bits of MIL's dtypes.
DTYPES = {
    "fp16": (1, 16),
    "fp32": (2, 32),
    "uint8": (3, 8),
    "int8": (4, 8),
    "int16": (6, 16),
    "uint16": (7, 16),
    "int4": (8, 4),
    "uint1": (9, 1),
    "uint2": (10, 2),
    "uint4": (11, 4),
    "uint3": (12, 3),
    "uint6": (13, 6),
    "int32": (14, 32),
    "uint32": (15, 32),
}


class BlobFile:
    """One weight file while it is written; a context manager, which completes it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._offsets: dict[tuple[int, int, bytes], int] = {}
        self._end = self._file.write(bytes(_ALIGNMENT))

    def __enter__(self) -> BlobFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._file.write(struct.pack("<II", len(self._offsets), _VERSION))
        self._file.close()

    @property
    def count(self) -> int:
        """How many blobs there are."""
        return len(self._offsets)

    def write(self, dtype: str, count: int, data: np.ndarray) -> int:
        """``count`` values of a MIL dtype, packed into uint8 bytes. Where in the file they are: the record's offset."""
        code, bits = DTYPES[dtype]
        size = -(-count * bits // 8)
        if data.dtype != np.uint8 or data.size != size:
            raise ValueError(f"{count} values of {dtype} take {size} bytes, found {data.size} of {data.dtype}")
        data = np.ascontiguousarray(data)
        key = (code, count, hashlib.sha256(data.data).digest())
        if key not in self._offsets:
            self._offsets[key] = self._append(code, size * 8 - count * bits, data)
        return self._offsets[key]

    def _append(self, code: int, padding: int, data: np.ndarray) -> int:
        """Writes a record, padded to the alignment, and what it describes."""
        self._end += self._file.write(bytes(-self._end % _ALIGNMENT))
        start = self._end
        record = RECORD.pack(SENTINEL, code, data.size, start + _ALIGNMENT, padding)
        self._end += self._file.write(record.ljust(_ALIGNMENT, b"\0"))
        self._end += self._file.write(data.data)
        return start
