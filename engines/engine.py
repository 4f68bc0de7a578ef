"""A built engine: where it lies, what it was built from, and how it is opened again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.engines.artifact import digest, stamps
from intaglio.engines.identity import Identity, compile_command, stage_identity
from intaglio.engines.report import Report
from intaglio.engines.target import target_module
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Bundle, Dim, read_bundle

ENGINE_FILE, REPORT_FILE = "engine.json", "report.json"


class EngineInfo(BaseModel):
    """``engine.json``: ``--shapes`` as they were given, the identity of each stage, the digest of what was built of it.

    ``files`` are those of each stage, by their paths in the engine: bytes, and the times that tell whether to read one
    again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    shapes: tuple[str, ...]
    identities: dict[str, Identity]
    artifacts: dict[str, str]
    files: dict[str, dict[str, tuple[int, int, int]]]


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

    @property
    def variants(self) -> tuple[dict[str, Dim], ...]:
        """The sets of sizes that it was built for, where there are several."""
        return next(iter(self.info.identities.values())).variants

    @property
    def options(self) -> dict[str, str]:
        """The target's own options that it was built with."""
        return next(iter(self.info.identities.values())).options

    def artifact(self, stage: str) -> Path:
        """What was built of ``stage``: a file or a folder. Raises EngineError."""
        if stage not in self.bundle.stages:
            raise EngineError(
                f"{self.bundle_path}: has no stage {stage!r}, only {', '.join(self.bundle.stages)}; "
                "export again with --stages"
            )
        return self.path / f"{stage}{target_module(self.info.target).SUFFIX}"

    def load(self, stage: str, **how: Any) -> Any:
        """A session of ``stage`` with ``run(feeds) -> outputs``. Raises EngineError.

        ``how`` are the target's own options: ``threads`` of cpu, ``compute_units`` of coreml.
        """
        target, artifact = target_module(self.info.target), self.artifact(stage)
        identity = self.info.identities[stage]
        return target.load(stage, artifact, self.bundle_path, self.bundle.stages[stage], identity, **how)

    def load_for_parity(self, stage: str) -> Any:
        """A session whose numbers are those of the engine, on this machine too. Raises EngineError."""
        target, artifact = target_module(self.info.target), self.artifact(stage)
        identity = self.info.identities[stage]
        return target.load_for_parity(stage, artifact, self.bundle_path, self.bundle.stages[stage], identity)


def engine_path(bundle: Path, target: str) -> Path:
    """Where the engine of a bundle lies."""
    return bundle / "engines" / target


def read_engine(bundle: str | Path, target: str = "cpu") -> EngineInfo:
    """What an engine says of itself, compared with nothing. Raises EngineError if it is not there or damaged."""
    file = engine_path(Path(bundle), target) / ENGINE_FILE
    again = rebuild_command(Path(bundle), target)
    if not file.is_file():
        raise EngineError(f"{file.parent}: no engine there; build it with {again}")
    try:
        return EngineInfo.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise EngineError(f"{file}: is damaged or of another version; build again with {again}") from error


def rebuild_command(bundle: Path, target: str, info: EngineInfo | None = None) -> str:
    """The command that builds the engine of a bundle; again with the options it has."""
    identity = next(iter(info.identities.values()), None) if info is not None else None
    return f"`{compile_command(bundle, target, identity, info.shapes if info is not None else ())}`"


def open_engine(bundle: str | Path, target: str = "cpu") -> Engine:
    """Opens the engine of a bundle after comparing its identity with the bundle and this machine.

    Raises EngineError that says what differs and names the command that rebuilds it; BundleError.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    module = target_module(target)
    info = read_engine(folder, target)
    path, again = engine_path(folder, target), rebuild_command(folder, target, info)
    if info.target != target or info.identities.keys() != described.stages.keys():
        raise EngineError(
            f"{path}: was built for {info.target} with the stages {', '.join(info.identities)}, but the bundle has "
            f"{', '.join(described.stages)}; build again with {again}"
        )
    for stage, built in info.identities.items():
        try:
            module.check_options(built.options, len(info.shapes))
        except InputError as error:
            afresh = rebuild_command(folder, target)
            raise EngineError(f"{path / ENGINE_FILE}: is damaged ({error}); build again with {afresh}") from error
        now = stage_identity(described, stage, built.wanted)
        if built != now:
            raise EngineError(
                f"{path}: {stage} was built from something else ({'; '.join(built.differences(now))}); "
                f"build again with {again}"
            )
        artifact = path / f"{stage}{module.SUFFIX}"
        if not artifact.exists():
            raise EngineError(f"{path}: {artifact.name} is missing; build again with {again}")
        try:
            is_untouched = stamps(artifact) == info.files.get(stage)
            changed = not is_untouched and digest(artifact) != info.artifacts.get(stage)
        except OSError as error:
            raise EngineError(f"{artifact}: cannot be read ({error}); build again with {again}") from error
        if changed:
            raise EngineError(f"{path}: {artifact.name} is not what was built; build again with {again}")
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
