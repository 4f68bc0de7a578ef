"""A machine that says it is a Mac: coremltools' way to Core ML, with the evaluator where Core ML would be."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest

from intaglio.engines.coreml import models
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.models import EvaluatedModel


@dataclass
class PretendedMac:
    """What was asked of Core ML: packages that were compiled; models that were loaded, as stem, function and units."""

    compiled: list[str] = field(default_factory=list)
    loaded: list[tuple[str, str | None, str]] = field(default_factory=list)
    alive: int = 0
    most_alive: int = 0


def pretend_mac(patch: pytest.MonkeyPatch) -> PretendedMac:
    """Makes this machine one on which coremltools loads and runs packages."""
    mac = PretendedMac()

    class CompiledModel:
        def __init__(self, path: str, compute_units: ct.ComputeUnit, function_name: str | None = None) -> None:
            assert path.endswith(".mlmodelc")
            stem = Path(path).stem[:-37]
            mac.loaded.append((stem, function_name, compute_units.name))
            mac.alive += 1
            mac.most_alive = max(mac.most_alive, mac.alive)
            evaluator = Evaluator(path)
            self._model = EvaluatedModel(evaluator, function_name or evaluator.program.default_function)

        def predict(self, data: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]:
            for name, value in data.items():
                # What coremltools hands on without converting it; float16 it makes float32, in the caller's own dict.
                assert value.dtype in (np.float16, np.float32, np.int32), f"{name} is {value.dtype}"
                assert value.flags.c_contiguous and value.ndim
                data[name] = value.astype(np.float32) if value.dtype == np.float16 else value
            return self._model.predict(data, state)

        def make_state(self) -> Any:
            return self._model.make_state()

        def __del__(self) -> None:
            mac.alive -= 1

    def compile_model(package: str, destination: str) -> str:
        mac.compiled.append(Path(package).stem)
        shutil.copytree(package, destination)
        return destination

    patch.setattr(models, "is_mac", lambda: True)
    patch.setattr(ct.models, "CompiledMLModel", CompiledModel)
    patch.setattr(ct.models.utils, "compile_model", compile_model)
    return mac
