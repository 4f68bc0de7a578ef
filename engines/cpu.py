"""The target ``cpu``: onnxruntime with our kernels as a custom-op library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.report import StageReport
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim, StageInfo, TensorInfo
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

ACCURACIES = ("exact",)
_KERNEL_OPS, _KERNEL_BITS = ("GroupedQuantMatMul",), (2, 4, 8)
_DTYPE = "intaglio.dtype"  # in a lowered graph: what the report is to say


def compiler() -> str:
    """Name and version of what builds."""
    return f"onnxruntime {import_onnxruntime().__version__}"


def lower(model: ir.Model) -> ir.Model:
    """Lowers a portable stage for onnxruntime on the CPU, in place."""
    import onnx_ir as ir

    from intaglio.engines.graph_stats import activation_dtype
    from intaglio.engines.lowering.bind_kernels import BindKernelsPass
    from intaglio.engines.lowering.widen_dtype import WidenDtypePass
    from intaglio.engines.lowering.widen_products import WidenProductsPass

    asked = activation_dtype(model)
    said = {"bfloat16": "float32 (widened from bfloat16)", "float16": "float16 (products in float32)"}
    model.metadata_props[_DTYPE] = said.get(asked, asked)
    # onnxruntime's CPU has no product of bfloat16, and one of float16 only on some processors.
    WidenDtypePass(ir.DataType.BFLOAT16, [DOMAIN])(model)
    WidenProductsPass({(DOMAIN, "GroupedQuantMatMul"): (0,), ("", "MatMul"): (0, 1)})(model)
    BindKernelsPass(_KERNEL_OPS, _KERNEL_BITS)(model)
    return model


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

    from intaglio.engines.graph_stats import count_fallbacks, count_nodes, weight_size, widened_bytes

    started = time.monotonic()
    request = {
        "graph": str(graph),
        "weights_folder": str(weights_folder),
        "stage": runs_as(stage).model_dump(),
        "dims": {name: dim.model_dump() for name, dim in dims.items()},
    }
    command = [sys.executable, "-m", "intaglio.engines.cpu_build"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise CompileError(f"{graph.stem}: onnxruntime {how} while building: {last[0]}")
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
        attention_fused=operators.get("Attention", 0),
        attention_total=count_nodes(model, "Attention"),
        fallbacks=count_fallbacks(model),
        operators=operators,
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
    )


def load(
    name: str,
    graph: Path,
    weights_folder: Path,
    stage: StageInfo,
    dims: Mapping[str, Dim],
    *,
    threads: int = 0,
) -> CpuSession:
    """Loads a built stage; ``threads`` 0 takes one a core."""
    return CpuSession(name, graph, weights_folder, runs_as(stage), dims, threads=threads)
