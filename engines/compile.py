"""``compile``: a bundle becomes an engine for one target."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from intaglio.engines import cache
from intaglio.engines.artifact import digest, stamps
from intaglio.engines.engine import ENGINE_FILE, REPORT_FILE, EngineInfo, engine_path
from intaglio.engines.identity import Identity, stage_identity
from intaglio.engines.report import Report, StageReport
from intaglio.engines.target import Target, target_module
from intaglio.engines.wanted import choose
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Bundle, Dim, read_bundle
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback

_log = logging.getLogger(__name__)

# Writes what belongs beside the stages: of an engine's folder, the bundle, and the sizes. Gives notes for the report.
Finish = Callable[[Path, Path, Bundle, Mapping[str, Dim]], Sequence[str]]


def compile_bundle(
    bundle: str | Path,
    target: str = "cpu",
    *,
    accuracy: str = "exact",
    shapes: str | Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    finish: Finish | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles every stage of the bundle at ``bundle`` into ``BUNDLE/engines/<target>/``, and returns the report.

    ``accuracy`` is ``exact`` (float32 activations and accumulation) or ``fast`` (activations rounded to 8 bits, one
    scale a row and group, in products with packed weights). ``shapes`` overrides the dims table (``NAME=VALUE`` or
    ``NAME=MIN:OPT:MAX``, comma-separated); several are sets of sizes of one engine, for targets that have those.
    ``options`` are the target's own; ``finish`` is called when all stages are there. A stage built before from the same
    graph, weights, dims and compiler comes from the cache, and none of its weights is read.
    Raises BundleError, InputError, CompileError, OutputError, RuntimeMissingError, CancelledError; a failed build
    leaves the old engine in place.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = target_module(target)
    wanted = choose(target, described.dims, accuracy, shapes, options or {})
    identities = {stage: stage_identity(described, stage, wanted) for stage in described.stages}
    count = Progress(progress, f"compile for {target}", len(identities), "stages")
    reports = {}
    with replaced_folder(engine_path(folder, target)) as partial:
        for stage, identity in identities.items():
            reports[stage] = _build_stage(folder, described, stage, identity, module, partial, progress)
            count.advance(1)
        notes = finish(partial, folder, described, wanted.shapes) if finish is not None else ()
        built = {stage: partial / f"{stage}{module.SUFFIX}" for stage in identities}
        info = EngineInfo(
            target=target,
            shapes=(shapes,) if isinstance(shapes, str) else tuple(shapes or ()),
            identities=identities,
            artifacts={stage: digest(artifact) for stage, artifact in built.items()},
            files={stage: stamps(artifact) for stage, artifact in built.items()},
        )
        report = Report(target=target, compiler=module.compiler(), stages=reports, notes=(*module.NOTES, *notes))
        (partial / ENGINE_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
        (partial / REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
    return report


def _build_stage(
    folder: Path,
    bundle: Bundle,
    stage: str,
    identity: Identity,
    module: Target,
    partial: Path,
    progress: ProgressCallback | None,
) -> StageReport:
    artifact = partial / f"{stage}{module.SUFFIX}"
    cached = cache.fetch(identity.key(), artifact)
    if cached is not None:
        try:
            report = StageReport.model_validate({**cached, "from_cache": True})
            _log.info("%s: from the cache, %s", stage, identity.key())
            return report
        except ValidationError:
            cache.remove(artifact)  # an entry of another version: build
    _log.info("%s: building %s", stage, identity.key())
    source = folder / bundle.stages[stage].file
    _check_graph(source, bundle.stages[stage].sha256)
    report = module.build(source, artifact, bundle.stages[stage], identity, progress)
    cache.store(identity.key(), artifact, report.model_dump(exclude={"from_cache"}))
    return report


def _check_graph(path: Path, expected: str) -> None:
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise CompileError(f"{path}: is not the graph that bundle.json names (its hash differs); export again")
