"""The target ``cpu``: onnxruntime with our kernels as a custom-op library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.report import StageReport
from intaglio.engines.shapes import Interface
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim, StageInfo, TensorInfo
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

    from intaglio.engines.model_engine import ModelInterface

ACCURACIES = ("exact", "fast")
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
# What a child process exits with when it has said why on stderr.
_REFUSED = 2
_KERNEL_OPS, _KERNEL_BITS = ("GroupedQuantMatMul",), (2, 4, 8)
_DTYPE = "intaglio.dtype"  # in a lowered graph: what the report is to say


def compiler() -> str:
    """Name and version of what builds."""
    return f"onnxruntime {import_onnxruntime().__version__}"


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
    graph: Path, interface: ModelInterface, dims: Mapping[str, Dim], given: frozenset[str]
) -> dict[str, Any]:
    """Checks an ONNX file that others wrote, loads it and runs it at the smallest sizes it takes, in a child process.

    Gives ``operators`` and ``sizes`` of that run (empty if none was possible), ``notes``, ``seconds`` and
    ``peak_rss_bytes``. ``given`` are the dims that somebody bounded. Raises CompileError with the child's own message.
    """
    started = time.monotonic()
    request = {
        "graph": str(graph),
        "interface": interface.model_dump(),
        "dims": {name: dim.model_dump() for name, dim in dims.items()},
        "given": sorted(given),
    }
    done = _run_child("model_build", request)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    crashed_in_trial = done.returncode < 0 and bool(lines)
    if done.returncode == _REFUSED and done.stderr.strip():
        # The child's own message; the folder that the graph lies in is gone by the time it is read.
        raise CompileError(done.stderr.strip().splitlines()[-1].replace(str(graph), graph.name))
    if done.returncode and not crashed_in_trial:
        raise CompileError(f"{graph.name}: onnxruntime {_how_it_ended(done)}")
    result = {"operators": {}, "sizes": {}, "peak_rss_bytes": 0, **lines[-1]}
    notes = []
    if crashed_in_trial:
        sizes = result.get("trying") or "the declared shapes"
        notes.append(f"the trial run was not possible: onnxruntime was ended by signal {-done.returncode} at {sizes}")
    elif "failed" in result:
        notes.append(f"the trial run was not possible: {result['failed']}. Give sizes that fit with --shapes")
    elif result["not_finite"]:
        notes.append(f"fed with zeros, the outputs {', '.join(result['not_finite'])} are not finite")
    return {
        "operators": result["operators"],
        "sizes": result["sizes"],
        "notes": notes,
        "seconds": round(time.monotonic() - started, 3),
        "peak_rss_bytes": result["peak_rss_bytes"],
    }


def runs_as(stage: StageInfo) -> StageInfo:
    """What a loaded stage takes and gives: float32 in place of bfloat16.

    A widened graph takes its cache in float32 too: at the edges there would be a cast of the whole cache at every
    token, and neither NumPy nor onnxruntime's Python face has a bfloat16 of its own.
    """

    def widened(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        return tuple(t.model_copy(update={"dtype": "float32"}) if t.dtype == "bfloat16" else t for t in tensors)

    return stage.model_copy(update={"inputs": widened(stage.inputs), "outputs": widened(stage.outputs)})


def build(graph: Path, weights_folder: Path, stage: StageInfo, dims: Mapping[str, Dim], accuracy: str) -> StageReport:
    """Loads a lowered graph and runs it once at the smallest shapes, in a child process: a compiler can crash.

    Raises CompileError with the child's own message.
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
    request = {
        "graph": str(graph),
        "weights_folder": str(weights_folder),
        "stage": runs_as(stage).model_dump(),
        "dims": {name: dim.model_dump() for name, dim in dims.items()},
    }
    done = _run_child("cpu_build", request)
    if done.returncode:
        raise CompileError(f"{graph.stem}: onnxruntime {_how_it_ended(done)}")
    result = json.loads(done.stdout.splitlines()[-1])
    model = ir.load(graph)
    weight_bytes, weight_count = weight_size(model)
    operators = result["operators"]
    return StageReport(
        dtype=model.metadata_props[_DTYPE],
        accuracy=accuracy,
        weight_bytes=weight_bytes,
        weight_count=weight_count,
        bits_per_weight=round(8 * weight_bytes / weight_count, 3) if weight_count else 0.0,
        widened_bytes=widened_bytes(model),
        attention_fused=operators.get("Attention", 0) + operators.get("FusedAttention", 0),
        attention_total=count_nodes(model, "Attention") + count_nodes(model, "FusedAttention", DOMAIN),
        fallbacks=count_fallbacks(model),
        exact_products=count_exact_products(model) if accuracy == "fast" else {},
        instruction_set=result["instruction_set"],
        operators=operators,
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
    )


def _run_child(module: str, request: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", f"intaglio.engines.{module}"]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"{how} while building: {last[0]}"


def load(
    name: str,
    graph: Path,
    weights_folder: Path,
    stage: Interface,
    dims: Mapping[str, Dim],
    *,
    threads: int = 0,
) -> CpuSession:
    """Loads a built stage, or a model that others wrote; ``threads`` 0 takes one a core."""
    interface = runs_as(stage) if isinstance(stage, StageInfo) else stage
    return CpuSession(name, graph, weights_folder, interface, dims, threads=threads)
