"""Several packages as one: a function for each, and weights that they share stored once.

Programs are taken as they are; only where a constant lies in the weight file is changed. Weights go from file to file
in pieces, so that memory holds none of them whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.engines.coreml.manifest import MODEL, WEIGHTS, write_manifest
from intaglio.errors import EngineError, InputError

_WEIGHT_FILE = f"{WEIGHTS}/weight.bin"
_PIECE = 1 << 20
# The weight file: see evaluator/blobs.py.
_HEADER = struct.Struct("<II56x")
_RECORD = struct.Struct("<IIQQQ32x")
_SENTINEL = 0xDEADBEEF
_VERSION = 2
_ALIGNMENT = 64


def merge_functions(packages: Mapping[str, Path], path: Path) -> None:
    """Writes ``path``, a package with one function for each of ``packages``, by name; the first is its default.

    Each of them has one function. Equal weights are stored once; the result is the same to the byte every time. An
    existing package is replaced. Raises InputError for names, EngineError for packages that are damaged.
    """
    if not packages or any(not name.isidentifier() or not name.isascii() for name in packages):
        raise InputError(f"functions of a package have names such as 'main' or 'size_512'; found {list(packages)}")
    import_coremltools()
    from coremltools.proto import Model_pb2

    merged = Model_pb2.Model()
    with tempfile.TemporaryDirectory(prefix=".mlpackage-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        weights = made / "Data" / _WEIGHT_FILE
        weights.parent.mkdir(parents=True)
        with weights.open("w+b") as stream:
            store = _Store(stream)
            for name, package in packages.items():
                _add(merged, name, package, store)
            store.finish()
        merged.description.defaultFunctionName = next(iter(packages))
        (made / "Data" / MODEL).write_bytes(merged.SerializeToString(deterministic=True))
        write_manifest(made)
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)


def _add(merged: Any, name: str, package: Path, store: _Store) -> None:
    """Adds the only function of a package to a model."""
    from coremltools.proto import Model_pb2

    model = _read(package)
    (source,) = model.mlProgram.functions
    description = model.description.functions[0] if model.description.functions else model.description
    merged.specificationVersion = max(merged.specificationVersion, model.specificationVersion)
    merged.mlProgram.version = max(merged.mlProgram.version, model.mlProgram.version)
    if not merged.description.functions:
        merged.description.metadata.CopyFrom(model.description.metadata)
        for key, value in model.mlProgram.attributes.items():
            merged.mlProgram.attributes[key].CopyFrom(value)
    merged.description.functions.append(
        Model_pb2.FunctionDescription(
            name=name, input=description.input, output=description.output, state=description.state
        )
    )
    function = merged.mlProgram.functions[name]
    function.CopyFrom(model.mlProgram.functions[source])
    with _Blobs(package / "Data" / _WEIGHT_FILE) as blobs:
        for block in function.block_specializations.values():
            for value in _values(block):
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.offset = store.offset_of(blobs, value.blobFileValue.offset)


def _read(package: Path) -> Any:
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = Model_pb2.Model.FromString((package / "Data" / MODEL).read_bytes())
    except (OSError, DecodeError) as error:
        raise EngineError(f"{package} is not a Core ML package: {error}. Compile the model again.") from error
    if model.WhichOneof("Type") != "mlProgram" or len(model.mlProgram.functions) != 1:
        raise EngineError(f"{package} holds {len(model.mlProgram.functions)} functions, expected a program with one")
    return model


def _values(block: Any) -> Iterator[Any]:
    """All constants of a block and of those inside it."""
    for operation in block.operations:
        yield from operation.attributes.values()
        for argument in operation.inputs.values():
            yield from (each.value for each in argument.arguments if each.WhichOneof("binding") == "value")
        for inner in operation.blocks:
            yield from _values(inner)


class _Blobs:
    """The weight file of a package, read in pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: BinaryIO | None = None

    def __enter__(self) -> _Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def record(self, offset: int) -> tuple[int, int, int, int]:
        """The dtype of a blob, its bytes, where they begin, and how many bits at the end are padding."""
        packed = self._read(offset, _RECORD.size)
        sentinel, dtype, nbytes, start, padding = _RECORD.unpack(packed)
        if sentinel != _SENTINEL:
            raise EngineError(f"{self.path}: no blob lies at {offset}. Compile the model again.")
        return dtype, nbytes, start, padding

    def pieces(self, start: int, nbytes: int) -> Iterator[bytes]:
        """The bytes, not more than a piece at a time."""
        for at in range(start, start + nbytes, _PIECE):
            yield self._read(at, min(_PIECE, start + nbytes - at))

    def _read(self, offset: int, nbytes: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self.path.open("rb")
            found = os.pread(self._stream.fileno(), nbytes, offset)
        except OSError as error:
            raise EngineError(f"cannot read the weight file {self.path}: {error}. Compile the model again.") from error
        if len(found) != nbytes:
            raise EngineError(f"{self.path} ends at {offset + len(found)}, a blob goes on. Compile the model again.")
        return found


@dataclass
class _Store:
    """A weight file in the making. Blobs are known by what they hold."""

    stream: BinaryIO
    _offsets: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream.write(bytes(_HEADER.size))

    def offset_of(self, blobs: _Blobs, offset: int) -> int:
        """Where a blob of another file lies in this one; it is added if it is new."""
        dtype, nbytes, start, padding = blobs.record(offset)
        digest = hashlib.sha256(struct.pack("<IQQ", dtype, nbytes, padding))
        for piece in blobs.pieces(start, nbytes):
            digest.update(piece)
        key = digest.digest()
        if key not in self._offsets:
            self.stream.write(bytes(-self.stream.tell() % _ALIGNMENT))
            self._offsets[key] = record = self.stream.tell()
            self.stream.write(_RECORD.pack(_SENTINEL, dtype, nbytes, record + _RECORD.size, padding))
            for piece in blobs.pieces(start, nbytes):
                self.stream.write(piece)
        return self._offsets[key]

    def finish(self) -> None:
        """Writes the header: how many blobs there are."""
        self.stream.seek(0)
        self.stream.write(_HEADER.pack(len(self._offsets), _VERSION))
