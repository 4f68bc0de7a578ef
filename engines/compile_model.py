"""``compile`` for ONNX files that others wrote: the model, checked and tried, in a folder with its identity."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
from pydantic import ValidationError

from intaglio.engines import cache
from intaglio.engines.engine import ENGINE_FILE, REPORT_FILE, target_module
from intaglio.engines.identity import make_identity
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
from intaglio.engines.shapes import override_dims
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
    shapes: str | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles the ONNX file ``model`` into ``model.engines/<target>/`` beside it, or ``output/<target>/``.

    The engine is whole: it holds the file and its external data (as hard links where the system allows). ``shapes``
    bounds dims (``NAME=VALUE`` or ``NAME=MIN:OPT:MAX``, comma-separated). A model built before, with the same dims
    and compiler, is not built again. That the trial run was not possible is said in the report and is no error.
    Raises CompileError, InputError, OutputError if nothing can be written, RuntimeMissingError. A failed build leaves
    the old engine in place.
    """
    path = Path(model)
    module = target_module(target)
    if accuracy != "exact":
        raise InputError(f"accuracy {accuracy!r}: an ONNX file runs as it is written, which is `exact`")
    described = read_onnx(path)
    _check_versions(described)
    _check_domains(described, module.DOMAINS, module.compiler())
    _check_interface(described, module.INPUT_DTYPES)
    dims = override_dims(described.dims, shapes)
    sources = {path.name: path, **_external_sources(described)}
    folder = (engines_folder(path) if output is None else Path(output)) / target
    _check_place(folder, path)
    count = Progress(progress, f"compile for {target}", 1, "stages")
    with replaced_folder(folder) as partial:
        hashes = _place(sources, partial / MODEL_FOLDER)
        identity = make_identity(
            target=target,
            graph_sha256=hashes[path.name],
            weights_sha256=_weights_hash(hashes, path.name),
            dtype=_dtype(described),
            accuracy=accuracy,
            dims=dims,
            compiler=module.compiler(),
        )
        info = ModelEngineInfo(
            target=target,
            source=os.path.relpath(path, folder),
            shapes=shapes,
            identity=identity,
            interface=ModelInterface(inputs=described.inputs, outputs=described.outputs),
            source_files=_records(path.parent, hashes),
            files=_records(partial / MODEL_FOLDER, hashes),
        )
        given = frozenset(name for name, dim in dims.items() if dim != described.dims[name])
        built = _build(partial / MODEL_FOLDER / path.name, described, info, given, module)
        report = Report(target=target, compiler=module.compiler(), stages={path.stem: built})
        (partial / ENGINE_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
        (partial / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
        count.advance(1)
    return report


def _build(graph: Path, described: OnnxFile, info: ModelEngineInfo, given: frozenset[str], module: Any) -> StageReport:
    key = info.identity.key()
    cached = cache.fetch_report(key)
    if cached is not None:
        try:
            return StageReport.model_validate({**cached, "from_cache": True})
        except ValidationError:
            pass  # an entry of another version: build
    trial = module.build_model(graph, info.interface, info.identity.shapes, given)
    weight_bytes = sum(weight.nbytes for weight in described.weights)
    weight_count = sum(_count(weight.shape) for weight in described.weights)
    attentions = described.operators.get("Attention", 0)
    report = StageReport(
        dtype=info.identity.dtype,
        accuracy=info.identity.accuracy,
        weight_bytes=weight_bytes,
        weight_count=weight_count,
        bits_per_weight=round(8 * weight_bytes / weight_count, 3) if weight_count else 0.0,
        attention_fused=min(attentions, trial["operators"].get("Attention", 0)),
        attention_total=attentions,
        fallbacks={},
        operators=trial["operators"],
        seconds=trial["seconds"],
        peak_rss_bytes=trial["peak_rss_bytes"],
        trial_sizes=trial["sizes"],
        notes=tuple(trial["notes"]),
    )
    cache.store_report(key, report.model_dump(exclude={"from_cache"}))
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


def _check_interface(described: OnnxFile, dtypes: frozenset[str]) -> None:
    for what, tensors in (("input", described.inputs), ("output", described.outputs)):
        for tensor in tensors:
            if tensor.dtype not in dtypes:
                raise CompileError(
                    f"{described.path}: the {what} {tensor.name!r} is {tensor.dtype}, which cannot be fed or returned "
                    f"as a NumPy array; expected {', '.join(sorted(dtypes))}"
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


def _check_place(folder: Path, path: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not is_model_engine(folder)):
        raise CompileError(f"{folder}: is there already and is no engine of an ONNX file; choose another folder (-o)")
    if is_model_engine(folder) and not (folder / MODEL_FOLDER / path.name).is_file():
        raise CompileError(f"{folder}: holds the engine of another model; choose another folder (-o)")


def _place(sources: dict[str, Path], folder: Path) -> dict[str, str]:
    """Puts the files into ``folder`` and returns their hashes. The first, the graph, is always a copy."""
    hashes: dict[str, str] = {}
    try:
        for name, source in sources.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if hashes and _link(source, target):
                with target.open("rb") as file:
                    hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                hashes[name] = _copy(source, target)
    except OSError as error:
        raise CompileError(f"{error.filename or folder}: cannot be copied ({error.strerror})") from error
    return hashes


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
