"""The target ``coreml``: ONNX graphs as Core ML packages, built with coremltools on any machine.

Imports neither coremltools nor a graph library: opening an engine needs none.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines.child import build_in_child
from intaglio.engines.coreml.options import read_options
from intaglio.engines.shapes import fit_context
from intaglio.errors import EngineError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.engines.report import StageReport
    from intaglio.engines.shapes import Interface
    from intaglio.exporters.bundle import Dim, StageInfo
    from intaglio.progress import ProgressCallback

ACCURACIES = ("exact",)
# Operators of others are refused one by one, with the node's name.
DOMAINS = frozenset({DOMAIN, "ai.onnx.ml", "com.microsoft"})
INPUT_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
SUFFIX = ".mlpackage"
KEEPS_MODEL = False
NOTES: tuple[str, ...] = ()
BUILD_TOOLS: tuple[str, ...] = ()
# What runs packages has no part in building them; of the evaluator, what the report's counts are read with has.
_RUNS = ("cache_calls.py", "models.py", "session.py", "supported.py")
_HERE = Path(__file__).parent
SOURCES = (
    *(f"coreml/{file.name}" for file in _HERE.glob("*.py") if file.name not in _RUNS),
    "coreml/ops/*.py",
    *(f"coreml/evaluator/{name}.py" for name in ("blobs", "package", "program")),
)


def compiler() -> str:
    """Name and version of what builds. Raises RuntimeMissingError."""
    try:
        return f"coremltools {importlib.metadata.version('coremltools')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeMissingError(
            "coremltools is not installed. Install intaglio with its extra `coreml`: "
            "from a checkout, pip install '.[coreml]'"
        ) from error


def device() -> str:
    """What a package runs on, wherever it was built."""
    return "Core ML"


def check_options(options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
    """The options with their defaults. Raises InputError."""
    return {name: str(value) for name, value in read_options(options) if value is not None}


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
    """Converts the portable ``graph`` into the package ``artifact``, in a child process: that bounds what it holds.

    Raises CompileError, RuntimeMissingError with the child's own message.
    """
    return _build(graph, artifact, stage, identity, is_foreign=False)


def build_model(
    graph: Path,
    artifact: Path,
    described: OnnxFile,
    identity: Identity,
    given: frozenset[str],
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Likewise, of an ONNX file that others wrote."""
    return _build(graph, artifact, described, identity, is_foreign=True)


def _build(graph: Path, artifact: Path, interface: Interface, identity: Identity, *, is_foreign: bool) -> StageReport:
    variants = identity.variants or (identity.shapes,)
    request = {
        "graph": str(graph),
        "artifact": str(artifact),
        # With names for dims that the file has none for.
        "inputs": {tensor.name: tensor.shape for tensor in interface.inputs if tensor.shape is not None},
        "shapes": {name: dim.model_dump() for name, dim in identity.shapes.items()},
        "variants": [{name: dim.model_dump() for name, dim in dims.items()} for dims in variants],
        "options": identity.options,
        "is_foreign": is_foreign,
    }
    return build_in_child("coreml.building", request, identity, name=graph.name, compiler="coremltools")


def load(
    name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity, *, compute_units: str = "all"
) -> Any:
    """Loads a built stage on a Mac. Raises EngineError elsewhere, and where Core ML refuses it."""
    from intaglio.engines.coreml.models import open_stage

    check_runs(compute_units=compute_units)
    return open_stage(name, artifact, stage, identity.shapes, compute_units)


def check_runs(*, compute_units: str = "all") -> None:
    """Raises EngineError on a system without Core ML, InputError for compute units that there are not."""
    from intaglio.engines.coreml.models import check_compute_units, is_mac

    check_compute_units(compute_units)
    if not is_mac():
        raise EngineError(
            "Core ML runs on macOS 15 or later, and this is another system; copy the bundle, engines and all, to a "
            "Mac. `intaglio parity --target coreml` evaluates the packages here"
        )


def load_for_parity(name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> Any:
    """On a Mac the stage as it runs there; elsewhere the evaluator, which reads the package. Raises EngineError."""
    from intaglio.engines.coreml.models import open_stage

    return open_stage(name, artifact, stage, identity.shapes, "all")
