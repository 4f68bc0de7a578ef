"""The reader of WebDataset shards: tar files in which the members of one name are one sample.

Format: https://github.com/webdataset/webdataset, "The WebDataset Format". The name goes to the first dot of the last
part of the path; what follows is the field.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from intaglio.trainer.data.records import READ_ERRORS, SAMPLE_NAME, Damage, Offset, Record, StreamReader, open_bytes

# All of these are also found under the field "image".
PICTURES = ("png", "jpg", "jpeg", "webp")
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)\Z")


@dataclass(frozen=True)
class WebDatasetReader(StreamReader):
    """Samples as ``{"__key__": name, "png": bytes, "txt": text, "cls": number, "json": value, "npy": array}``.

    Offsets are the byte of a sample's first header, in the uncompressed tar. Members of other kinds are passed over.
    """

    files: tuple[Path, ...]

    def records(self, shard: int, start: Offset | None = None) -> Iterator[tuple[Offset, Record | Damage]]:
        first, key = 0, ""
        parts: dict[str, bytes] = {}
        for member in _members(self.files[shard], start[0] if start else 0):
            # A sample of which one member is damaged is lost.
            spoilt = member.damage is not None and member.key == key
            if parts and (member.key != key or spoilt):
                if not spoilt:
                    yield (first,), self._sample(shard, first, key, parts)
                parts = {}
            if member.damage is not None:
                yield (first if spoilt else member.place,), member.damage
                continue
            if not parts:
                first, key = member.place, member.key
            parts[member.field] = member.content
        if parts:
            yield (first,), self._sample(shard, first, key, parts)

    def where(self, shard: int, offset: Offset) -> str:
        return f"{self.files[shard]}, byte {offset[0]}"

    def _sample(self, shard: int, first: int, key: str, parts: dict[str, bytes]) -> Record | Damage:
        record: Record = {SAMPLE_NAME: key}
        for field, content in parts.items():
            try:
                record[field] = _decoded(field, content)
            except (ValueError, RecursionError, EOFError) as error:
                return Damage(f"{self.where(shard, (first,))}: {key}.{field}", f"is no {field} ({error})")
            if field in PICTURES:
                record["image"] = content
        return record


@dataclass(frozen=True)
class _Member:
    """A file of a tar, ``place`` the byte of its header; with ``damage``, what is known of it."""

    place: int
    key: str = ""
    field: str = ""
    content: bytes = b""
    damage: Damage | None = None


def _members(path: Path, start: int) -> Iterator[_Member]:
    """The files of a tar from the header at byte ``start`` on; after damage it goes on with the next whole header."""
    with open_bytes(path) as file:
        place: int | None = start
        while place is not None:
            place = yield from _members_until_damage(path, file, place)


def _members_until_damage(path: Path, file: BinaryIO, start: int) -> Generator[_Member, None, int | None]:
    """Returns the byte of the header to go on with; None at the end."""
    place, key = start, ""
    try:
        file.seek(start)
        tar = tarfile.TarFile(fileobj=file, mode="r")
        while (member := tar.next()) is not None:
            # The module would keep them all.
            tar.members.clear()  # type: ignore[attr-defined]
            place, key = member.offset, ""
            name = _NAME.match(member.name)
            if not member.isfile() or name is None:
                continue
            key = name[1]
            content = tar.extractfile(member)
            assert content is not None, "it is a file"
            yield _Member(place, key, name[2].lower(), content.read())
        # The module stops at a damaged header without a word.
        place, key = tar.offset, ""
        file.seek(place)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) == tarfile.BLOCKSIZE and not any(block):
            return None
        reason = "is no tar header" if block else "ends without the zero block that closes a tar; it is cut short"
    except tarfile.TarError as error:
        reason = f"is damaged ({error})"
    except READ_ERRORS as error:
        yield _Member(place, key, damage=Damage(f"{path}, byte {place}", f"cannot be read from here on ({error})"))
        return None
    yield _Member(place, key, damage=Damage(f"{path}, byte {place}", reason))
    return _next_header(file, place + tarfile.BLOCKSIZE)


def _next_header(file: BinaryIO, place: int) -> int | None:
    """The byte of the first block from ``place`` on that is a tar header by its checksum; None if there is none."""
    try:
        file.seek(place)
        while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
            try:
                tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
            except tarfile.TarError:
                place += tarfile.BLOCKSIZE
                continue
            return place
    except READ_ERRORS:
        pass  # damage that was reported already
    return None


def _decoded(field: str, content: bytes) -> Any:
    kind = field.rpartition(".")[2]
    if kind == "json":
        return json.loads(content.decode("utf-8"))
    if kind == "txt":
        return content.decode("utf-8")
    if kind == "cls":
        return int(content)
    if kind == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    return content
