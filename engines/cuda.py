"""The target ``cuda``: onnxruntime-gpu, with its CUDA provider or its TensorRT provider."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines.child import build_in_child
from intaglio.engines.nvidia.cuda_options import read_cuda_options
from intaglio.errors import InputError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.nvidia.cuda_session import CudaSession
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.engines.report import StageReport
    from intaglio.engines.shapes import Interface
    from intaglio.exporters.bundle import Dim, StageInfo
    from intaglio.progress import ProgressCallback

ACCURACIES = ("exact",)
DOMAINS = frozenset({DOMAIN, "com.microsoft"})
INPUT_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# A folder: the lowered graph and its weights.
SUFFIX = ".cuda"
KEEPS_MODEL = False
NOTES: tuple[str, ...] = ()
BUILD_TOOLS: tuple[str, ...] = ()
SOURCES = ("cuda.py", "nvidia/cuda_*.py", "nvidia/lower.py")
_PACKAGES = ("onnxruntime-gpu", "onnxruntime")
_GRAPH = "graph.onnx"


def compiler() -> str:
    """Name and version of what builds: onnxruntime, on a GPU or not. Raises RuntimeMissingError."""
    for package in _PACKAGES:
        try:
            return f"onnxruntime {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeMissingError(
        "onnxruntime is not installed. Install intaglio with its extra `cuda` (onnxruntime-gpu): from a checkout, "
        "pip install '.[cuda]'"
    )


def device() -> str:
    """What an engine runs on."""
    return "NVIDIA GPU"


def check_options(options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
    """The options with their defaults. Raises InputError."""
    read = read_cuda_options(options)
    if sets_of_sizes > 1:
        raise InputError("--shapes: the target cuda takes every size in a range; give it once, NAME=MIN:OPT:MAX")
    checked = {"provider": read.provider, "dtype": read.dtype or ""}
    return {name: value for name, value in checked.items() if value}


def fit_dims(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """As they are."""
    return dict(dims)


def build(
    graph: Path,
    artifact: Path,
    stage: StageInfo,
    identity: Identity,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Lowers the portable ``graph`` into the folder ``artifact``, and runs it once on the CPU, in a child process.

    Raises CompileError with the child's own message.
    """
    from intaglio.engines.stage_interface import runs_as

    return _build(graph, artifact, identity, runs_as(stage).model_dump())


def build_model(
    graph: Path,
    artifact: Path,
    described: OnnxFile,
    identity: Identity,
    given: frozenset[str],
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Likewise, of an ONNX file that others wrote, which is not tried out."""
    return _build(graph, artifact, identity, None)


def _build(graph: Path, artifact: Path, identity: Identity, stage: dict[str, Any] | None) -> StageReport:
    request = {
        "graph": str(graph),
        "artifact": str(artifact),
        "stage": stage,
        "dims": {name: dim.model_dump() for name, dim in identity.shapes.items()},
        "options": identity.options,
    }
    return build_in_child("nvidia.cuda_build", request, identity, name=graph.stem, compiler="onnxruntime")


def check_runs(*, memory_budget: int | None = None) -> None:
    """Raises EngineError where there is no NVIDIA GPU, RuntimeMissingError where onnxruntime has no CUDA provider."""
    from intaglio.engines.nvidia.cuda_session import check_provider

    check_provider("cuda")


def load(
    name: str,
    artifact: Path,
    weights: Path,
    stage: Interface,
    identity: Identity,
    *,
    memory_budget: int | None = None,
) -> CudaSession:
    """Loads a built stage on the GPU; ``memory_budget`` bounds what onnxruntime takes for it there, in bytes.

    Of its TensorRT provider, which has no such bound, it bounds what an engine works in.

    Raises EngineError, RuntimeMissingError.
    """
    from intaglio.engines.nvidia.cuda_session import CudaSession, check_provider, gpu_providers

    provider = read_cuda_options(identity.options).provider
    check_provider(provider)
    providers = gpu_providers(provider, artifact.with_suffix(".trt-cache"), memory_budget)
    return CudaSession(name, artifact / _GRAPH, _interface(stage), identity.shapes, providers)


def load_for_parity(name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> CudaSession:
    """The lowered graph on the CPU's provider: what can be compared where no GPU is. Raises EngineError."""
    from intaglio.engines.nvidia.cuda_session import CudaSession

    return CudaSession(name, artifact / _GRAPH, _interface(stage), identity.shapes, [], device="cpu")


def _interface(stage: Interface) -> Interface:
    from intaglio.engines.stage_interface import runs_as
    from intaglio.exporters.bundle import StageInfo

    return runs_as(stage) if isinstance(stage, StageInfo) else stage
