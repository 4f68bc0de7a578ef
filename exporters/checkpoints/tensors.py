"""The protocol that all readers share: a checkpoint maps tensor names to lazy tensors.

A tensor knows its shape, how it is stored and how it is quantized, and reads rows on demand with
positioned reads. Through a memory map the touched pages would count as resident; this way the peak
memory of an export does not grow with the model.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows


class FileBytes:
    """Positioned reads from one file, opened at the first read and closed with the object.

    Raises CheckpointError on a read that leaves the file, and when the file got shorter since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self._fd = -1

    def read(self, offset: int, length: int) -> bytearray:
        """The ``length`` bytes at ``offset``."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + length} are asked for, but the file has "
                f"{self.size}; it is cut short or its header lies. Fetch it again."
            )
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            buffer = bytearray(length)
            view, done = memoryview(buffer), 0
            while done < length:
                n = self._read_into(view[done:], offset + done)
                if n == 0:
                    raise CheckpointError(f"{self.path}: ends at {offset + done} now, was {self.size} bytes")
                done += n
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        return buffer

    def _read_into(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [view], offset)
        os.lseek(self._fd, offset, os.SEEK_SET)
        chunk = os.read(self._fd, len(view))
        view[: len(chunk)] = chunk
        return len(chunk)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class QuantizedLayout:
    """How a quantized tensor arrives: its format, the dtype of its scales, whether groups have offsets."""

    format: GroupedQuantFormat
    scale_dtype: np.dtype[Any]
    has_offsets: bool


Rows = np.ndarray | GroupedQuantRows


@dataclass(frozen=True)
class CheckpointTensor(ABC):
    """A tensor in a file. ``storage`` is its type as the format spells it: ``BF16``, ``Q4_1``.

    ``dtype`` is the NumPy dtype of a dense tensor, ``layout`` describes a quantized one; the other is
    None. Rows are the first axis of tensors with two axes or more; a vector or scalar is one row.
    """

    name: str
    shape: tuple[int, ...]
    storage: str

    dtype: np.dtype[Any] | None = field(init=False, default=None)
    layout: QuantizedLayout | None = field(init=False, default=None)

    @property
    def row_count(self) -> int:
        """How many rows there are to read."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return self.row_count * self.row_bytes

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop``: dense as ``[stop - start, ...]`` in ``dtype``, else grouped-quantized."""

    def read(self) -> Rows:
        """The whole tensor; a dense one in its own shape."""
        rows = self.read_rows(0, self.row_count)
        return rows.reshape(self.shape) if isinstance(rows, np.ndarray) else rows

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, Rows]]:
        """All rows in order, as ``(first row, rows)`` of about ``chunk_bytes`` of file each."""
        step = max(1, chunk_bytes // self.row_bytes) if self.row_bytes else max(1, self.row_count)
        for start in range(0, self.row_count, step):
            yield start, self.read_rows(start, min(start + step, self.row_count))


@dataclass(frozen=True)
class DenseTensor(CheckpointTensor):
    """A tensor whose values lie in the file, row-major and little-endian."""

    file: FileBytes
    offset: int
    element: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.element)

    @property
    def row_bytes(self) -> int:
        values = int(np.prod(self.shape[1:], dtype=object)) if len(self.shape) > 1 else 0
        return self.element.itemsize * (values if len(self.shape) > 1 else (self.shape[0] if self.shape else 1))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        raw = self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        inner = self.shape[1:] if len(self.shape) > 1 else self.shape
        return np.frombuffer(raw, self.element).reshape(stop - start, *inner)


@dataclass(frozen=True)
class UnreadableTensor(CheckpointTensor):
    """A tensor in a type that is not read. It is listed, and an error only when something needs it."""

    why: str

    @property
    def row_bytes(self) -> int:
        return 0

    def read_rows(self, start: int, stop: int) -> Rows:
        raise CheckpointError(self.why)


@dataclass(frozen=True)
class ArrayTensor(CheckpointTensor):
    """A tensor in memory, for writers: dense rows of ``shape``, or quantized rows with their layout."""

    rows: Rows
    quantized: QuantizedLayout | None = None

    def __post_init__(self) -> None:
        dense = isinstance(self.rows, np.ndarray)
        if dense != (self.quantized is None):
            raise ValueError(f"{self.name}: a layout belongs to quantized rows, and only to them")
        object.__setattr__(self, "dtype", self.rows.dtype if isinstance(self.rows, np.ndarray) else None)
        object.__setattr__(self, "layout", self.quantized)

    @property
    def row_bytes(self) -> int:
        parts = [self.rows] if isinstance(self.rows, np.ndarray) else [self.rows.codes, self.rows.scales]
        return sum(part.nbytes for part in parts) // max(1, self.row_count)

    def read_rows(self, start: int, stop: int) -> Rows:
        if isinstance(self.rows, np.ndarray):
            return (self.rows if len(self.shape) > 1 else self.rows.reshape(1, *self.shape))[start:stop]
        return _take(self.rows, slice(start, stop))


@dataclass(frozen=True)
class ReorderedTensor(CheckpointTensor):
    """Another tensor's rows in another order (or a part of them), exact on quantized rows too."""

    source: CheckpointTensor
    order: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.source.dtype)
        object.__setattr__(self, "layout", self.source.layout)

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> Rows:
        if len(self.shape) == 1:
            return _take(self.source.read_rows(start, stop), (slice(None), self.order))
        wanted = self.order[start:stop]
        if not len(wanted):
            return self.source.read_rows(0, 0)
        # Published orders mix rows within a head, so the span is about as long as the rows wanted.
        low, high = int(wanted.min()), int(wanted.max()) + 1
        if high - low <= 2 * len(wanted):
            return _take(self.source.read_rows(low, high), wanted - low)
        return _concatenate([self.source.read_rows(int(row), int(row) + 1) for row in wanted])


def reorder_rows(tensor: CheckpointTensor, order: np.ndarray) -> CheckpointTensor:
    """``tensor`` with row ``order[i]`` in place ``i``; a vector is reordered by its elements."""
    shape = (len(order), *tensor.shape[1:])
    return ReorderedTensor(tensor.name, shape, tensor.storage, tensor, order)


def _take(rows: Rows, index: Any) -> Rows:
    if isinstance(rows, np.ndarray):
        return rows[index]
    offsets = rows.offsets[index] if rows.has_offsets else rows.offsets
    return GroupedQuantRows(rows.codes[index], rows.scales[index], offsets)


def _concatenate(parts: list[Rows]) -> Rows:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate([p for p in parts if isinstance(p, np.ndarray)])
    quantized = [p for p in parts if isinstance(p, GroupedQuantRows)]
    return GroupedQuantRows(
        np.concatenate([p.codes for p in quantized]),
        np.concatenate([p.scales for p in quantized]),
        np.concatenate([p.offsets for p in quantized]) if quantized[0].has_offsets else quantized[0].offsets,
    )


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    ``format`` is ``gguf`` or ``safetensors``; ``files`` are its weight files; ``config`` is the content
    of ``config.json`` (empty where there is none) and ``metadata`` what a GGUF header says. ``notes`` are
    sentences on what a reader had to decide or found odd, to be shown to whoever inspects the file.
    """

    path: Path
    format: str
    tensors: Mapping[str, CheckpointTensor]
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
