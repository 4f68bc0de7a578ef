"""``compile``: a bundle becomes an engine for one target, and ``open_engine`` loads it again."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.engines import cache
from intaglio.engines.identity import Identity, stage_identity
from intaglio.engines.report import Report, StageReport
from intaglio.engines.shapes import override_dims
from intaglio.errors import CompileError, EngineError, InputError
from intaglio.exporters.bundle import Bundle, Dim, read_bundle
from intaglio.exporters.folder import recover_folder, replaced_folder
from intaglio.progress import Progress, ProgressCallback

TARGETS = ("cpu",)
_ENGINE_FILE, _REPORT_FILE = "engine.json", "report.json"


class EngineInfo(BaseModel):
    """``engine.json``: the identity and the lowered graph of each stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    identities: dict[str, Identity]


@dataclass(frozen=True)
class Engine:
    """An engine whose identity has been checked; ``load`` starts one of its stages."""

    path: Path
    bundle_path: Path
    bundle: Bundle
    info: EngineInfo

    @property
    def dims(self) -> dict[str, Dim]:
        """The dims that the engine was built for."""
        return next(iter(self.info.identities.values())).shapes

    def load(self, stage: str, *, threads: int = 0) -> Any:
        """A session of ``stage`` with ``run(feeds) -> outputs``. Raises EngineError."""
        if stage not in self.bundle.stages:
            raise EngineError(
                f"{self.bundle_path}: has no stage {stage!r}, only {', '.join(self.bundle.stages)}; "
                "export again with --stages"
            )
        target = _target(self.info.target)
        return target.load(
            stage,
            self.path / f"{stage}.onnx",
            self.bundle_path,
            self.bundle.stages[stage],
            self.info.identities[stage].shapes,
            threads=threads,
        )


def engine_path(bundle: Path, target: str) -> Path:
    """Where the engine of a bundle lies."""
    return bundle / "engines" / target


def compile_bundle(
    bundle: str | Path,
    target: str = "cpu",
    *,
    accuracy: str = "exact",
    shapes: str | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles every stage of the bundle at ``bundle`` into ``BUNDLE/engines/<target>/``, and returns the report.

    ``shapes`` overrides the dims table (``NAME=VALUE`` or ``NAME=MIN:OPT:MAX``, comma-separated). A stage built
    before from the same graph, weights, dims and compiler comes from the cache, and none of its weights is read.
    Raises BundleError, InputError, CompileError, RuntimeMissingError. A failed build leaves the old engine in place.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = _target(target)
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
        info = EngineInfo(target=target, identities=identities)
        report = Report(target=target, compiler=module.compiler(), stages=reports)
        (partial / _ENGINE_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
        (partial / _REPORT_FILE).write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
    return report


def _build_stage(
    folder: Path, bundle: Bundle, stage: str, identity: Identity, module: Any, partial: Path
) -> StageReport:
    graph = partial / f"{stage}.onnx"
    cached = cache.fetch(identity.key(), graph)
    if cached is not None:
        try:
            return StageReport.model_validate({**cached, "from_cache": True})
        except ValidationError:
            pass  # an entry of another version: build
    source = folder / bundle.stages[stage].file
    _check_graph(source, bundle.stages[stage].sha256)
    lowered = module.lower(ir.load(source))
    graph.write_bytes(ir.serde.serialize_model(lowered).SerializeToString(deterministic=True))
    report = module.build(graph, folder, bundle.stages[stage], identity.shapes, identity.accuracy)
    cache.store(identity.key(), graph, report.model_dump(exclude={"from_cache"}))
    return report


def _check_graph(path: Path, expected: str) -> None:
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise CompileError(f"{path}: is not the graph that bundle.json names (its hash differs); export again")


def open_engine(bundle: str | Path, target: str = "cpu") -> Engine:
    """Opens the engine of a bundle after comparing its identity with the bundle and this machine.

    Raises EngineError that says what differs and names the command that rebuilds it; BundleError.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = _target(target)
    path = engine_path(folder, target)
    recover_folder(path)
    again = f"`intaglio compile {folder} --target {target}`"
    if not (path / _ENGINE_FILE).is_file():
        raise EngineError(f"{path}: no engine there; build it with {again}")
    try:
        info = EngineInfo.model_validate_json((path / _ENGINE_FILE).read_bytes())
    except (ValidationError, OSError) as error:
        raise EngineError(
            f"{path / _ENGINE_FILE}: is damaged or of another version; build again with {again}"
        ) from error
    if info.target != target or info.identities.keys() != described.stages.keys():
        raise EngineError(
            f"{path}: was built for {info.target} with the stages {', '.join(info.identities)}, but the bundle has "
            f"{', '.join(described.stages)}; build again with {again}"
        )
    for stage, built in info.identities.items():
        now = stage_identity(described, stage, target, module.compiler(), built.accuracy, built.shapes)
        if built != now:
            raise EngineError(
                f"{path}: {stage} was built from something else ({'; '.join(built.differences(now))}); "
                f"build again with {again}"
            )
        if not (path / f"{stage}.onnx").is_file():
            raise EngineError(f"{path}: {stage}.onnx is missing; build again with {again}")
    return Engine(path, folder, described, info)


def read_report(bundle: str | Path, target: str) -> Report:
    """The report of an engine. Raises EngineError."""
    file = engine_path(Path(bundle), target) / _REPORT_FILE
    try:
        return Report.model_validate(json.loads(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise EngineError(f"{file}: cannot be read ({error})") from error


def _target(name: str) -> Any:
    if name not in TARGETS:
        raise InputError(f"the target {name!r} is unknown; there is {', '.join(TARGETS)}")
    return importlib.import_module(f"intaglio.engines.{name}")
