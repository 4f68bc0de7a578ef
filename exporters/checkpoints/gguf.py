"""GGUF files, versions 2 and 3, little-endian, whole or split into parts.

The container is read here: the stock reader refuses a whole file for one tensor type that it does not
know, and maps the file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf_type42
from intaglio.exporters.checkpoints.gguf_blocks import (
    BLOCK_TYPES,
    DENSE_TYPES,
    TYPES,
    BlockTensor,
    OpaqueTensor,
    StoredTensor,
)
from intaglio.exporters.checkpoints.gguf_header import MAGIC, GgufMetadata, Header, TensorEntry, read_header
from intaglio.exporters.checkpoints.tensors import (
    Checkpoint,
    CheckpointTensor,
    DenseTensor,
    FileBytes,
    UnreadableTensor,
)

__all__ = ["MAGIC", "GgufMetadata", "open_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def open_gguf(path: Path) -> Checkpoint:
    """Reads the header of a GGUF file, or of all parts of a split one when ``path`` is any of them.

    Numeric arrays of the metadata are NumPy arrays, other arrays are lists; the metadata of a split file is its
    first part's without ``split.*``. Raises CheckpointError when a length, a count or an offset leaves the file,
    before allocating for it, and when the parts are not all there or do not belong together.
    """
    path = Path(path)
    part = _read_part(path)
    count = part.header.metadata.get("split.count", 1)
    if not _is_count(count) or count == 0:
        raise CheckpointError(f"{path}: split.count is {count!r}, expected a number of parts")
    named = _PART_NAME.fullmatch(path.name)
    if count == 1:
        if named is not None and int(named["count"]) > 1:
            raise CheckpointError(
                f"{path}: its name says part {int(named['number'])} of {int(named['count'])}, but it has no "
                "split.count of that many; rename it if it is whole, or fetch the parts again"
            )
        return Checkpoint(path, "gguf", part.tensors, (path,), metadata=part.header.metadata, notes=part.notes)
    if named is None or int(named["count"]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} parts (split.count), so its name must end in -NNNNN-of-{count:05}.gguf; "
            "give the parts their published names, by which the others are found"
        )
    return _join(path, part, named["stem"], count)


@dataclass(frozen=True)
class _Part:
    path: Path
    header: Header
    tensors: dict[str, CheckpointTensor]
    notes: tuple[str, ...]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _join(opened: Path, part: _Part, stem: str, count: int) -> Checkpoint:
    names = [f"{stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    try:
        present = set(os.listdir(opened.parent))
    except OSError as error:
        raise CheckpointError(
            f"{opened.parent}: cannot be listed for the parts of a file ({error.strerror})"
        ) from error
    missing = [name for name in names if name not in present]
    if missing:
        raise CheckpointError(
            f"{opened}: {len(missing)} of {count} parts are missing in {opened.parent}: "
            f"{', '.join(missing[:20])}. Fetch them and try again."
        )
    paths = [opened.with_name(name) for name in names]
    parts = [part if path == opened else _read_part(path) for path in paths]
    tensors: dict[str, CheckpointTensor] = {}
    homes: dict[str, Path] = {}
    for i, (path, each) in enumerate(zip(paths, parts, strict=True)):
        for key, expected in (("split.no", i), ("split.count", count)):
            found = each.header.metadata.get(key)
            if not _is_count(found) or found != expected:
                raise CheckpointError(f"{path}: {key} is {found!r}, expected {expected} by the file's name")
        for name, tensor in each.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: the tensor {name!r} also stands in {homes[name]}")
            tensors[name], homes[name] = tensor, path
    for path, each in zip(paths, parts, strict=True):
        total = each.header.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise CheckpointError(
                f"{path}: split.tensors.count is {total!r}, but the {count} parts hold {len(tensors)} tensors "
                f"({', '.join(f'{len(p.tensors)} in {p.path.name}' for p in parts[:20])})"
            )
    metadata = GgufMetadata(parts[0].header.metadata)
    for key in _SPLIT_KEYS:
        metadata.pop(key, None)
    notes = tuple(dict.fromkeys(note for each in parts for note in each.notes))
    return Checkpoint(opened, "gguf", tensors, tuple(paths), metadata=metadata, notes=notes)


def _read_part(path: Path) -> _Part:
    file = FileBytes(path)
    header = read_header(file)
    storage_42, notes = _resolve_type42(file, header)
    tensors: dict[str, CheckpointTensor] = {}
    for entry in header.entries:
        tensors[entry.name] = _tensor(file, entry, header.data_start, storage_42)
    _check_overlaps(path, tensors.values())
    odd = [entry.name for entry in header.entries if entry.offset % header.alignment]
    if odd:
        notes.append(
            f"{path.name}: {len(odd)} tensors do not start on a multiple of the alignment {header.alignment}, "
            f"first {odd[0]}; other readers may refuse the file"
        )
    return _Part(path, header, tensors, tuple(notes))


def _resolve_type42(file: FileBytes, header: Header) -> tuple[gguf_type42.Resolution | None, list[str]]:
    entries = [entry for entry in header.entries if entry.type_id == gguf_type42.TYPE_ID]
    if not entries:
        return None, []
    starts = sorted({header.data_start + entry.offset for entry in header.entries} | {file.size})
    following = dict(itertools.pairwise(starts))
    extents = []
    for entry in entries:
        start = header.data_start + entry.offset
        if start + entry.values // 128 * 34 > file.size:
            raise CheckpointError(
                f"{file.path}: {entry.name}: type id 42 of shape {list(entry.shape)} at byte {start} leaves the "
                f"file, which has {file.size}; it is cut short or its header lies. Fetch it again."
            )
        extents.append(gguf_type42.Extent(entry.values, start, following.get(start, start) - start))
    resolution = gguf_type42.resolve(file, extents, header.metadata)
    verdict = f"taken as {resolution.storage}" if resolution.storage else "not read"
    return resolution, [f"{file.path.name}: type id 42 ({len(entries)} tensors) is {verdict}: {resolution.why}"]


def _tensor(
    file: FileBytes, entry: TensorEntry, data_start: int, type42: gguf_type42.Resolution | None
) -> CheckpointTensor:
    name, shape = entry.name, entry.shape
    what = f"{file.path}: {name}"
    if entry.type_id == gguf_type42.TYPE_ID and type42 is not None:
        if type42.storage is None:
            why = f"{what}: has the type id 42, which means three layouts; {type42.why}. Say which in the metadata "
            return UnreadableTensor(name, shape, "type 42", why + f"(key {gguf_type42.HINT_KEY})")
        storage = type42.storage
        block_values, block_bytes, _ = gguf_type42.LAYOUTS[storage]
    elif entry.type_id in TYPES:
        storage, block_values, block_bytes = TYPES[entry.type_id]
    else:
        return UnreadableTensor(
            name, shape, f"type {entry.type_id}", f"{what}: has the unknown type id {entry.type_id}"
        )
    if block_values > 1 and (not shape or shape[-1] % block_values):
        raise CheckpointError(f"{what}: {storage} of shape {list(shape)}, whose rows are no multiple of {block_values}")
    offset = data_start + entry.offset
    end = offset + entry.values // block_values * block_bytes
    if end > file.size:
        raise CheckpointError(
            f"{what}: {storage} of shape {list(shape)} lies at bytes {offset} to {end}, but the "
            f"file has {file.size}; it is cut short or its header lies. Fetch it again."
        )
    if storage in DENSE_TYPES:
        return DenseTensor(name, shape, storage, file, offset, DENSE_TYPES[storage])
    stored = (name, shape, storage, file, offset, entry.type_id, block_values, block_bytes)
    if storage in BLOCK_TYPES and len(shape) == 2:
        return BlockTensor(*stored, BLOCK_TYPES[storage])
    read = ", ".join([*DENSE_TYPES, *BLOCK_TYPES])
    why = f"{what}: is stored as {storage} of shape {list(shape)}; read are {read} (blocks in matrices)"
    return OpaqueTensor(*stored, why)


def _check_overlaps(path: Path, tensors: Iterable[CheckpointTensor]) -> None:
    spans = sorted(
        (t.offset, t.offset + t.nbytes, t.name) for t in tensors if isinstance(t, DenseTensor | StoredTensor)
    )
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise CheckpointError(f"{path}: {second} overlaps {first} at byte {begin}")
