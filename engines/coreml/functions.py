"""Several packages as one: a function for each, and weights that they share stored once.

Programs are taken as they are; only where a constant lies in the weight file is changed. Weights go from file to file
one by one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from intaglio.engines.coreml.blob_file import DTYPES, RECORD, SENTINEL, BlobFile
from intaglio.engines.coreml.manifest import MODEL, WEIGHTS, write_manifest
from intaglio.engines.coreml.protobuf import model_class
from intaglio.errors import EngineError, InputError

_WEIGHT_FILE = f"{WEIGHTS}/weight.bin"
# MIL's dtypes and their bits by the code in a blob's record.
_DTYPES = {code: (name, bits) for name, (code, bits) in DTYPES.items()}


def merge_functions(packages: Mapping[str, Path], path: Path) -> None:
    """Writes ``path``, a package with one function for each of ``packages``, by name; the first is its default.

    Each of them has one function. Equal weights are stored once; the result is the same to the byte every time. An
    existing package is replaced. Raises InputError for names, EngineError for packages that are damaged.
    """
    if not packages or any(not name.isidentifier() or not name.isascii() for name in packages):
        raise InputError(f"functions of a package have names such as 'main' or 'size_512'; found {list(packages)}")
    merged = model_class()()
    with tempfile.TemporaryDirectory(prefix=".mlpackage-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        weights = made / "Data" / _WEIGHT_FILE
        weights.parent.mkdir(parents=True)
        with BlobFile(weights) as store:
            for name, package in packages.items():
                _add(merged, name, package, store)
        if not store.count:
            shutil.rmtree(weights.parent)
        merged.description.defaultFunctionName = next(iter(packages))
        (made / "Data" / MODEL).write_bytes(merged.SerializeToString(deterministic=True))
        write_manifest(made)
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)


def _add(merged: Any, name: str, package: Path, store: BlobFile) -> None:
    """Adds the only function of a package to a model."""
    model = _read(package)
    (source,) = model.mlProgram.functions
    described = model.description.functions[0] if model.description.functions else model.description
    merged.specificationVersion = max(merged.specificationVersion, model.specificationVersion)
    merged.mlProgram.version = max(merged.mlProgram.version, model.mlProgram.version)
    if not merged.description.functions:
        merged.description.metadata.CopyFrom(model.description.metadata)
        for key, value in model.mlProgram.attributes.items():
            merged.mlProgram.attributes[key].CopyFrom(value)
    merged.description.functions.add(name=name, input=described.input, output=described.output, state=described.state)
    function = merged.mlProgram.functions[name]
    function.CopyFrom(model.mlProgram.functions[source])
    values = [value for block in function.block_specializations.values() for value in _values(block)]
    placed = [value.blobFileValue for value in values if value.WhichOneof("value") == "blobFileValue"]
    moved: dict[int, int] = {}
    # In the order of the file: that of maps in protobuf differs from run to run.
    for offset in sorted({blob.offset for blob in placed}):
        moved[offset] = store.write(*_blob(package / "Data" / _WEIGHT_FILE, offset))
    for blob in placed:
        blob.offset = moved[blob.offset]


def _read(package: Path) -> Any:
    try:
        model = model_class().FromString((package / "Data" / MODEL).read_bytes())
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


def _blob(file: Path, offset: int) -> tuple[str, int, np.ndarray]:
    """MIL's dtype, how many values, and their bytes, of the blob whose record lies at ``offset``."""
    try:
        # Read, not mapped: pages of a map that are touched count as memory that is held.
        record = np.fromfile(file, np.uint8, RECORD.size, offset=offset).tobytes()
        sentinel, code, nbytes, start, padding = RECORD.unpack(record) if len(record) == RECORD.size else (0,) * 5
        if sentinel != SENTINEL or code not in _DTYPES:
            raise EngineError(f"{file}: no blob lies at {offset}. Compile the model again.")
        data = np.fromfile(file, np.uint8, nbytes, offset=start)
    except OSError as error:
        raise EngineError(f"cannot read the weight file {file}: {error}. Compile the model again.") from error
    if len(data) != nbytes:
        raise EngineError(f"{file} ends at {start + len(data)}, a blob goes on. Compile the model again.")
    dtype, bits = _DTYPES[code]
    return dtype, (nbytes * 8 - padding) // bits, data
