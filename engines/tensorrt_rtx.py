"""The target ``tensorrt-rtx``: engines for NVIDIA's consumer GPUs, built ahead of time on any machine.

Imports neither TensorRT nor a graph library: opening an engine needs none.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.engines.nvidia.engine_build import (
    ACCURACIES,
    DOMAINS,
    INPUT_DTYPES,
    KEEPS_MODEL,
    NOTES,
    SUFFIX,
    build,
    build_model,
    fit_dims,
    load_for_parity,
)
from intaglio.engines.nvidia.options import read_rtx_options
from intaglio.errors import RuntimeMissingError

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.nvidia.session import GpuSession
    from intaglio.engines.shapes import Interface

__all__ = [
    "ACCURACIES", "DOMAINS", "INPUT_DTYPES", "KEEPS_MODEL", "NOTES", "SUFFIX", "build", "build_model", "fit_dims",
    "load_for_parity",
]  # fmt: skip

SOURCES = ("tensorrt_rtx.py", "nvidia/*.py")
BUILD_TOOLS: tuple[str, ...] = ()
_WHEEL = "tensorrt-rtx-cu13-bindings"


def compiler() -> str:
    """Name and version of what builds. Raises RuntimeMissingError."""
    try:
        return f"TensorRT for RTX {importlib.metadata.version(_WHEEL)}"
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeMissingError(
            "TensorRT for RTX is not installed. Install intaglio with its extra `tensorrt-rtx`: "
            "from a checkout, pip install '.[tensorrt-rtx]'"
        ) from error


def device() -> str:
    """What an engine runs on; which generations is an option."""
    return "NVIDIA GPU"


def check_options(options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
    """The options with their defaults. Raises InputError."""
    read = read_rtx_options(options)
    checked = {"sm": ",".join(map(str, read.sm)), "dtype": read.dtype or ""}
    return {name: value for name, value in checked.items() if value}


def check_runs(*, memory_budget: int | None = None) -> None:
    """Raises EngineError where there is no NVIDIA GPU, which says what was looked for."""
    from intaglio.engines.nvidia.device import open_device

    open_device()


def load(
    name: str,
    artifact: Path,
    weights: Path,
    stage: Interface,
    identity: Identity,
    *,
    memory_budget: int | None = None,
) -> GpuSession:
    """Loads a built stage on the GPU; ``memory_budget`` bounds what this process holds there, in bytes.

    Raises EngineError where there is no GPU, or none that the engine was built for; InputError beyond the budget.
    """
    from intaglio.engines.nvidia.bindings import import_tensorrt_rtx
    from intaglio.engines.nvidia.device import open_device
    from intaglio.engines.nvidia.opening import check_rtx_capability, open_session, rebuild_command

    device = open_device()
    check_rtx_capability(device, read_rtx_options(identity.options).sm, rebuild_command(weights, identity))
    trt = import_tensorrt_rtx()
    return open_session(trt, device, name, artifact, weights, stage, identity, budget=memory_budget)
