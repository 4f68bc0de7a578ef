"""What the two flavours of TensorRT share: one kind of artifact, built in a child process, since compilers crash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines.child import build_in_child
from intaglio.engines.nvidia.cache_buffers import context_of
from intaglio.engines.shapes import fit_context
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.engines.report import StageReport
    from intaglio.engines.shapes import Interface, Tensor
    from intaglio.exporters.bundle import Dim, StageInfo
    from intaglio.progress import ProgressCallback

ACCURACIES = ("exact",)
DOMAINS = frozenset({DOMAIN, "com.microsoft"})
INPUT_DTYPES = frozenset({"bool", "float16", "float32", "int8", "uint8", "int32", "int64"})
SUFFIX = ".engine"
KEEPS_MODEL = False
# An engine cannot be looked into without a driver.
NOTES = (
    "dtypes, bits and attentions are those of the graphs that TensorRT was given; what it made of them only a machine "
    "with a GPU can tell",
)


def fit_dims(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """Bounds the length of a key-value cache, which is of a fixed size here, where nobody did."""
    return fit_context(dims, declared)


def build(
    graph: Path,
    artifact: Path,
    stage: StageInfo,
    identity: Identity,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Lowers the portable ``graph`` and builds the engine ``artifact``, in a child process: the compiler can crash.

    A key-value cache becomes buffers of as many tokens as the identity's dims allow.

    Raises CompileError with the child's own message, CancelledError.
    """
    return _build(graph, artifact, stage.inputs, identity, progress, context=context_of(stage.inputs, identity.shapes))


def build_model(
    graph: Path,
    artifact: Path,
    described: OnnxFile,
    identity: Identity,
    given: frozenset[str],
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Likewise, of an ONNX file that others wrote, which is checked first."""
    return _build(graph, artifact, described.inputs, identity, progress, is_foreign=True)


def _build(
    graph: Path,
    artifact: Path,
    inputs: tuple[Tensor, ...],
    identity: Identity,
    progress: ProgressCallback | None,
    *,
    context: int = 0,
    is_foreign: bool = False,
) -> StageReport:
    variants = identity.variants or (identity.shapes,)
    request = {
        "flavour": identity.target,
        "graph": str(graph),
        "artifact": str(artifact),
        "inputs": [{"name": each.name, "dtype": each.dtype, "shape": each.shape} for each in inputs],
        "variants": [{name: dim.model_dump() for name, dim in dims.items()} for dims in variants],
        "options": identity.options,
        "context": context,
        "is_foreign": is_foreign,
        "measured": [identity.compiler, identity.device],
    }
    return build_in_child("nvidia.building", request, identity, name=graph.stem, compiler="TensorRT", progress=progress)


def load_for_parity(name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> Any:
    """The graph that TensorRT was given, run by onnxruntime: an engine runs on a GPU only.

    What plugins compute it is told. Raises EngineError.
    """
    from intaglio.engines.nvidia.evaluation import LoweredGraph
    from intaglio.engines.stage_interface import runs_as
    from intaglio.exporters.bundle import StageInfo

    assert isinstance(stage, StageInfo), "the graph of an ONNX file is not kept"
    context = context_of(stage.inputs, identity.shapes)
    flavour = identity.target
    return LoweredGraph(name, weights / stage.file, runs_as(stage), identity.shapes, identity.options, context, flavour)
