"""Functions of a package as models that run: Core ML's own on a Mac, elsewhere the evaluator under the same face."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.engines.coreml.description import PackageDescription, read_description
from intaglio.engines.coreml.session import CoreMLSession, Model
from intaglio.engines.leftovers import remove_leftovers
from intaglio.engines.shapes import Interface
from intaglio.engines.stage_interface import runs_as
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, StageInfo

if TYPE_CHECKING:
    from intaglio.engines.coreml.evaluator.evaluate import Evaluator

# What may compute, as the command line spells it, and coremltools' names of it.
COMPUTE_UNITS = {"all": "ALL", "cpu": "CPU_ONLY", "cpu+gpu": "CPU_AND_GPU", "cpu+ne": "CPU_AND_NE"}
# Beside a package, while its compiled copy is made.
_PARTIAL = ".mlmodelc-"


def is_mac() -> bool:
    """Whether Core ML is on this machine."""
    return sys.platform == "darwin"


def check_compute_units(compute_units: str) -> str:
    """The name as it is. Raises InputError for one that is unknown."""
    if compute_units not in COMPUTE_UNITS:
        raise InputError(f"the compute units {compute_units!r} are unknown; there are {', '.join(COMPUTE_UNITS)}")
    return compute_units


def open_stage(
    name: str, package: Path, stage: Interface, dims: Mapping[str, Dim], compute_units: str = "all"
) -> CoreMLSession:
    """A session of the stage in ``package``: on a Mac in Core ML, elsewhere by the evaluator.

    ``compute_units`` says what may compute on a Mac. Raises InputError, EngineError, RuntimeMissingError.
    """
    check_compute_units(compute_units)
    description = read_description(package)
    interface = runs_as(stage) if isinstance(stage, StageInfo) else stage
    if not is_mac():
        return CoreMLSession(name, interface, dims, description, evaluated_opener(package))
    return CoreMLSession(
        name, interface, dims, description, lambda each: open_on_mac(package, description, each, compute_units)
    )


def evaluated_opener(package: Path) -> Callable[[str], Model]:
    """Loads functions of ``package`` into one evaluator, which reads the package when it is first needed."""
    from intaglio.engines.coreml.evaluator.evaluate import Evaluator

    evaluators: list[Evaluator] = []

    def open_function(function: str) -> Model:
        if not evaluators:
            evaluators.append(Evaluator(package))
        return EvaluatedModel(evaluators[0], function)

    return open_function


class EvaluatedModel:
    """A function of a package under the face of coremltools' models, computed by the evaluator."""

    def __init__(self, evaluator: Evaluator, function: str) -> None:
        self._evaluator, self._function = evaluator, function

    def predict(self, data: dict[str, np.ndarray], state: EvaluatedState | None = None) -> dict[str, np.ndarray]:
        """The outputs by name; ``state`` is changed in place."""
        return self._evaluator.run(data, self._function, None if state is None else state.arrays)

    def make_state(self) -> EvaluatedState:
        """States that are zero."""
        return EvaluatedState(self._evaluator.make_state(self._function))


class EvaluatedState:
    """The states of an evaluated function."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def read_state(self, name: str) -> np.ndarray:
        """The value of one."""
        return self.arrays[name].copy()

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Sets the value of one."""
        self.arrays[name][...] = value


def open_on_mac(package: Path, description: PackageDescription, function: str, compute_units: str) -> Model:
    """A function of the compiled package in Core ML. Raises EngineError, RuntimeMissingError.

    Core ML compiles a package for the machine before it loads it, which takes up to minutes. The compiled copy lies
    beside the package and is made once.
    """
    ct = import_coremltools()
    # A package with one function has no name to choose by.
    name = function if len(description.functions) > 1 else None
    try:
        compiled = compiled_copy(package, ct.models.utils.compile_model)
        model: Model = ct.models.CompiledMLModel(
            str(compiled), compute_units=getattr(ct.ComputeUnit, COMPUTE_UNITS[compute_units]), function_name=name
        )
    except EngineError:
        raise
    except Exception as error:  # Core ML's errors come as whatever coremltools makes of them
        raise EngineError(
            f"{package}: Core ML cannot load it: {error}. Compile it again, with another --weights or "
            "--deployment-target if it is this machine that refuses it, or choose other --compute-units"
        ) from error
    return model


def compiled_copy(package: Path, compile_model: Callable[[str, str], object]) -> Path:
    """The compiled form of ``package``, made by ``compile_model(package, destination)`` where it is not there yet.

    Its name holds the package's own identifier, so that one of another package is never taken; those are removed.
    Where others make it at the same time, the first one counts.
    Raises EngineError for a package without a manifest.
    """
    try:
        identifier = str(json.loads((package / "Manifest.json").read_bytes())["rootModelIdentifier"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{package} is not a whole Core ML package ({error!r}). Compile the model again.") from error
    compiled = package.with_name(f"{package.stem}-{identifier}.mlmodelc")
    if compiled.is_dir():
        return compiled
    for old in package.parent.glob(f"{package.stem}-{'?' * len(identifier)}.mlmodelc"):
        # Others may make the copy, or remove old ones, at the same time.
        if old != compiled:
            shutil.rmtree(old, ignore_errors=True)
    remove_leftovers(package.parent, _PARTIAL)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=package.parent) as folder:
        made = Path(folder) / compiled.name
        compile_model(str(package), str(made))
        try:
            made.rename(compiled)
        except OSError:
            if not compiled.is_dir():
                raise
    return compiled
