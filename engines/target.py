"""What a target is: a module, or a package, of its name in this room."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from intaglio.errors import InputError

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.engines.report import StageReport
    from intaglio.engines.shapes import Interface
    from intaglio.exporters.bundle import Dim, StageInfo
    from intaglio.progress import ProgressCallback

TARGETS = ("cpu", "coreml", "tensorrt", "tensorrt-rtx", "cuda")
# Those whose engines lie in the memory of an NVIDIA GPU.
_ON_GPU = ("tensorrt", "tensorrt-rtx", "cuda")


class Target(Protocol):
    """The verbs that ``compile`` and ``load`` call.

    ``ACCURACIES`` are those it has, ``DOMAINS`` those of whose operators it knows, besides ONNX's own, ``INPUT_DTYPES``
    what its inputs and outputs may be. A stage is built into one file or folder, called ``stage`` + ``SUFFIX``; of an
    ONNX file, the engine ``KEEPS_MODEL`` and builds nothing beside it, or is such a file or folder as well.
    ``SOURCES`` are the files of this room that decide what is built, as patterns; ``NOTES`` what every report says.
    ``BUILD_TOOLS`` are packages beside the compiler whose versions decide it too, and that a built engine does without.
    """

    ACCURACIES: tuple[str, ...]
    DOMAINS: frozenset[str]
    INPUT_DTYPES: frozenset[str]
    SUFFIX: str
    KEEPS_MODEL: bool
    SOURCES: tuple[str, ...]
    NOTES: tuple[str, ...]
    BUILD_TOOLS: tuple[str, ...]

    def compiler(self) -> str:
        """Name and version of what builds. Raises RuntimeMissingError."""

    def device(self) -> str:
        """What a built stage runs on."""

    def check_options(self, options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
        """The target's options with its defaults. Raises InputError for one that it does not have."""

    def fit_dims(self, dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
        """Dims that a user chose among those that are ``declared``, narrowed to what the target holds."""

    def build(
        self,
        graph: Path,
        artifact: Path,
        stage: StageInfo,
        identity: Identity,
        progress: ProgressCallback | None = None,
    ) -> StageReport:
        """Builds the portable ``graph``, whose weights lie beside it, into ``artifact``.

        ``progress`` is told how far a long build is. Raises CompileError, CancelledError.
        """

    def build_model(
        self,
        graph: Path,
        artifact: Path,
        described: OnnxFile,
        identity: Identity,
        given: frozenset[str],
        progress: ProgressCallback | None = None,
    ) -> StageReport:
        """Builds an ONNX file that others wrote; ``given`` are the dims that somebody bounded.

        ``progress`` as of :meth:`build`. Raises CompileError, CancelledError.
        """

    def load(self, name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity, **how: Any) -> Any:
        """A session of a built stage; ``weights`` is the folder of the bundle. Raises EngineError."""

    def check_runs(self, **how: Any) -> None:
        """Raises EngineError where this machine cannot run what is built, InputError for a wrong option of ``load``."""

    def load_for_parity(self, name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> Any:
        """Likewise, for a comparison of numbers: where the target itself cannot run, by what stands in for it."""


# What may be said of how a target's sessions run, by the name that its ``load`` takes, and whose it is.
_SESSION_OPTIONS = {"threads": "cpu", "compute_units": "coreml"}


def session_options(
    target: str, *, threads: int = 0, compute_units: str | None = None, memory_budget: int | None = None
) -> dict[str, Any]:
    """What ``load`` of a target is told: ``threads`` of cpu, ``compute_units`` of coreml; 0 and None leave the choice.

    Targets on a GPU are told the ``memory_budget``, in bytes; elsewhere whoever loads the stages keeps to it. Raises
    InputError for an option that the target does not have.
    """
    target_module(target)
    given = {"threads": threads or None, "compute_units": compute_units}
    for name, value in given.items():
        if value is not None and _SESSION_OPTIONS[name] != target:
            raise InputError(
                f"{name} is for the target {_SESSION_OPTIONS[name]}, and this one is {target}; leave it out"
            )
    given["memory_budget"] = memory_budget if is_on_gpu(target) else None
    return {name: value for name, value in given.items() if value is not None}


def is_on_gpu(target: str) -> bool:
    """Whether engines of the target lie in the memory of a GPU, and not in the process's own."""
    return target in _ON_GPU


def target_module(name: str) -> Target:
    """The module of a target. Raises InputError."""
    if name not in TARGETS:
        raise InputError(f"the target {name!r} is unknown; there are {', '.join(TARGETS)}")
    return cast(Target, importlib.import_module(f"intaglio.engines.{name.replace('-', '_')}"))
