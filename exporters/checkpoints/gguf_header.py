"""The header of a GGUF file: metadata and the list of tensors, checked before anything is allocated for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.tensors import FileBytes

MAGIC = b"GGUF"

# Metadata type id -> dtype of a number.
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL, STRING, ARRAY = 7, 8, 9
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# ggml counts values in int64.
_MAX_VALUES = (1 << 63) - 1
_MAX_NESTING = 4
# What Python keeps for one tensor: its object, name, shape and place in dicts.
_TENSOR_MEMORY = 1200
_ARRAY_MEMORY = 512
_PAIR_MEMORY = 400
_LIST_MEMORY = 128
# What any file may take, whatever its size; half as much again as its size is allowed on top.
MEMORY_FLOOR = 48 << 20


class GgufMetadata(dict[str, Any]):
    """Metadata by key. ``types`` keeps each value's GGUF type, which a Python number does not tell.

    A type is a tuple: ``(scalar type,)``, ``(STRING,)`` or ``(ARRAY, element type)``.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.types: dict[str, tuple[int, ...]] = dict(values.types) if isinstance(values, GgufMetadata) else {}


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor list. ``offset`` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def values(self) -> int:
        """How many values the tensor has."""
        product = 1
        for n in self.shape:
            product *= n
        return product


@dataclass(frozen=True)
class Header:
    """``data_start`` is the byte that offsets count from."""

    version: int
    metadata: GgufMetadata
    entries: tuple[TensorEntry, ...]
    alignment: int
    data_start: int


def read_header(file: FileBytes) -> Header:
    """Reads the whole header. Raises CheckpointError on anything that the format does not allow, on counts and
    lengths that leave the file, and when the header would take more memory than twice the file and 64 MiB.
    """
    path, cursor = file.path, _Cursor(file)
    if file.size < 24 or cursor.take(4) != MAGIC:
        raise CheckpointError(
            f"{path}: is not a GGUF file, or is cut short ({file.size} bytes, expected {MAGIC!r} and at least 24)"
        )
    version = cursor.unsigned(4)
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise CheckpointError(f"{path}: is a big-endian GGUF file; only little-endian ones are read")
        raise CheckpointError(f"{path}: is GGUF version {version}; read are 2 and 3. Convert it anew")
    tensor_count, pair_count = cursor.unsigned(8), cursor.unsigned(8)
    # The least that a tensor or a pair can take; a larger count lies, and would be allocated for.
    cursor.expect(tensor_count, 8 + 4 + 4 + 8, "tensors")
    cursor.expect(pair_count, 8 + 4 + 1, "metadata keys")
    cursor.charge(tensor_count * _TENSOR_MEMORY)
    metadata = GgufMetadata()
    for _ in range(pair_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{path}: the metadata key {key!r} stands twice")
        metadata[key], metadata.types[key] = cursor.value(key)
    entries: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        entry = _entry(cursor)
        if entry.name in entries:
            raise CheckpointError(f"{path}: the tensor {entry.name!r} stands twice")
        entries[entry.name] = entry
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    return Header(version, metadata, tuple(entries.values()), alignment, start)


def _entry(cursor: _Cursor) -> TensorEntry:
    path, name = cursor.file.path, cursor.string("a tensor name")
    dimensions = cursor.unsigned(4)
    if dimensions > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: {name!r} has {dimensions} dimensions, expected at most {MAX_DIMENSIONS}")
    # The first dimension of the file runs fastest.
    shape = tuple(reversed([cursor.unsigned(8) for _ in range(dimensions)]))
    entry = TensorEntry(name, shape, cursor.unsigned(4), cursor.unsigned(8))
    if 0 in shape or entry.values > _MAX_VALUES:
        raise CheckpointError(
            f"{path}: {name!r} has the shape {list(shape)}, expected sizes of at least 1 and at most 2^63 - 1 values"
        )
    return entry


class _Cursor:
    """Reads from front to back through a window, so that a file of any size stays on disk.

    It also keeps account of what the header takes in memory: a Python string or tensor is many times the
    few bytes that a damaged file needs to ask for one.
    """

    _WINDOW = 1 << 20

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.position = 0
        self._window = bytearray()
        self._start = 0
        self._budget = file.size * 3 // 2 + MEMORY_FLOOR

    def take(self, length: int) -> bytearray:
        at = self.position - self._start
        if at + length > len(self._window):
            available = self.file.size - self.position
            if length > available:
                raise CheckpointError(
                    f"{self.file.path}: the header asks for {length} bytes at {self.position}, but the file has "
                    f"{self.file.size}; it is cut short or its header lies. Fetch it again."
                )
            if length > self._WINDOW:
                self.position += length
                return self.file.read(self.position - length, length)
            self._window = self.file.read(self.position, min(self._WINDOW, available))
            self._start, at = self.position, 0
        self.position += length
        return self._window[at : at + length]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def charge(self, memory: int) -> None:
        self._budget -= memory
        if self._budget < 0:
            raise CheckpointError(
                f"{self.file.path}: the header would take more memory than twice the file's {self.file.size} bytes "
                "and 64 MiB; no model's does, so it is damaged"
            )

    def expect(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.file.size - self.position:
            raise CheckpointError(
                f"{self.file.path}: the header counts {count} {what} of at least {least_bytes} bytes, but only "
                f"{self.file.size - self.position} bytes are left; it is cut short or its header lies"
            )

    def string(self, what: str) -> str:
        raw = self.take(self.unsigned(8))
        # One character beyond the basic plane makes four bytes of each. Paid back when the true size is known.
        most = len(raw) * (2 if raw.isascii() else 5)
        self.charge(most)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: {what} is not UTF-8 ({bytes(raw[:40])!r})") from error
        self.charge(sys.getsizeof(text) + 8 - most)
        return text

    def value(self, key: str) -> tuple[Any, tuple[int, ...]]:
        kind = self.unsigned(4)
        self.charge(_PAIR_MEMORY)
        if kind in SCALARS:
            return self._numbers(kind, 1, key)[0].item(), (kind,)
        if kind == STRING:
            return self.string(key), (kind,)
        if kind == ARRAY:
            element = self.unsigned(4)
            return self._array(key, element, 1), (ARRAY, element)
        raise CheckpointError(f"{self.file.path}: {key} has the unknown metadata type {kind}")

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        raw = self.take(count * np.dtype(SCALARS[kind]).itemsize)
        if kind == BOOL and count and max(raw) > 1:
            raise CheckpointError(f"{self.file.path}: {key} holds the boolean {max(raw)}, expected 0 or 1")
        return np.frombuffer(raw, SCALARS[kind])

    def _array(self, key: str, kind: int, nesting: int) -> Any:
        count = self.unsigned(8)
        if kind in SCALARS:
            size = np.dtype(SCALARS[kind]).itemsize
            self.expect(count, size, f"values of {key}")
            self.charge(count * size + _ARRAY_MEMORY)
            return self._numbers(kind, count, key)
        if kind == STRING:
            self.expect(count, 8, f"strings of {key}")
            self.charge(_LIST_MEMORY)
            return [self.string(key) for _ in range(count)]
        if kind == ARRAY and nesting < _MAX_NESTING:
            self.expect(count, 12, f"arrays of {key}")
            self.charge(_LIST_MEMORY)
            return [self._array(key, self.unsigned(4), nesting + 1) for _ in range(count)]
        raise CheckpointError(
            f"{self.file.path}: {key} is an array of type {kind} at depth {nesting}; expected numbers, strings, "
            f"or arrays nested at most {_MAX_NESTING} deep"
        )
