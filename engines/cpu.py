"""The target ``cpu``: onnxruntime with our kernels as a custom-op library."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.engines.child import REFUSED, how_it_ended, run_child
from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.report import StageReport, bits_per_weight
from intaglio.engines.shapes import Interface
from intaglio.engines.stage_interface import runs_as
from intaglio.errors import CompileError, InputError
from intaglio.exporters.bundle import Dim, StageInfo
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

    from intaglio.engines.identity import Identity
    from intaglio.engines.onnx_file import OnnxFile
    from intaglio.progress import ProgressCallback

ACCURACIES = ("exact", "fast")
SUFFIX = ".onnx"
# The engine of an ONNX file is that file.
KEEPS_MODEL = True
NOTES: tuple[str, ...] = ()
BUILD_TOOLS: tuple[str, ...] = ()
SOURCES = ("cpu.py",)
# Whose operators it has, besides those of ONNX itself.
DOMAINS = frozenset(
    {
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        DOMAIN,
    }
)
# What both it and NumPy hold.
INPUT_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_KERNEL_OPS, _KERNEL_BITS = ("GroupedQuantMatMul",), (2, 4, 8)
_DTYPE = "intaglio.dtype"  # in a lowered graph: what the report is to say


def compiler() -> str:
    """Name and version of what builds."""
    return f"onnxruntime {import_onnxruntime().__version__}"


def device() -> str:
    """The machine's kind: what a built stage runs on."""
    return f"{platform.system()} {platform.machine()}"


def check_options(options: Mapping[str, str], sets_of_sizes: int) -> dict[str, str]:
    """There are none. Raises InputError."""
    if "dtype" in options:
        raise InputError("--dtype: the target cpu computes in the bundle's dtype; export with --dtype instead")
    if options:
        raise InputError(f"--{next(iter(options)).replace('_', '-')}: is no option of the target cpu")
    if sets_of_sizes > 1:
        raise InputError("--shapes: the target cpu takes every size in a range; give it once, NAME=MIN:OPT:MAX")
    return {}


