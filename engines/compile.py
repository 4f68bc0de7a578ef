"""``compile``: a bundle becomes an engine for one target."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pydantic import ValidationError

from intaglio.engines import cache
from intaglio.engines.engine import ENGINE_FILE, REPORT_FILE, EngineInfo, engine_path, target_module
from intaglio.engines.identity import Identity, stage_identity
from intaglio.engines.report import Report, StageReport
from intaglio.engines.shapes import override_dims
from intaglio.errors import CompileError, InputError
from intaglio.exporters.bundle import Bundle, read_bundle
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback

_log = logging.getLogger(__name__)


def compile_bundle(
    bundle: str | Path,
    target: str = "cpu",
    *,
    accuracy: str = "exact",
    shapes: str | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles every stage of the bundle at ``bundle`` into ``BUNDLE/engines/<target>/``, and returns the report.

    ``accuracy`` is ``exact`` (float32 activations and accumulation) or ``fast`` (activations rounded to 8 bits, one
    scale a row and group, in products with packed weights). ``shapes`` overrides the dims table (``NAME=VALUE`` or
    ``NAME=MIN:OPT:MAX``, comma-separated). A stage built before from the same graph, weights, dims and compiler comes
    from the cache, and none of its weights is read.
    Raises BundleError, InputError, CompileError, OutputError, RuntimeMissingError; a failed build leaves the old
    engine in place.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = target_module(target)
    if accuracy not in module.ACCURACIES:
        raise InputError(f"accuracy {accuracy!r}: {target} has {', '.join(module.ACCURACIES)}")
    dims = override_dims(described.dims, shapes)
    identities = {
        stage: stage_identity(described, stage, target, module.compiler(), accuracy, dims) for stage in described.stages
    }
    count = Progress(progress, f"compile for {target}", len(identities), "stages")
    reports = {}
    with replaced_folder(engine_path(folder, target)) as partial:
        for stage, identity in identities.items():
            reports[stage] = _build_stage(folder, described, stage, identity, module, partial)
            count.advance(1)
        graphs = {stage: hashlib.sha256((partial / f"{stage}.onnx").read_bytes()).hexdigest() for stage in identities}
        info = EngineInfo(target=target, identities=identities, graphs=graphs)
        report = Report(target=target, compiler=module.compiler(), stages=reports)
        (partial / ENGINE_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
        (partial / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
    return report


def _build_stage(
    folder: Path, bundle: Bundle, stage: str, identity: Identity, module: Any, partial: Path
) -> StageReport:
    graph = partial / f"{stage}.onnx"
    cached = cache.fetch(identity.key(), graph)
    if cached is not None:
        try:
            report = StageReport.model_validate({**cached, "from_cache": True})
            _log.info("%s: from the cache, %s", stage, identity.key())
            return report
        except ValidationError:
            pass  # an entry of another version: build
    _log.info("%s: building %s", stage, identity.key())
    source = folder / bundle.stages[stage].file
    _check_graph(source, bundle.stages[stage].sha256)
    lowered = module.lower(ir.load(source), identity.accuracy)
    graph.write_bytes(ir.serde.serialize_model(lowered).SerializeToString(deterministic=True))
    report = module.build(graph, folder, bundle.stages[stage], identity.shapes, identity.accuracy)
    cache.store(identity.key(), graph, report.model_dump(exclude={"from_cache"}))
    return report


def _check_graph(path: Path, expected: str) -> None:
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise CompileError(f"{path}: is not the graph that bundle.json names (its hash differs); export again")
