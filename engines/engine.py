"""A built engine: where it lies, what it was built from, and how it is opened again."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.engines.identity import Identity, stage_identity
from intaglio.engines.report import Report
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Bundle, Dim, read_bundle

TARGETS = ("cpu",)
ENGINE_FILE, REPORT_FILE = "engine.json", "report.json"


class EngineInfo(BaseModel):
    """``engine.json``: the identity of each stage, and the hash of its lowered graph."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    identities: dict[str, Identity]
    graphs: dict[str, str]


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

    @property
    def accuracy(self) -> str:
        """``exact`` or ``fast``."""
        return next(iter(self.info.identities.values())).accuracy

    def load(self, stage: str, *, threads: int = 0) -> Any:
        """A session of ``stage`` with ``run(feeds) -> outputs``. Raises EngineError."""
        if stage not in self.bundle.stages:
            raise EngineError(
                f"{self.bundle_path}: has no stage {stage!r}, only {', '.join(self.bundle.stages)}; "
                "export again with --stages"
            )
        target = target_module(self.info.target)
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


def read_engine(bundle: str | Path, target: str = "cpu") -> EngineInfo:
    """What an engine says of itself, compared with nothing. Raises EngineError if it is not there or damaged."""
    file = engine_path(Path(bundle), target) / ENGINE_FILE
    again = _again(Path(bundle), target)
    if not file.is_file():
        raise EngineError(f"{file.parent}: no engine there; build it with {again}")
    try:
        return EngineInfo.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise EngineError(f"{file}: is damaged or of another version; build again with {again}") from error


def _again(bundle: Path, target: str) -> str:
    return f"`intaglio compile {bundle} --target {target}`"


def open_engine(bundle: str | Path, target: str = "cpu") -> Engine:
    """Opens the engine of a bundle after comparing its identity with the bundle and this machine.

    Raises EngineError that says what differs and names the command that rebuilds it; BundleError.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = target_module(target)
    info = read_engine(folder, target)
    path, again = engine_path(folder, target), _again(folder, target)
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
        if hashlib.sha256((path / f"{stage}.onnx").read_bytes()).hexdigest() != info.graphs.get(stage):
            raise EngineError(f"{path}: {stage}.onnx is not the graph that was built; build again with {again}")
    return Engine(path, folder, described, info)


def read_report(bundle: str | Path, target: str) -> Report:
    """The report of an engine. Raises EngineError."""
    file = engine_path(Path(bundle), target) / REPORT_FILE
    try:
        if not file.is_file():
            raise FileNotFoundError("no such file")
        return Report.model_validate(json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{file}: cannot be read ({error})") from error


def target_module(name: str) -> Any:
    """The module of a target, with its ``lower``, ``build`` and ``load``. Raises InputError."""
    if name not in TARGETS:
        raise InputError(f"the target {name!r} is unknown; there is {', '.join(TARGETS)}")
    return importlib.import_module(f"intaglio.engines.{name}")