def fit_dims(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """As they are."""
    return dict(dims)


def lower(model: ir.Model, accuracy: str) -> ir.Model:
    """Lowers a portable stage for onnxruntime on the CPU, in place. ``fast`` rounds activations to 8 bits in products
    with packed weights."""
    import onnx_ir as ir

    from intaglio.engines.graph_stats import activation_dtype
    from intaglio.engines.lowering.bind_kernels import BindKernelsPass
    from intaglio.engines.lowering.fast_products import FastProductsPass
    from intaglio.engines.lowering.fuse_attention import FuseAttentionPass
    from intaglio.engines.lowering.fuse_conv import FuseConvPass
    from intaglio.engines.lowering.fuse_rows import fuse_rows
    from intaglio.engines.lowering.group_norm import GroupNormPass
    from intaglio.engines.lowering.widen_dtype import WidenDtypePass
    from intaglio.engines.lowering.widen_products import WidenProductsPass

    is_fast = accuracy == "fast"
    asked = activation_dtype(model)
    said = {"bfloat16": "float32 (widened from bfloat16)", "float16": "float16 (products in float32)"}
    model.metadata_props[_DTYPE] = said.get(asked, asked)
    # onnxruntime's CPU has no product of bfloat16, and one of float16 only on some processors.
    WidenDtypePass(ir.DataType.BFLOAT16, [DOMAIN])(model)
    FuseAttentionPass(is_fast=is_fast)(model)
    FuseConvPass(fast=is_fast)(model)
    # onnxruntime's own adds up a group in one float32.
    GroupNormPass()(model)
    WidenProductsPass({(DOMAIN, "GroupedQuantMatMul"): (0,), ("", "MatMul"): (0, 1)})(model)
    BindKernelsPass(_KERNEL_OPS, _KERNEL_BITS)(model)
    if is_fast:
        FastProductsPass()(model)
    fuse_rows(model)
    return model


def build_model(
    graph: Path,
    artifact: Path,
    described: OnnxFile,
    identity: Identity,
    given: frozenset[str],
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Checks an ONNX file that others wrote, loads it and runs it at the smallest sizes it takes, in a child process.

    It is built as it is: ``artifact`` is ``graph``. ``given`` are the dims that somebody bounded. Raises CompileError
    with the child's own message.
    """
    from intaglio.engines.model_engine import ModelInterface

    started = time.monotonic()
    request = {
        "graph": str(graph),
        "interface": ModelInterface(inputs=described.inputs, outputs=described.outputs).model_dump(),
        "dims": {name: dim.model_dump() for name, dim in identity.shapes.items()},
        "given": sorted(given),
    }
    done = run_child("model_build", request)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    crashed_in_trial = done.returncode < 0 and bool(lines)
    if done.returncode == REFUSED and done.stderr.strip():
        # The child's own message; the folder that the graph lies in is gone by the time it is read.
        raise CompileError(done.stderr.strip().splitlines()[-1].replace(str(graph), graph.name))
    if done.returncode and not crashed_in_trial:
        raise CompileError(f"{graph.name}: onnxruntime {how_it_ended(done)}")
    result = {"operators": {}, "sizes": {}, "peak_rss_bytes": 0, **lines[-1]}
    notes = []
    if crashed_in_trial:
        sizes = result.get("trying") or "the declared shapes"
        notes.append(f"the trial run was not possible: onnxruntime was ended by signal {-done.returncode} at {sizes}")
    elif "failed" in result:
        notes.append(f"the trial run was not possible: {result['failed']}. Give sizes that fit with --shapes")
    elif result["not_finite"]:
        notes.append(f"fed with zeros, the outputs {', '.join(result['not_finite'])} are not finite")
    attentions = described.operators.get("Attention", 0)
    return StageReport(
        dtype=identity.dtype,
        accuracy=identity.accuracy,
        weight_bytes=described.weight_bytes,
        weight_count=described.weight_count,
        bits_per_weight=bits_per_weight(described.weight_bytes, described.weight_count),
        attention_fused=min(attentions, result["operators"].get("Attention", 0)),
        attention_total=attentions,
        fallbacks={},
        operators=result["operators"],
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
        trial_sizes=result["sizes"],
        notes=tuple(notes),
    )


def build(
    graph: Path,
    artifact: Path,
    stage: StageInfo,
    identity: Identity,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Lowers the portable ``graph`` to ``artifact``, loads that and runs it once at the smallest shapes, in a child
    process: a compiler can crash. Raises CompileError with the child's own message.
    """
    import onnx_ir as ir

    from intaglio.engines.graph_stats import (
        count_exact_products,
        count_fallbacks,
        count_nodes,
        weight_size,
        widened_bytes,
    )

    started = time.monotonic()
    lowered = lower(ir.load(graph), identity.accuracy)
    artifact.write_bytes(ir.serde.serialize_model(lowered).SerializeToString(deterministic=True))
    request = {
        "graph": str(artifact),
        "weights_folder": str(graph.parent),
        "stage": runs_as(stage).model_dump(),
        "dims": {name: dim.model_dump() for name, dim in identity.shapes.items()},
    }
    done = run_child("cpu_build", request)
    if done.returncode:
        raise CompileError(f"{artifact.stem}: onnxruntime {how_it_ended(done)}")
    result = json.loads(done.stdout.splitlines()[-1])
    model = ir.load(artifact)
    weight_bytes, weight_count = weight_size(model)
    operators = result["operators"]
    return StageReport(
        dtype=model.metadata_props[_DTYPE],
        accuracy=identity.accuracy,
        weight_bytes=weight_bytes,
        weight_count=weight_count,
        bits_per_weight=bits_per_weight(weight_bytes, weight_count),
        widened_bytes=widened_bytes(model),
        attention_fused=operators.get("Attention", 0) + operators.get("FusedAttention", 0),
        attention_total=count_nodes(model, "Attention") + count_nodes(model, "FusedAttention", DOMAIN),
        fallbacks=count_fallbacks(model),
        exact_products=count_exact_products(model) if identity.accuracy == "fast" else {},
        instruction_set=result["instruction_set"],
        operators=operators,
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
    )


def load(
    name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity, *, threads: int = 0
) -> CpuSession:
    """Loads a built stage, or a model that others wrote; ``threads`` 0 takes one a core."""
    interface = runs_as(stage) if isinstance(stage, StageInfo) else stage
    return CpuSession(name, artifact, weights, interface, identity.shapes, threads=threads)


def check_runs(*, threads: int = 0) -> None:
    """It runs wherever it is built."""


def load_for_parity(name: str, artifact: Path, weights: Path, stage: Interface, identity: Identity) -> CpuSession:
    """The same: it runs where it was built."""
    return load(name, artifact, weights, stage, identity)
