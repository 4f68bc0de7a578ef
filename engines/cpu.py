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
from intaglio.exporters.bundle import Dim, StageInfo

if TYPE_CHECKING:
    import onnx_ir as ir

ACCURACIES = ("exact",)
_KERNEL_OPS, _KERNEL_BITS = ("GroupedQuantMatMul",), (2, 4, 8)


def compiler() -> str:
    """Name and version of what builds."""
    return f"onnxruntime {import_onnxruntime().__version__}"


def lower(model: ir.Model) -> ir.Model:
    """Lowers a portable stage for onnxruntime on the CPU, in place."""
    from intaglio.engines.lowering.bind_kernels import BindKernelsPass

    BindKernelsPass(_KERNEL_OPS, _KERNEL_BITS)(model)
    return model


def build(graph: Path, weights_folder: Path, stage: StageInfo, dims: Mapping[str, Dim], accuracy: str) -> StageReport:
    """Loads a lowered graph and runs it once at the smallest shapes, in a child process: a compiler can crash.

    Raises CompileError with the child's own message.
    """
    import onnx_ir as ir

    from intaglio.engines.graph_stats import count_fallbacks, count_nodes, weight_size

    started = time.monotonic()
    request = {
        "graph": str(graph),
        "weights_folder": str(weights_folder),
        "stage": stage.model_dump(),
        "dims": {name: dim.model_dump() for name, dim in dims.items()},
    }
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", "intaglio.engines.cpu_build"]
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
        dtype="float32",
        accuracy=accuracy,
        weight_bytes=weight_bytes,
        weight_count=weight_count,
        bits_per_weight=round(8 * weight_bytes / weight_count, 3) if weight_count else 0.0,
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
    return CpuSession(name, graph, weights_folder, stage, dims, threads=threads)
