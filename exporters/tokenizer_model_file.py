"""Reads the SentencePiece model file (`tokenizer.model`) of a checkpoint.

The file is a protocol buffer. Only the fields that decide how text is encoded are declared here; `protobuf`
skips the others. Source: SentencePiece `src/sentencepiece_model.proto` for field numbers and defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
)

from intaglio.errors import CheckpointError, ConfigError
from intaglio.exporters.tokenizer_files import BYTE, NORMAL
from intaglio.exporters.tokenizer_sentencepiece import SentencePieces

# The largest published ones, of 256,000 pieces, are below 5 MB.
_LARGEST_FILE = 8 << 20
_MOST_PIECES = 1 << 19

_MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}
_BPE = 2

# message -> field -> number, type, default
_FIELDS: Mapping[str, Mapping[str, tuple[int, str, str | None]]] = {
    "Piece": {"piece": (1, "bytes", None), "score": (2, "float", None), "type": (3, "int32", "1")},
    "Trainer": {
        "model_type": (3, "int32", "1"),
        "treat_whitespace_as_suffix": (24, "bool", "false"),
        "byte_fallback": (35, "bool", "false"),
        "bos_id": (41, "int32", "1"),
        "eos_id": (42, "int32", "2"),
        "pad_id": (43, "int32", "-1"),
    },
    "Normalizer": {
        "name": (1, "bytes", None),
        "precompiled_charsmap": (2, "bytes", None),
        "add_dummy_prefix": (3, "bool", "true"),
        "remove_extra_whitespaces": (4, "bool", "true"),
        "escape_whitespaces": (5, "bool", "true"),
    },
    # The pieces stay bytes, which takes less room, and lets a message say which one is damaged.
    "Model": {
        "pieces": (1, "repeated bytes", None),
        "trainer": (2, "Trainer", None),
        "normalizer": (3, "Normalizer", None),
        "denormalizer": (5, "Normalizer", None),
    },
}


@dataclass(frozen=True)
class ModelFile:
    """A SentencePiece BPE model, and the ids of its special pieces, None where it has none."""

    model: SentencePieces
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


def read_model_file(path: Path) -> ModelFile:
    """Reads a SentencePiece model file.

    Raises CheckpointError for a damaged file, and ConfigError for a model that is not BPE or that rewrites
    text (a character map, joined spaces, spaces as suffixes).
    """
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise CheckpointError(
            f"{path}: is larger than {_LARGEST_FILE >> 20} MiB; expected a SentencePiece model, which takes a few."
        )
    try:
        found = _parse("Model", content)
    except message.DecodeError as error:
        raise CheckpointError(
            f"{path}: not a SentencePiece model, or cut off ({error}). Get the file again (a clone without "
            "Git LFS leaves a text file in its place)."
        ) from error
    if not 0 < len(found.pieces) <= _MOST_PIECES:
        raise CheckpointError(
            f"{path}: holds {len(found.pieces)} pieces; expected 1 to {_MOST_PIECES}, as a SentencePiece model has. "
            "Get the file again."
        )
    _refuse_what_is_not_read(found, path)
    pieces, scores, types = [], [], []
    for index, encoded in enumerate(found.pieces):
        try:
            piece = _parse("Piece", encoded)
            pieces.append(piece.piece.decode("utf-8"))
        except (message.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: piece {index} is damaged ({error}). Get the file again.") from error
        if not NORMAL <= piece.type <= BYTE:
            raise CheckpointError(f"{path}: piece {index} is of type {piece.type}; expected 1 (normal) to 6 (byte).")
        scores.append(piece.score)
        types.append(piece.type)
    return ModelFile(
        SentencePieces(pieces, scores, types, found.trainer.byte_fallback, found.normalizer.add_dummy_prefix),
        *(_special_id(found.trainer, name, len(pieces), path) for name in ("bos_id", "eos_id", "pad_id")),
    )


def _refuse_what_is_not_read(found: Any, path: Path) -> None:
    kind = found.trainer.model_type
    if kind != _BPE:
        raise ConfigError(
            f"{path}: is a SentencePiece model of type {_MODEL_TYPES.get(kind, kind)}; only BPE is read. Export "
            "from a directory with a tokenizer.json."
        )
    refused = {
        "its normalizer rewrites characters "
        f"({found.normalizer.name.decode('utf-8', 'replace') or 'unnamed'})": found.normalizer.precompiled_charsmap,
        "its denormalizer rewrites characters": found.denormalizer.precompiled_charsmap,
        "remove_extra_whitespaces is true": found.normalizer.remove_extra_whitespaces,
        "escape_whitespaces is false": not found.normalizer.escape_whitespaces,
        "treat_whitespace_as_suffix is true": found.trainer.treat_whitespace_as_suffix,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ConfigError(
                f"{path}: {what}; only SentencePiece models that keep text as it is are read. Export from a "
                "directory with a tokenizer.json."
            )


def _special_id(trainer: Any, name: str, count: int, path: Path) -> int | None:
    index = getattr(trainer, name)
    if index >= count:
        raise CheckpointError(f"{path}: {name} is {index}; expected an id below {count}, or -1. Get the file again.")
    return None if index < 0 else index


def _parse(name: str, content: bytes) -> Any:
    parsed = _message_classes()[name]()
    parsed.MergeFromString(content)
    return parsed


@functools.cache
def _message_classes() -> dict[str, Any]:
    field_proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="intaglio/sentencepiece.proto", package="intaglio", syntax="proto2")
    for name, fields in _FIELDS.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            label = field_proto.LABEL_REPEATED if kind.startswith("repeated ") else field_proto.LABEL_OPTIONAL
            entry = declared.field.add(name=field, number=number, label=label)
            if kind in _FIELDS:
                entry.type, entry.type_name = field_proto.TYPE_MESSAGE, f".intaglio.{kind}"
            else:
                entry.type = field_proto.Type.Value(f"TYPE_{kind.removeprefix('repeated ').upper()}")
            if default is not None:
                entry.default_value = default
    # A pool of its own: two libraries that declare a file of the same name in the common one clash.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"intaglio.{name}")) for name in _FIELDS}
