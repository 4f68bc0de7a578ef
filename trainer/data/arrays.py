"""Readers of rows of fixed size: NumPy ``.npy``, IDX, and flat token files.

Rows are read at their place. IDX through gzip has no such places and is read in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from intaglio.errors import DataError
from intaglio.trainer.data.records import (
    READ_ERRORS,
    Damage,
    IndexedReader,
    Offset,
    PositionedFile,
    Record,
    StreamReader,
    open_bytes,
)

# http://yann.lecun.com/exdb/mnist describes them; all are big-endian.
_IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class _Rows:
    """The rows of one array in a file: ``shape`` is that of a row, ``start`` the byte of the first."""

    def __init__(self, path: Path, count: int, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> None:
        self.file, self.count, self.shape, self.dtype, self.start = PositionedFile(path), count, shape, dtype, start
        self.nbytes = math.prod(shape) * dtype.itemsize
        expected = start + count * self.nbytes
        if self.file.size != expected:
            raise DataError(
                f"{path}: has {self.file.size} bytes, and {count} rows of {dtype.name} {list(shape)} take {expected}; "
                "it is cut short or damaged"
            )

    def get(self, index: int) -> np.ndarray:
        return _row(self.file.read(self.start + index * self.nbytes, self.nbytes), self.shape, self.dtype)


class ArrayReader(IndexedReader):
    """Row i of several files of as many rows each, by the name of their field; ``.npy``, or IDX without gzip.

    Raises DataError where a file is neither, or their numbers of rows differ.
    """

    def __init__(self, fields: Mapping[str, Path]) -> None:
        self.files = tuple(fields.values())
        self._rows = {name: _open_rows(path) for name, path in fields.items()}
        self._count = _same_count(
            {path: rows.count for path, rows in zip(self.files, self._rows.values(), strict=True)}
        )

    def __len__(self) -> int:
        return self._count

    def get(self, index: int) -> Record:
        return {name: rows.get(index) for name, rows in self._rows.items()}

    def where(self, index: int) -> str:
        return f"{', '.join(map(str, self.files))}, row {index}"


class GzipIdxReader(StreamReader):
    """Row i of several IDX files of as many rows each, through gzip and in order. Offsets are rows.

    The files are read beside each other, so they are one shard.
    """

    def __init__(self, fields: Mapping[str, Path]) -> None:
        self.paths = dict(fields)
        self.files = tuple(fields.values())
        self._count = _same_count({path: self._header(path)[0] for path in self.files})

    @property
    def shards(self) -> int:
        return 1

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        first = start[0] if start else 0
        streams = {name: _GzipRows(path, first) for name, path in self.paths.items()}
        for index in range(first, self._count):
            record: Record = {}
            for name, stream in streams.items():
                try:
                    record[name] = stream.next()
                except (*READ_ERRORS, DataError) as error:
                    where = f"{self.paths[name]}, row {index}"
                    yield (index,), Damage(where, f"cannot be read ({error})", self._count - index)
                    return
            yield (index,), record

    def where(self, shard: int, offset: Offset) -> str:
        return f"{', '.join(map(str, self.files))}, row {offset[0]}"

    @staticmethod
    def _header(path: Path) -> tuple[int, tuple[int, ...], np.dtype[Any], int]:
        with open_bytes(path) as file:
            return _idx_header(path, file)


class _GzipRows:
    def __init__(self, path: Path, first: int) -> None:
        self._file = open_bytes(path)
        _, self._shape, self._dtype, start = _idx_header(path, self._file)
        self._nbytes = math.prod(self._shape) * self._dtype.itemsize
        self._place: int | None = start + first * self._nbytes

    def next(self) -> np.ndarray:
        if self._place is not None:
            self._file.seek(self._place)
            self._place = None
        content = self._file.read(self._nbytes)
        if len(content) != self._nbytes:
            raise DataError("the file ends before its last row")
        return _row(content, self._shape, self._dtype)


class TokenReader(IndexedReader):
    """Windows of ``length + 1`` tokens, ``length`` apart, of flat files of little-endian ``dtype`` (uint16 or uint32).

    The last token of a window is the first of the next, so each is predicted once. Windows do not go from file to
    file; what does not fill one at the end of a file is left out.
    """

    def __init__(self, files: tuple[Path, ...], dtype: str, length: int) -> None:
        self.files, self.length, self._dtype = files, length, np.dtype(dtype).newbyteorder("<")
        self._contents = [PositionedFile(path) for path in files]
        for content in self._contents:
            if content.size % self._dtype.itemsize:
                raise DataError(
                    f"{content.path}: has {content.size} bytes, which are no whole number of {dtype}; is it another "
                    "type, or cut short?"
                )
        tokens = np.array([content.size // self._dtype.itemsize for content in self._contents])
        windows = np.maximum(tokens - 1, 0) // length
        self._ends = np.cumsum(windows)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get(self, index: int) -> Record:
        shard, first = self._place(index)
        size = self._dtype.itemsize
        content = self._contents[shard].read(first * size, (self.length + 1) * size)
        return {"tokens": np.frombuffer(content, self._dtype)}

    def where(self, index: int) -> str:
        shard, first = self._place(index)
        return f"{self.files[shard]}, tokens {first} to {first + self.length}"

    def _place(self, index: int) -> tuple[int, int]:
        """The file of window ``index``, and its first token there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, (index - (int(self._ends[shard - 1]) if shard else 0)) * self.length


def _row(content: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _open_rows(path: Path) -> _Rows:
    try:
        with path.open("rb") as file:
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                file.seek(0)
                return _Rows(path, *_npy_header(path, file))
            file.seek(0)
            return _Rows(path, *_idx_header(path, file))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _npy_header(path: Path, file: BinaryIO) -> tuple[int, tuple[int, ...], np.dtype[Any], int]:
    """Number of rows, their shape and dtype, and the byte of the first."""
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file)
    except ValueError as error:
        raise DataError(f"{path}: is a damaged .npy file ({error})") from error
    if dtype.hasobject or dtype.fields or not shape or (fortran and len(shape) > 1):
        raise DataError(
            f"{path}: is {'Fortran-ordered ' if fortran else ''}{dtype} {list(shape)}; expected rows of numbers in C "
            "order. Save it with np.save(path, np.ascontiguousarray(array))"
        )
    return shape[0], shape[1:], dtype, file.tell()


def _idx_header(path: Path, file: BinaryIO) -> tuple[int, tuple[int, ...], np.dtype[Any], int]:
    """Number of rows, their shape and dtype, and the byte of the first."""
    try:
        magic = file.read(4)
        known = len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in _IDX_DTYPES and 1 <= magic[3] <= 8
        sizes = file.read(4 * magic[3]) if known else b""
    except READ_ERRORS as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not known or len(sizes) != 4 * magic[3]:
        raise DataError(f"{path}: is no IDX or .npy file, it begins with {magic.hex(' ')}")
    shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    return shape[0], shape[1:], np.dtype(_IDX_DTYPES[magic[2]]), 4 + len(sizes)


def _same_count(counts: dict[Path, int]) -> int:
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{path} has {count}" for path, count in counts.items())
        raise DataError(f"the files have different numbers of rows: {listed}")
    return next(iter(counts.values()))
