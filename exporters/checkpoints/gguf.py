"""GGUF files, versions 2 and 3, little-endian.

The container is read here: the stock reader refuses a whole file for one tensor type that it does not
know, and maps the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.gguf_blocks import BLOCK_TYPES, DENSE_TYPES, TYPES, BlockTensor
from intaglio.exporters.checkpoints.tensors import (
    Checkpoint,
    CheckpointTensor,
    DenseTensor,
    FileBytes,
    UnreadableTensor,
)

MAGIC = b"GGUF"

_SCALARS = {
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
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


def open_gguf(path: Path) -> Checkpoint:
    """Reads the header of a GGUF file. Numeric arrays of the metadata are NumPy arrays, string arrays lists.

    Raises CheckpointError when a length, a count or an offset leaves the file, before allocating for it.
    """
    file = FileBytes(path)
    cursor = _Cursor(file)
    if file.size < 24 or cursor.take(4) != MAGIC:
        raise CheckpointError(f"{path}: is not a GGUF file, or is cut short ({file.size} bytes)")
    version = cursor.unsigned(4)
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise CheckpointError(f"{path}: is a big-endian GGUF file; only little-endian ones are read")
        raise CheckpointError(f"{path}: is GGUF version {version}; read are 2 and 3")
    tensor_count, pair_count = cursor.unsigned(8), cursor.unsigned(8)
    # The least that a tensor or a pair can take; a larger count lies, and would be allocated for.
    cursor.expect(tensor_count, 8 + 4 + 8 + 4 + 8, "tensors")
    cursor.expect(pair_count, 8 + 4 + 1, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{path}: the metadata key {key!r} stands twice")
        metadata[key] = cursor.value(cursor.unsigned(4), key)
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, CheckpointTensor] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path}: the tensor {name!r} stands twice")
        tensors[name] = _tensor(file, name, shape, type_id, start + offset)
    _check_overlaps(path, tensors)
    return Checkpoint(path, "gguf", tensors, (path,), metadata=metadata)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    dimensions = cursor.unsigned(4)
    if dimensions > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.file.path}: {name!r} has {dimensions} dimensions, expected at most {_MAX_DIMENSIONS}"
        )
    # The first dimension of the file runs fastest.
    shape = tuple(reversed([cursor.unsigned(8) for _ in range(dimensions)]))
    return name, shape, cursor.unsigned(4), cursor.unsigned(8)


def _tensor(file: FileBytes, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> CheckpointTensor:
    if type_id not in TYPES:
        why = f"{file.path}: {name}: has the unknown GGUF type id {type_id}"
        return UnreadableTensor(name, shape, f"type {type_id}", why)
    storage, block_values, block_bytes = TYPES[type_id]
    values = 1
    for n in shape:
        values *= n
    if block_values > 1 and (not shape or shape[-1] % block_values):
        raise CheckpointError(
            f"{file.path}: {name}: {storage} of shape {list(shape)}, whose rows are no multiple of {block_values}"
        )
    end = offset + values // block_values * block_bytes
    if end > file.size:
        raise CheckpointError(
            f"{file.path}: {name}: {storage} of shape {list(shape)} lies at bytes {offset} to {end}, but the "
            f"file has {file.size}; it is cut short or its header lies. Fetch it again."
        )
    if storage in DENSE_TYPES:
        return DenseTensor(name, shape, storage, file, offset, DENSE_TYPES[storage])
    if storage in BLOCK_TYPES and len(shape) == 2:
        return BlockTensor(name, shape, storage, file, offset, BLOCK_TYPES[storage], block_values, block_bytes)
    read = ", ".join([*DENSE_TYPES, *BLOCK_TYPES])
    why = f"{file.path}: {name}: is stored as {storage} of shape {list(shape)}; read are {read} (blocks in matrices)"
    return UnreadableTensor(name, shape, storage, why)


def _check_overlaps(path: Path, tensors: dict[str, CheckpointTensor]) -> None:
    spans = sorted(
        (t.offset, t.offset + t.nbytes, n) for n, t in tensors.items() if isinstance(t, DenseTensor | BlockTensor)
    )
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{path}: {second} overlaps {first} at byte {begin}")


class _Cursor:
    """Reads the header from front to back through a window, so that a file of any size stays on disk."""

    _WINDOW = 1 << 20

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        self.position = 0
        self._window = bytearray()
        self._start = 0

    def take(self, length: int) -> bytearray:
        at = self.position - self._start
        if at < 0 or at + length > len(self._window):
            available = self.file.size - self.position
            if length > available:
                raise CheckpointError(
                    f"{self.file.path}: the header asks for {length} bytes at {self.position}, but the file has "
                    f"{self.file.size}; it is cut short or its header lies. Fetch it again."
                )
            self._window = self.file.read(self.position, min(max(length, self._WINDOW), available))
            self._start, at = self.position, 0
        self.position += length
        return self._window[at : at + length]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def expect(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.file.size - self.position:
            raise CheckpointError(
                f"{self.file.path}: the header counts {count} {what} of at least {least_bytes} bytes, but only "
                f"{self.file.size - self.position} bytes are left; it is cut short or its header lies"
            )

    def string(self, what: str) -> str:
        raw = self.take(self.unsigned(8))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file.path}: {what} is not UTF-8 ({raw[:40]!r})") from error

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise CheckpointError(f"{self.file.path}: {key} has the unknown metadata type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self.unsigned(4), self.unsigned(8)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            self.expect(count, dtype.itemsize, f"values of {key}")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _STRING:
            self.expect(count, 8, f"strings of {key}")
            return [self.string(key) for _ in range(count)]
        raise CheckpointError(f"{self.file.path}: {key} is an array of type {kind}; expected numbers or strings")
