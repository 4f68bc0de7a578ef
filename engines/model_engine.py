"""The engine of an ONNX file that others wrote: what it holds, how it is opened. Imports no graph library.

model.engines/<target>/engine.json     what it was built from
                       report.json     what the build did
                       model/          the file and its external data, byte for byte, or what was built of them
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.engines.engine import ENGINE_FILE, REPORT_FILE
from intaglio.engines.identity import Identity, compile_command, make_identity
from intaglio.engines.report import Report
from intaglio.engines.target import target_module
from intaglio.errors import EngineError
from intaglio.exporters.bundle import Dim

MODEL_FOLDER = "model"
# What a dim of ONNX can hold at most: such a dim has no maximum of its own.
NO_MAXIMUM = 2**63 - 1


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelTensor(_Schema):
    """An input or output: dtype as NumPy spells it; strings in ``shape`` are dims; None: of unknown rank."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


class ModelInterface(_Schema):
    """Inputs and outputs of a model."""

    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]


class FileRecord(_Schema):
    """A file as it was: its path inside a folder, its hash, and the times that tell whether to hash it again."""

    name: str
    sha256: str
    bytes: int
    mtime_ns: int
    ctime_ns: int


class ModelEngineInfo(_Schema):
    """``engine.json``. ``source`` is the model's path as seen from the engine's folder; ``shapes`` is ``--shapes``.

    ``source_files`` lie beside the source, the graph first; ``files`` in the engine's ``model/``, where ``artifact`` is
    what runs.
    """

    kind: Literal["onnx"] = "onnx"
    target: str
    source: str
    shapes: tuple[str, ...]
    identity: Identity
    interface: ModelInterface
    artifact: str
    source_files: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...]


class OnnxModel:
    """A loaded model: ``run`` takes and gives NumPy arrays by name."""

    def __init__(self, path: Path, info: ModelEngineInfo, **how: Any) -> None:
        self.path, self.info = path, info
        folder = path / MODEL_FOLDER
        self._session = target_module(info.target).load(
            Path(info.source).stem, folder / info.artifact, folder, info.interface, info.identity, **how
        )

    @property
    def inputs(self) -> tuple[ModelTensor, ...]:
        """What ``run`` takes: name, dtype, shape."""
        return self.info.interface.inputs

    @property
    def outputs(self) -> tuple[ModelTensor, ...]:
        """What ``run`` gives."""
        return self.info.interface.outputs

    @property
    def dims(self) -> dict[str, Dim]:
        """The dims of the inputs and their bounds."""
        return self.info.identity.shapes

    def run(self, feeds: Mapping[str, Any], outputs: Collection[str] | None = None) -> dict[str, Any]:
        """Runs the model; ``outputs`` chooses by name (all by default).

        Raises InputError for names, dtypes or shapes that do not fit, EngineError if the run fails.
        """
        return self._session.run(feeds, outputs)


def engines_folder(model: Path) -> Path:
    """Where the engines of ``model.onnx`` lie unless told otherwise: ``model.engines`` beside it."""
    return model.with_name(f"{model.stem}.engines")


def is_model(path: Path) -> bool:
    """Whether ``path`` is meant as an ONNX file: it is a file, or at least called like one."""
    return path.is_file() or (path.suffix.lower() == ".onnx" and not path.is_dir())


def find_model_engine(path: Path, target: str) -> Path | None:
    """The engine's folder for a model, for the folder that holds its engines, or for itself; None for others."""
    if is_model(path):
        return engines_folder(path) / target
    return next((folder for folder in (path, path / target) if is_model_engine(folder)), None)


def is_model_engine(path: Path) -> bool:
    """Whether the folder holds the engine of an ONNX file."""
    return (path / ENGINE_FILE).is_file() and (path / MODEL_FOLDER).is_dir()


def load_model(path: Path, target: str = "cpu", **how: Any) -> OnnxModel:
    """Loads the engine of the ONNX file ``path``, or the engine in the folder ``path``; ``how`` is of the target.

    Its identity is compared with the model (if it is still there) and this machine first. Raises EngineError that
    says what differs and names the command that rebuilds it, InputError, RuntimeMissingError.
    """
    target_module(target)
    folder = find_model_engine(path, target) or path
    if is_model(path) and not path.is_file():
        raise EngineError(f"{path}: no such file; expected an ONNX file")
    if not (folder / ENGINE_FILE).is_file():
        raise EngineError(f"{folder}: no engine there; build it with `intaglio compile {path} --target {target}`")
    info = read_model_engine(folder)
    again = rebuild_command(folder, info)
    if info.target != target:
        raise EngineError(f"{folder}: was built for {info.target}, not for {target}; build with {again}")
    identity = info.identity
    now = make_identity(identity.graph_sha256, identity.weights_sha256, identity.dtype, identity.wanted)
    if identity != now:
        differences = "; ".join(identity.differences(now))
        raise EngineError(f"{folder}: was built from something else ({differences}); build again with {again}")
    source = path if path.is_file() else folder / info.source
    if source.is_file():
        _check_files(source.parent, [info.source_files[0].model_copy(update={"name": source.name})], again)
        _check_files(source.parent, info.source_files[1:], again)
    _check_files(folder / MODEL_FOLDER, info.files, again)
    return OnnxModel(folder, info, **how)


def read_model_engine(folder: Path) -> ModelEngineInfo:
    """Reads ``engine.json``. Raises EngineError."""
    try:
        return ModelEngineInfo.model_validate_json((folder / ENGINE_FILE).read_bytes())
    except (ValidationError, OSError) as error:
        raise EngineError(
            f"{folder / ENGINE_FILE}: is damaged or of another version; compile the model again with `intaglio compile`"
        ) from error


def read_model_report(folder: Path) -> Report:
    """Reads ``report.json``. Raises EngineError."""
    try:
        return Report.model_validate_json((folder / REPORT_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder / REPORT_FILE}: cannot be read ({error})") from error


def rebuild_command(folder: Path, info: ModelEngineInfo) -> str:
    """The command that builds this engine again."""
    source = Path(os.path.normpath(folder / info.source))
    command = compile_command(source, info.target, info.identity, info.shapes)
    if folder.parent != engines_folder(source):
        command += f" -o {shlex.quote(str(folder.parent))}"
    return f"`{command}`"


def record_file(folder: Path, name: str, sha256: str) -> FileRecord:
    """The record of a file whose hash is known."""
    stat = (folder / name).stat()
    return FileRecord(
        name=name, sha256=sha256, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns
    )


def _check_files(folder: Path, records: Collection[FileRecord], again: str) -> None:
    for record in records:
        file = folder / record.name
        if not file.is_file():
            raise EngineError(f"{file}: is missing; build again with {again}")
        if not _is_unchanged(file, record):
            raise EngineError(f"{file}: has changed since the engine was built; build again with {again}")


def _is_unchanged(file: Path, record: FileRecord) -> bool:
    stat = file.stat()
    if stat.st_size != record.bytes:
        return False
    # Any write moves these, so gigabytes are hashed only where a file was copied or touched.
    if (stat.st_mtime_ns, stat.st_ctime_ns) == (record.mtime_ns, record.ctime_ns):
        return True
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == record.sha256
