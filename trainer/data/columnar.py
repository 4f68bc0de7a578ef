"""Readers of Parquet and of Arrow files (Feather 2, and the stream format), through pyarrow, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.errors import DataError, RuntimeMissingError
from intaglio.trainer.data.records import Damage, Offset, Record, StreamReader

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

# Rows that are turned into Python values at once: so many, or what takes about so many bytes.
_ROWS = 256
_BYTES = 4 << 20


@dataclass(frozen=True)
class ParquetReader(StreamReader):
    """``columns`` None reads all. Offsets are row group and row in it; checksums of pages are checked where given."""

    files: tuple[Path, ...]
    columns: tuple[str, ...] | None = None

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        parquet = _pyarrow("parquet")
        path = self.files[shard]
        try:
            file = parquet.ParquetFile(path, page_checksum_verification=True, buffer_size=1 << 20)
        except (_pyarrow().ArrowException, OSError, ValueError) as error:
            yield (0, 0), Damage(str(path), f"is damaged or no Parquet file ({_reason(error)})")
            return
        with file:
            columns = _chosen(path, file.schema_arrow.names, self.columns)
            group, row = start or (0, 0)
            for number in range(group, file.num_row_groups):
                yield from self._group(file, shard, number, row if number == group else 0, columns)

    def where(self, shard: int, offset: Offset) -> str:
        return f"{self.files[shard]}, row group {offset[0]}, row {offset[1]}"

    def _group(
        self, file: Any, shard: int, group: int, first: int, columns: list[str]
    ) -> Iterator[tuple[Offset, Record | Damage]]:
        row = 0
        metadata = file.metadata.row_group(group)
        # A group can hold gigabytes; this reads it page by page.
        count = _at_once(metadata.total_byte_size, metadata.num_rows)
        batches = file.iter_batches(count, row_groups=[group], columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                records = [] if batch is None else _rows(batch, first - row)
            except (_pyarrow().ArrowException, OSError, ValueError) as error:
                where = self.where(shard, (group, row))
                yield (group, row), Damage(where, f"is damaged ({_reason(error)})", metadata.num_rows - row)
                return
            if batch is None:
                return
            end = row + batch.num_rows
            yield from _numbered(group, end, records)
            row = end


@dataclass(frozen=True)
class ArrowReader(StreamReader):
    """Arrow IPC files and streams. ``columns`` None reads all. Offsets are record batch and row in it."""

    files: tuple[Path, ...]
    columns: tuple[str, ...] | None = None

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        path = self.files[shard]
        arrow = _pyarrow()
        try:
            source = arrow.OSFile(str(path))
        except OSError as error:
            yield (0, 0), Damage(str(path), f"cannot be read ({_reason(error)})")
            return
        with source:
            try:
                file, is_file = self._opened(source, path)
            except (arrow.ArrowException, OSError, ValueError) as error:
                yield (0, 0), Damage(str(path), f"is damaged or no Arrow file ({_reason(error)})")
                return
            first, row = start or (0, 0)
            number = first if is_file else 0
            while True:
                try:
                    if is_file:
                        batch = file.get_batch(number) if number < file.num_record_batches else None
                    else:
                        batch = next(iter(file), None)
                    if batch is not None and number >= first:
                        # Damage in a batch shows when its values are made.
                        batch.validate(full=True)
                except (arrow.ArrowException, OSError, ValueError) as error:
                    if number >= first:
                        yield (number, 0), Damage(self.where(shard, (number, 0)), f"is damaged ({_reason(error)})")
                    if not is_file:
                        return  # where the next batch begins is not known
                    number += 1
                    continue
                if batch is None:
                    return
                begin = row if number == first else 0
                count = _at_once(batch.nbytes, batch.num_rows)
                for i in range(begin if number >= first else batch.num_rows, batch.num_rows, count):
                    piece = batch.slice(i, count)
                    yield from _numbered(number, i + piece.num_rows, _rows(piece, 0))
                number += 1

    def where(self, shard: int, offset: Offset) -> str:
        return f"{self.files[shard]}, record batch {offset[0]}, row {offset[1]}"

    def _opened(self, source: Any, path: Path) -> tuple[Any, bool]:
        """A reader of the IPC file, or else stream, and which it is."""
        ipc = _pyarrow("ipc")
        magic = source.read(6)
        source.seek(0)
        is_file = magic == b"ARROW1"
        opened = ipc.open_file if is_file else ipc.open_stream
        schema = opened(source).schema
        chosen = _chosen(path, schema.names, self.columns)
        source.seek(0)
        fields = [schema.names.index(name) for name in chosen]
        return opened(source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False)), is_file


def _numbered(group: int, end: int, records: list[Record]) -> Iterator[tuple[Offset, Record]]:
    """Records with their offsets; the last lies before row ``end``."""
    first = end - len(records)
    for i, record in enumerate(records):
        yield (group, first + i), record


def _at_once(nbytes: int, rows: int) -> int:
    return max(1, min(_ROWS, _BYTES * rows // max(nbytes, 1)))


def _rows(batch: pa.RecordBatch, skip: int) -> list[Record]:
    """The rows of a record batch as Python values, without the first ``skip``."""
    return batch.slice(min(skip, batch.num_rows)).to_pylist() if skip > 0 else batch.to_pylist()


def _chosen(path: Path, names: list[str], columns: tuple[str, ...] | None) -> list[str]:
    if columns is None:
        return names
    # What follows a dot may be the name of a part.
    chosen = [name if name in names else name.split(".")[0] for name in columns]
    if missing := [name for name in chosen if name not in names]:
        raise DataError(f"{path}: has no column {missing[0]!r}; it has {', '.join(names)}. Name one of these")
    return list(dict.fromkeys(chosen))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _pyarrow(module: str | None = None) -> Any:
    """pyarrow or a module of it. Raises RuntimeMissingError saying how to install it."""
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise RuntimeMissingError(
            f"pyarrow, which reads Parquet and Arrow, cannot be imported ({error}). Install it: pip install pyarrow"
        ) from error
