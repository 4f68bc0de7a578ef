"""The target ``tensorrt``: engines for the NVIDIA GPU of this machine, with our kernels as plugins.

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
from intaglio.engines.nvidia.gpu import find_gpu
from intaglio.engines.nvidia.options import read_full_options
from intaglio.errors import RuntimeMissingError

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.nvidia.session import GpuSession
    from intaglio.engines.shapes import Interface

__all__ = [
    "ACCURACIES", "DOMAINS", "INPUT_DTYPES", "KEEPS_MODEL", "NOTES", "SUFFIX", "build", "build_model", "fit_dims",
    "load_for_parity",
]  # fmt: skip

# Kernels are part of an engine, and lie in another room.
SOURCES = ("tensorrt.py", "nvidia/*.py", "nvidia/plugins/*.py", "../kernels/cuda/*.py")
# Compiles the kernels of plugins.
BUILD_TOOLS = ("triton",)
_WHEELS = ("tensorrt-cu13", "tensorrt-cu12", "tensorrt")


def compiler() -> str:
    """Name and version of what builds. Raises RuntimeMissingError, EngineError where there is no GPU either."""
    for wheel in _WHEELS:
        try:
            return f"TensorRT {importlib.metadata.version(wheel)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    # Without a GPU, gigabytes of TensorRT would be of no use.
    find_gpu()
    raise RuntimeMissingError(
        f"TensorRT is not installed: there is none of {', '.join(_WHEELS)}. Install the first from "
        "NVIDIA's own index, as TensorRT's installation guide says, or compile for the target tensorrt-rtx"
    )


def device() -> str:
    """The GPU: an engine runs on its kind only. Raises EngineError where there is none."""
    gpu = find_gpu()
    return f"{gpu.name}, compute capability {gpu.capability // 10}.{gpu.capability % 10}"


def check_options(options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
    """The options with their defaults. Raises InputError."""
    read = read_full_options(options)
    checked = {"dtype": read.dtype or "", "refit": "yes" if read.refit else ""}
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

    Raises EngineError where there is no GPU, or one of another kind than built it, or another TensorRT; InputError
    beyond the budget.
    """
    from intaglio.engines.nvidia.bindings import import_tensorrt
    from intaglio.engines.nvidia.device import open_device
    from intaglio.engines.nvidia.opening import check_built_here, open_session, rebuild_command

    opened = open_device()
    trt = import_tensorrt()
    check_built_here(identity, device(), trt.__version__, rebuild_command(weights, identity))
    return open_session(trt, opened, name, artifact, weights, stage, identity, budget=memory_budget)
