"""Readers of text files with a record a line: JSONL and CSV, plain or through gzip."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from intaglio.errors import DataError
from intaglio.trainer.data.records import READ_ERRORS, Damage, Offset, Record, StreamReader, open_bytes

# A longer line is no document, but a file of something else.
_MAX_LINE = 64 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonlReader(StreamReader):
    """An object a line. Offsets are byte and line; empty lines are passed over."""

    files: tuple[Path, ...]

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        with closing(_Lines(self.files[shard], start or (0, 0))) as lines:
            for offset, raw in lines:
                if isinstance(raw, Damage):
                    yield offset, raw
                elif not raw.isspace():
                    yield offset, self._parsed(shard, offset, raw)

    def where(self, shard: int, offset: Offset) -> str:
        return f"{self.files[shard]}, line {offset[1] + 1}"

    def _parsed(self, shard: int, offset: Offset, raw: bytes) -> Record | Damage:
        try:
            record = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            return Damage(self.where(shard, offset), f"is not JSON in UTF-8 ({error})")
        if not isinstance(record, dict):
            return Damage(self.where(shard, offset), f"is a JSON {type(record).__name__}, expected an object")
        return record


@dataclass(frozen=True)
class CsvReader(StreamReader):
    """A record a row, named by the first row; all values are text. Offsets are byte and line of the row's start."""

    files: tuple[Path, ...]
    delimiter: str = ","

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        # Documents are longer than the 128 KiB that the module allows at first.
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_LINE))
        with closing(_Lines(self.files[shard], (0, 0))) as lines:
            yield from self._rows(shard, lines, start)

    def where(self, shard: int, offset: Offset) -> str:
        return f"{self.files[shard]}, line {offset[1] + 1}"

    def _rows(self, shard: int, lines: _Lines, start: Offset | None) -> Iterator[tuple[Offset, Record | Damage]]:
        text = _Text(lines)
        try:
            names = next(csv.reader(text, delimiter=self.delimiter, strict=True), None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self.files[shard]}: its first row is not CSV in UTF-8 ({error})") from error
        if names is None:
            return
        if len(set(names)) != len(names):
            raise DataError(f"{self.files[shard]}: its first row names a column twice: {names}")
        if start is not None:
            lines.seek(start)
        rows = csv.reader(text, delimiter=self.delimiter, strict=True)
        while True:
            offset = lines.next_offset
            try:
                row = next(rows, None)
            except (csv.Error, UnicodeDecodeError) as error:
                yield offset, Damage(self.where(shard, offset), f"is not CSV in UTF-8 ({error})")
                # What the parser took of a row that it then refused would be put before the next.
                rows = csv.reader(text, delimiter=self.delimiter, strict=True)
                continue
            if text.damage is not None:
                yield offset, text.damage
                return
            if row is None:
                return
            if len(row) == len(names):
                yield offset, dict(zip(names, row, strict=True))
            elif row:  # the module makes an empty list of an empty line
                reason = f"has {len(row)} fields, and the first row names {len(names)}"
                yield offset, Damage(self.where(shard, offset), reason)


class _Lines:
    """The lines of a file as bytes, each with its offset: byte and number. A file that cannot be read on ends it."""

    def __init__(self, path: Path, start: Offset) -> None:
        self._path = path
        self._file: BinaryIO = open_bytes(path)
        self.seek(start)

    def seek(self, start: Offset) -> None:
        self._start: Offset | None = start
        self.next_offset: Offset = start

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[tuple[Offset, bytes | Damage]]:
        return self

    def __next__(self) -> tuple[Offset, bytes | Damage]:
        offset = self.next_offset
        byte, number = offset
        if byte < 0:
            raise StopIteration
        try:
            if self._start is not None:
                self._file.seek(byte)
                self._start = None
            raw = self._file.readline(_MAX_LINE)
        except READ_ERRORS as error:
            return self._end(offset, f"cannot be read from here on ({error})")
        if len(raw) == _MAX_LINE:
            return self._end(offset, f"is longer than {_MAX_LINE} bytes, so the rest of the file is not read")
        if not raw:
            raise StopIteration
        self.next_offset = (byte + len(raw), number + 1)
        return offset, raw.removeprefix(_BOM) if byte == 0 else raw

    def _end(self, offset: Offset, reason: str) -> tuple[Offset, Damage]:
        self.next_offset = (-1, -1)
        return offset, Damage(f"{self._path}, line {offset[1] + 1}", reason)


class _Text:
    """Lines as text for the csv module, which may take several for a row."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self.damage: Damage | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        _, raw = next(self._lines)
        if isinstance(raw, Damage):
            self.damage = raw
            raise StopIteration
        return raw.decode("utf-8")
