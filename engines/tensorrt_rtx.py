"""The target ``tensorrt-rtx``: engines for NVIDIA's consumer GPUs, built ahead of time on any machine.

Imports neither TensorRT nor a graph library: opening an engine needs none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines.child import REFUSED, how_it_ended, run_child
from intaglio.engines.nvidia.cache_buffers import context_of
from intaglio.engines.nvidia.options import read_rtx_options
from intaglio.engines.report import StageReport, bits_per_weight
from intaglio.engines.shapes import fit_context
from intaglio.errors import CompileError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.nvidia.session import GpuSession
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.engines.shapes import Interface, Tensor
    from intaglio.exporters.bundle import Dim, StageInfo
    from intaglio.progress import ProgressCallback

ACCURACIES = ("exact",)
DOMAINS = frozenset({DOMAIN, "com.microsoft"})
INPUT_DTYPES = frozenset({"bool", "float16", "float32", "int8", "uint8", "int32", "int64"})
SUFFIX = ".engine"
KEEPS_MODEL = False
SOURCES = ("tensorrt_rtx.py", "nvidia/*.py")
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


def fit_dims(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """Bounds the length of a key-value cache, which is of a fixed size here, where nobody did."""
    return fit_context(dims, declared)


def digest(artifact: Path) -> str:
    """The hash of the engine."""
    with artifact.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def build(
    graph: Path,
    artifact: Path,
    stage: StageInfo,
    identity: Identity,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Lowers the portable ``graph`` and builds the engine ``artifact``, in a child process: the compiler can crash.

    Raises CompileError with the child's own message, CancelledError.
    """
    context = context_of(stage.inputs, identity.shapes)
    return build_in_child(graph, artifact, stage.inputs, identity, progress, context)


def build_model(
    graph: Path, artifact: Path, described: OnnxFile, identity: Identity, given: frozenset[str]
) -> StageReport:
    """Likewise, of an ONNX file that others wrote."""
    return build_in_child(graph, artifact, described.inputs, identity, None)


def build_in_child(
    graph: Path,
    artifact: Path,
    inputs: tuple[Tensor, ...],
    identity: Identity,
    progress: ProgressCallback | None,
    context: int = 0,
) -> StageReport:
    """Builds for either flavour of TensorRT, as the identity says. Raises CompileError, CancelledError."""
    started = time.monotonic()
    variants = identity.variants or (identity.shapes,)
    request = {
        "flavour": identity.target,
        "graph": str(graph),
        "artifact": str(artifact),
        "inputs": [{"name": each.name, "dtype": each.dtype, "shape": each.shape} for each in inputs],
        "variants": [{name: dim.model_dump() for name, dim in dims.items()} for dims in variants],
        "options": identity.options,
        "context": context,
        "measured": [identity.compiler, identity.device],
    }
    done = run_child("nvidia.build", request, progress)
    if done.returncode == REFUSED and done.stderr.strip():
        raise CompileError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise CompileError(f"{graph.stem}: TensorRT {how_it_ended(done)}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return StageReport(
        **result,
        accuracy=identity.accuracy,
        bits_per_weight=bits_per_weight(result["weight_bytes"], result["weight_count"]),
        seconds=round(time.monotonic() - started, 3),
    )


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


def load_for_parity(name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> Any:
    """The graph that TensorRT was given, run by onnxruntime: an engine runs on a GPU only. Raises EngineError."""
    from intaglio.engines.nvidia.evaluation import LoweredGraph
    from intaglio.engines.stage_interface import runs_as
    from intaglio.exporters.bundle import StageInfo

    assert isinstance(stage, StageInfo), "the graph of an ONNX file is not kept"
    context = context_of(stage.inputs, identity.shapes)
    return LoweredGraph(name, weights / stage.file, runs_as(stage), identity.shapes, identity.options, context)
