"""``compile`` for ONNX files that others wrote: the model, checked and tried, in a folder with its identity."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from pydantic import ValidationError

from intaglio.engines import cache
from intaglio.engines.artifact import files_in
from intaglio.engines.engine import ENGINE_FILE, REPORT_FILE
from intaglio.engines.identity import Identity, make_identity
from intaglio.engines.model_engine import (
    MODEL_FOLDER,
    FileRecord,
    ModelEngineInfo,
    ModelInterface,
    engines_folder,
    is_model_engine,
    record_file,
)
from intaglio.engines.onnx_file import OnnxFile, read_onnx
from intaglio.engines.report import Report, StageReport
from intaglio.engines.target import target_module
from intaglio.engines.wanted import choose
from intaglio.errors import CompileError, InputError
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback

_CHUNK = 1 << 20
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def compile_model(
    model: str | Path,
    target: str = "cpu",
    *,
    output: str | Path | None = None,
    accuracy: str = "exact",
    shapes: str | Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles the ONNX file ``model`` into ``model.engines/<target>/`` beside it, or ``output/<target>/``.

    The engine is whole: of the target cpu it holds the file and its external data (as hard links where the system
    allows). ``shapes`` bounds dims (``NAME=VALUE`` or ``NAME=MIN:OPT:MAX``, comma-separated); several are sets of
    sizes, for targets that have those. ``options`` are the target's own. A model built before, with the same dims,
    options and compiler, is not built again. That the trial run was not possible is said in the report and is no error.
    Raises CompileError, InputError, OutputError if nothing can be written, RuntimeMissingError, CancelledError. A
    failed build leaves the old engine in place.
    """
    path = Path(model)
    module = target_module(target)
    if accuracy != "exact":
        raise InputError(f"accuracy {accuracy!r}: an ONNX file runs as it is written, which is `exact`")
    described = read_onnx(path)
    _check_versions(described)
    wanted = choose(target, described.dims, accuracy, shapes, options or {})
    _check_domains(described, module.DOMAINS, module.compiler())
    _check_interface(described, module.INPUT_DTYPES, target)
    sources = {path.name: path, **_external_sources(described)}
    folder = (engines_folder(path) if output is None else Path(output)) / target
    artifact_name = path.name if module.KEEPS_MODEL else f"{path.stem}{module.SUFFIX}"
    _check_place(folder, artifact_name)
    count = Progress(progress, f"compile for {target}", 1, "stages")
    with replaced_folder(folder) as partial:
        inside = partial / MODEL_FOLDER
        hashes = _place(sources, inside) if module.KEEPS_MODEL else _hashes(sources, inside)
        identity = make_identity(hashes[path.name], _weights_hash(hashes, path.name), _dtype(described), wanted)
        given = frozenset(name for name, dim in wanted.shapes.items() if dim != described.dims[name])
        artifact = inside / artifact_name
        graph = inside / path.name if module.KEEPS_MODEL else path
        built = _build(graph, artifact, described, identity, given, progress)
        info = ModelEngineInfo(
            target=target,
            source=os.path.relpath(path, folder),
            shapes=(shapes,) if isinstance(shapes, str) else tuple(shapes or ()),
            identity=identity,
            interface=ModelInterface(inputs=described.inputs, outputs=described.outputs),
            artifact=artifact.name,
            source_files=_records(path.parent, hashes),
            files=_records(inside, hashes if module.KEEPS_MODEL else _hashes_in(inside)),
        )
        report = Report(target=target, compiler=module.compiler(), stages={path.stem: built}, notes=module.NOTES)
        (partial / ENGINE_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
        (partial / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
        count.advance(1)
    return report


def _build(
    graph: Path,
    artifact: Path,
    described: OnnxFile,
    identity: Identity,
    given: frozenset[str],
    progress: ProgressCallback | None,
) -> StageReport:
    module, key = target_module(identity.target), identity.key()
    cached = cache.fetch_report(key) if module.KEEPS_MODEL else cache.fetch(key, artifact)
    if cached is not None:
        try:
            return StageReport.model_validate({**cached, "from_cache": True})
        except ValidationError:
            if not module.KEEPS_MODEL:
                cache.remove(artifact)  # an entry of another version: build
    report = module.build_model(graph, artifact, described, identity, given, progress)
    content = report.model_dump(exclude={"from_cache"})
    if module.KEEPS_MODEL:
        cache.store_report(key, content)
    else:
        cache.store(key, artifact, content)
    return report


def _check_versions(described: OnnxFile) -> None:
    known = {"ai.onnx": onnx.defs.onnx_opset_version()}
    opset = described.opsets.get("ai.onnx", 0)
    if opset > known["ai.onnx"]:
        raise CompileError(
            f"{described.path}: asks for opset {opset}; onnx {onnx.__version__} knows up to {known['ai.onnx']}. Update "
            "onnx and onnxruntime, or save the model for an older opset"
        )
    if described.ir_version > onnx.IR_VERSION:
        raise CompileError(
            f"{described.path}: has the IR version {described.ir_version}; onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}. Update onnx and onnxruntime, or save the model for an older version"
        )


def _check_domains(described: OnnxFile, domains: frozenset[str], compiler: str) -> None:
    unknown = {domain: ops for domain, ops in described.custom_domains.items() if domain not in domains}
    if unknown:
        listed = "; ".join(f"{domain}: {', '.join(sorted(ops))}" for domain, ops in sorted(unknown.items()))
        raise CompileError(
            f"{described.path}: uses operators of domains that {compiler} does not have and no function of the file "
            f"defines ({listed})"
        )


def _check_interface(described: OnnxFile, dtypes: frozenset[str], target: str) -> None:
    if not described.outputs:
        raise CompileError(f"{described.path}: has no outputs, so that there is nothing to compute")
    for what, tensors in (("input", described.inputs), ("output", described.outputs)):
        for tensor in tensors:
            if tensor.dtype not in dtypes:
                raise CompileError(
                    f"{described.path}: the {what} {tensor.name!r} is {tensor.dtype}, which an engine for {target} "
                    f"does not take or give; expected {', '.join(sorted(dtypes))}. Cast it in the model"
                )


def _external_sources(described: OnnxFile) -> dict[str, Path]:
    """The external files by location, each with the file it leads to. Raises CompileError."""
    path, sources = described.path, {}
    # A download cache keeps the files elsewhere and links to them, graph and data alike.
    roots = (path.parent.resolve(), path.resolve().parent)
    for location, needed in described.external_files.items():
        file = path.parent / location
        real = file.resolve()
        if location == path.name:
            raise CompileError(f"{path}: names itself as its external data")
        if not any(real.is_relative_to(root) for root in roots):
            raise CompileError(f"{file}: external data that links to {real}, outside the model's folder")
        if not real.is_file():
            raise CompileError(f"{file}: external data is missing; expected it beside {path.name}")
        if real.stat().st_size < needed:
            raise CompileError(
                f"{file}: has {real.stat().st_size} bytes, but the tensors in {path.name} need {needed}; it is cut "
                "short or belongs to another file"
            )
        sources[location] = real
    return sources


def _check_place(folder: Path, artifact: str) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not is_model_engine(folder)):
        raise CompileError(f"{folder}: is there already and is no engine of an ONNX file; choose another folder (-o)")
    if is_model_engine(folder) and not (folder / MODEL_FOLDER / artifact).exists():
        raise CompileError(f"{folder}: holds the engine of another model; choose another folder (-o)")


def _place(sources: dict[str, Path], folder: Path) -> dict[str, str]:
    """Puts the files into ``folder`` and returns their hashes. The first, the graph, is always a copy."""
    hashes: dict[str, str] = {}
    try:
        for name, source in sources.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if hashes and _link(source, target):
                hashes[name] = _hash(target)
            else:
                hashes[name] = _copy(source, target)
    except OSError as error:
        raise CompileError(f"{error.filename or folder}: cannot be copied ({error.strerror})") from error
    return hashes


def _hashes(sources: dict[str, Path], folder: Path) -> dict[str, str]:
    """The files' hashes, where they stay where they are; makes ``folder`` for what is built of them."""
    folder.mkdir(parents=True)
    return {name: _hash(source) for name, source in sources.items()}


def _hashes_in(folder: Path) -> dict[str, str]:
    """The hash of each file in a folder and below, by its path."""
    return {file.relative_to(folder).as_posix(): _hash(file) for file in files_in(folder)}


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CompileError(f"{file}: cannot be read ({error.strerror})") from error


def _link(source: Path, target: Path) -> bool:
    # A file that may not be written could not be synced to disk either.
    if not os.access(source, os.W_OK):
        return False
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        return False
    return True


def _copy(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
    shutil.copystat(source, target)
    target.chmod(0o644)
    return digest.hexdigest()


def _records(folder: Path, hashes: dict[str, str]) -> tuple[FileRecord, ...]:
    return tuple(record_file(folder, name, sha256) for name, sha256 in hashes.items())


def _weights_hash(hashes: dict[str, str], graph: str) -> str:
    lines = sorted(f"{sha256} {name}\n" for name, sha256 in hashes.items() if name != graph)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _dtype(described: OnnxFile) -> str:
    """The float type that most weights have: what the model computes in."""
    counts = {dtype: sum(_count(w.shape) for w in described.weights if w.dtype == dtype) for dtype in _FLOATS}
    inputs = [t.dtype for t in (*described.inputs, *described.outputs) if t.dtype in _FLOATS]
    if any(counts.values()):
        return max(_FLOATS, key=lambda dtype: counts[dtype])
    return inputs[0] if inputs else "float32"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
