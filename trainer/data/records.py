"""Records, and the two ways in which readers go over them: by number, or in order from a place.

A reader holds paths and sizes, never contents. Places are plain integers, so that a cursor can be saved.
"""

from __future__ import annotations

import gzip
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from intaglio.errors import DataError

# Values by the name of their field: text, numbers, bytes of a picture, arrays, lists and mappings of these.
Record = dict[str, Any]

# The field with the name that a record has in its file, such as that of members of a tar.
SAMPLE_NAME = "__key__"
# Where a record begins in its file, in the reader's own terms: a byte, a row group and a row.
Offset = tuple[int, ...]


@dataclass(frozen=True)
class Damage:
    """Records that cannot be read: ``where`` names file and place, ``records`` says how many are lost."""

    where: str
    reason: str
    records: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class IndexedReader(ABC):
    """A reader that finds any record by its number, so that shuffling is a permutation of all of them."""

    # What the data is made of, for the fingerprint.
    files: tuple[Path, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, index: int) -> Record:
        """Record ``index``. Raises DataError, which names no place."""

    @abstractmethod
    def where(self, index: int) -> str:
        """File and place of record ``index``, for messages."""


class StreamReader(ABC):
    """A reader that goes over each of its files (shards) from any place on."""

    files: tuple[Path, ...]

    @property
    def shards(self) -> int:
        """How many parts can be read in any order."""
        return len(self.files)

    @abstractmethod
    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        """What lies in file ``shard``, each with its offset, beginning with that at the offset ``start``.

        From the same start always come the same items. Damage takes the place of what it made unreadable.
        """

    @abstractmethod
    def where(self, shard: int, offset: Offset) -> str:
        """File and place, for messages."""


# What reading a damaged file raises, compressed or not.
READ_ERRORS = (OSError, EOFError, zlib.error)


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file, through gzip where it is compressed: offsets are then those of its content."""
    if is_gzip(path):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def is_gzip(path: Path) -> bool:
    """Whether the file begins as gzip does. Raises DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


class PositionedFile:
    """Reads a file at given places. Not mapped: mapped pages count as memory of the process.

    It is opened in each process that reads it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._file: BinaryIO | None = None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises DataError where the file is shorter than it was, or cannot be read."""
        try:
            if self._file is None:
                self._file = self.path.open("rb", buffering=0)
            content = os.pread(self._file.fileno(), nbytes, offset)
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror})") from error
        if len(content) != nbytes:
            raise DataError(f"ends at byte {offset + len(content)}, expected {self.size} bytes; was it changed?")
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self._file.close()  # type: ignore[union-attr]


def find_files(root: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files below ``root`` that each pattern (a path or a glob) names, sorted within a pattern.

    Raises DataError for a pattern that names none, and for a file that is named twice.
    """
    found: list[Path] = []
    for pattern in patterns:
        base, relative = (Path(pattern).anchor, pattern) if Path(pattern).is_absolute() else (root, pattern)
        path = Path(base) / relative
        if path.is_file():
            matches = [path]
        else:
            matches = sorted(match for match in Path(base).glob(str(path.relative_to(base))) if match.is_file())
        if not matches:
            raise DataError(f"{path}: names no file; expected a file or a pattern such as data/*.jsonl")
        found += matches
    if len(set(found)) != len(found):
        twice = next(path for path in found if found.count(path) > 1)
        raise DataError(f"{twice}: is named twice by {list(patterns)}; its records would be seen twice an epoch")
    return tuple(found)
