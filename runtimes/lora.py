"""LoRA adapters for engines that are loaded: which weight of a stage each pair of matrices belongs to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.engine import Engine, rebuild_command
from intaglio.engines.nvidia.refit import BaseWeights, LoraTerm
from intaglio.errors import EngineError, InputError
from intaglio.exporters.checkpoints.lora import Adapter, LoraModule, check_finite, open_adapter
from intaglio.exporters.checkpoints.tensors import CheckpointTensor

# What files put before the names of modules of a pipeline's parts, dots or underscores after it.
_PREFIXES = (
    "model.diffusion_model",
    "diffusion_model",
    "transformer",
    "unet",
    "text_encoder",
    "lora_unet",
    "lora_transformer",
    "lora_te",
    "lora_te1",
    "lora_text_encoder",
)
_SHOWN = 4


class Adapters:
    """LoRA adapters of a loaded pipeline, ``strengths`` by file.

    Only full TensorRT's engines that were compiled with ``--refit`` take them. Every pair of matrices must belong to
    some stage. Raises InputError, CheckpointError, EngineError.
    """

    def __init__(self, engine: Engine, strengths: Mapping[str, float]) -> None:
        self._engine, self._strengths = engine, _by_text(strengths)
        self._modules: dict[str, dict[str, dict[str, LoraModule]]] = {}
        self.files: dict[str, tuple[Path, ...]] = {}
        self._hashes: dict[str, str] = {}
        if not strengths:
            return
        if engine.info.target != "tensorrt":
            raise InputError(
                f"adapters change engines of the target tensorrt alone, and this one is {engine.info.target}; export "
                "the bundle with --lora"
            )
        if engine.options.get("refit") != "yes":
            again = f"{rebuild_command(engine.bundle_path, 'tensorrt', engine.info).removesuffix('`')} --refit`"
            raise EngineError(
                f"{engine.path}: was compiled without --refit, so that no adapter can change it; build again with "
                f"{again}"
            )
        weights = {
            stage: BaseWeights(engine.bundle_path / described.file).names
            for stage, described in engine.bundle.stages.items()
        }
        for path in self._strengths:
            adapter = open_adapter(path)
            check_finite(adapter)
            self._modules[path] = _matched(adapter, weights)
            self.files[path] = adapter.files

    @property
    def strengths(self) -> dict[str, float]:
        """By file."""
        return dict(self._strengths)

    def set_strengths(self, strengths: Mapping[str, float], sessions: Mapping[str, Any]) -> None:
        """Other strengths of these adapters, at once in the ``sessions`` by stage; 0 for those not named.

        Raises InputError for a file that is none of them, EngineError.
        """
        wanted = _by_text(strengths)
        for path in wanted:
            if path not in self._strengths:
                raise InputError(
                    f"{path}: is no adapter of this pipeline, which has {', '.join(self._strengths) or 'none'}; load "
                    "the bundle with it"
                )
        self._strengths = {path: wanted.get(path, 0.0) for path in self._strengths}
        for stage, session in sessions.items():
            self.put(stage, session)

    def load(self, stage: str, **how: Any) -> Any:
        """Loads a stage, ``how`` as its target takes it, with its adapters. Raises InputError, EngineError."""
        session = self._engine.load(stage, **how)
        try:
            self.put(stage, session)
        except BaseException:
            # The traceback would hold it, and memory of the GPU with it.
            if hasattr(session, "close"):
                session.close()
            raise
        return session

    def put(self, stage: str, session: Any) -> None:
        """Gives the session of a stage its adapters. Raises InputError, EngineError."""
        own = {path: stages[stage] for path, stages in self._modules.items() if stage in stages}
        if not own:
            return
        for path, modules in own.items():
            if path not in session.refit.adapters:
                session.refit.add(path, {weight: _term(module) for weight, module in modules.items()})
        session.refit.set_strengths({path: self._strengths[path] for path in own})

    def texts(self) -> list[str]:
        """A line for each adapter that is not at strength 0: file, strength and hash."""
        used = {path: strength for path, strength in self._strengths.items() if strength}
        # Once: a file of an adapter may have gigabytes.
        self._hashes |= {path: _sha256(self.files[path][0]) for path in used if path not in self._hashes}
        return [f"{Path(path).name}:{strength:g} sha256 {self._hashes[path]}" for path, strength in used.items()]


def read_terms(path: str | Path, weights: Collection[str]) -> dict[str, LoraTerm]:
    """The terms of the adapter at ``path`` by the names of a stage's ``weights``, such as ``layers.0.q_proj.weight``.

    Names of modules are the checkpoint's, with the prefix of a part or ``model.`` before them, or with underscores for
    their dots. Raises CheckpointError, and InputError where modules are none of the stage's: a file that spells them as
    another publisher, or joins several, is for ``intaglio export --lora``.
    """
    adapter = open_adapter(path)
    check_finite(adapter)
    found = _matched(adapter, {"stage": weights})
    return {weight: _term(module) for weight, module in found.get("stage", {}).items()}


def _matched(adapter: Adapter, weights: Mapping[str, Collection[str]]) -> dict[str, dict[str, LoraModule]]:
    """The modules of an adapter by stage and weight; one may be of several stages. Raises InputError."""
    found: dict[str, dict[str, LoraModule]] = {}
    matched: set[str] = set()
    for stage, names in weights.items():
        modules = {weight.removesuffix(".weight"): weight for weight in names}
        flat = {module.replace(".", "_"): weight for module, weight in modules.items()}
        own: dict[str, LoraModule] = {}
        for module in adapter.modules.values():
            known = flat if module.is_flat else modules
            spellings = _spellings(module.name, "_" if module.is_flat else ".")
            if (name := next((each for each in spellings if each in known), None)) is None:
                continue
            if known[name] in own:
                raise InputError(
                    f"{adapter.path}: {module.down.name} is of {known[name]}, as another pair is; keep one spelling"
                )
            own[known[name]] = module
            matched.add(module.name)
        if own:
            found[stage] = own
    if unmatched := [module.down.name for module in adapter.modules.values() if module.name not in matched]:
        listed = ", ".join(unmatched[:_SHOWN]) + (", …" if len(unmatched) > _SHOWN else "")
        some = sorted({weight.removesuffix(".weight") for names in weights.values() for weight in names})[:_SHOWN]
        where = " and ".join(weights) if len(weights) > 1 else "the stage"
        raise InputError(
            f"{adapter.path}: {len(unmatched)} of {len(adapter.modules)} modules are none of {where}'s: {listed}. "
            f"There are {', '.join(some)}, …; --lora of `intaglio export` knows other spellings"
        )
    return found


def _term(module: LoraModule) -> LoraTerm:
    return LoraTerm(_read(module.down), _read(module.up), module.scale)


def _by_text(strengths: Mapping[str, float]) -> dict[str, float]:
    for path, strength in strengths.items():
        if isinstance(strength, bool) or not isinstance(strength, int | float) or not math.isfinite(strength):
            raise InputError(f"the strength of {path} is {strength!r}, expected a number")
    return {str(path): float(strength) for path, strength in strengths.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _spellings(name: str, dot: str) -> list[str]:
    """The name as it stands, and without the prefixes of parts, each with and without ``model.``."""
    bare = [name, *(name.removeprefix(f"{prefix}{dot}") for prefix in _PREFIXES if name.startswith(f"{prefix}{dot}"))]
    return [spelling for each in bare for spelling in (each, f"model{dot}{each}", each.removeprefix(f"model{dot}"))]


def _read(tensor: CheckpointTensor) -> np.ndarray:
    rows = tensor.read()
    assert isinstance(rows, np.ndarray), "matrices of adapters are dense"
    return rows.astype(np.float32)
