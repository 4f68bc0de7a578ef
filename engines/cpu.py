"""The target ``cpu``: onnxruntime with our kernels as a custom-op library."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.bind_kernels import BindKernelsPass
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.report import StageReport
from intaglio.engines.shapes import check_feeds, smallest_sizes
from intaglio.errors import CompileError, EngineError
from intaglio.exporters.bundle import Dim, StageInfo
from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.functions import DOMAIN

ACCURACIES = ("exact",)
_KERNEL_OPS, _KERNEL_BITS = ("GroupedQuantMatMul",), (2, 4, 8)


def compiler() -> str:
    """Name and version of what builds."""
    return f"onnxruntime {import_onnxruntime().__version__}"


def lower(model: ir.Model) -> ir.Model:
    """Lowers a portable stage for onnxruntime on the CPU, in place."""
    BindKernelsPass(_KERNEL_OPS, _KERNEL_BITS)(model)
    return model


def build(graph: Path, weights_folder: Path, stage: StageInfo, dims: Mapping[str, Dim], accuracy: str) -> StageReport:
    """Loads a lowered graph and runs it once at the smallest shapes, in a child process: a compiler can crash.

    Raises CompileError with the child's own message.
    """
    started = time.monotonic()
    request = {
        "graph": str(graph),
        "weights_folder": str(weights_folder),
        "stage": stage.model_dump(),
        "dims": {name: dim.model_dump() for name, dim in dims.items()},
    }
    command = [sys.executable, "-m", "intaglio.engines.cpu_build"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise CompileError(f"{graph.stem}: onnxruntime {how} while building: {last[0]}")
    result = json.loads(done.stdout.splitlines()[-1])
    weight_bytes, weight_count = weight_size(ir.load(graph))
    operators = result["operators"]
    return StageReport(
        dtype="float32",
        accuracy=accuracy,
        weight_bytes=weight_bytes,
        weight_count=weight_count,
        bits_per_weight=round(8 * weight_bytes / weight_count, 3) if weight_count else 0.0,
        attention_fused=operators.get("Attention", 0),
        attention_total=_count(graph, "Attention", ""),
        fallbacks=_fallbacks(graph),
        operators=operators,
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=result["peak_rss_bytes"],
    )


def weight_size(model: ir.Model) -> tuple[int, int]:
    """Bytes of the weights a graph reads, and how many weights they stand for."""
    bits: dict[str, int] = {}
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and "bits" in node.attributes:
            for value in node.inputs:
                source = _gathered_from(value)
                if source is not None and source.dtype == ir.DataType.UINT8:
                    bits[str(source.name)] = node.attributes["bits"].as_int()
    total = count = 0
    for name, value in model.graph.initializers.items():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        total += value.const_value.nbytes
        if name in bits:
            count += value.const_value.nbytes * 8 // bits[name]
        elif not name.endswith((".scales", ".offsets")):
            count += value.const_value.size
    return int(total), int(count)


def _gathered_from(value: ir.Value | None) -> ir.Value | None:
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "Gather" else value


def _count(graph: Path, op_type: str, domain: str) -> int:
    return sum(node.op_type == op_type and node.domain == domain for node in ir.load(graph).graph.all_nodes())


def _fallbacks(graph: Path) -> dict[str, int]:
    # What still has a body in the file runs as that body.
    model = ir.load(graph)
    with_body = {key[1] for key in model.functions if key[0] == DOMAIN}
    return dict(Counter(node.op_type for node in model.graph.all_nodes() if node.op_type in with_body))


class CpuSession:
    """A loaded stage. ``run`` takes and gives NumPy arrays; outputs named ``resident`` stay as the runtime's own
    values, which the next run takes as they are (a key-value cache is not copied out and in)."""

    def __init__(
        self,
        name: str,
        graph: Path,
        weights_folder: Path,
        stage: StageInfo,
        dims: Mapping[str, Dim],
        *,
        threads: int = 0,
        profile: Path | None = None,
    ) -> None:
        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._ort = import_onnxruntime()
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # The lowered graph is in the engine's folder, the weights stay where the bundle has them.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(weights_folder.resolve())
        )
        # Otherwise onnxruntime may turn a dequantized MatMul into one with 8-bit activations.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        try:
            options.register_custom_ops_library(str(library_path()))
            self._session = self._ort.InferenceSession(graph.read_bytes(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no common base of their own
            raise EngineError(f"{graph}: onnxruntime cannot load it: {error}") from error

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: Collection[str] | None = None,
        *,
        resident: Collection[str] = (),
    ) -> dict[str, Any]:
        """Runs the stage. ``outputs`` chooses by name (all by default).

        Raises InputError on wrong inputs, EngineError if the run fails.
        """
        check_feeds(self.name, self.stage, self.dims, feeds)
        names = [tensor.name for tensor in self.stage.outputs if outputs is None or tensor.name in outputs]
        try:
            values = {
                name: self._ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in feeds.items()
            }
            results = self._session.run_with_ort_values(names, values)
        except Exception as error:
            raise EngineError(f"{self.name}: the run failed: {error}") from error
        return {name: value if name in resident else value.numpy() for name, value in zip(names, results, strict=True)}

    def end_profiling(self) -> Path:
        """Stops profiling and returns the file that onnxruntime wrote."""
        return Path(self._session.end_profiling())


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


def smallest_feeds(stage: StageInfo, dims: Mapping[str, Dim]) -> dict[str, np.ndarray]:
    """Inputs of the smallest allowed shapes: ones for masks, zeros otherwise."""
    sizes = smallest_sizes(dims)
    feeds = {}
    for tensor in stage.inputs:
        shape = [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
        fill = 1 if tensor.name == "attention_mask" else 0
        feeds[tensor.name] = np.full(shape, fill, np.dtype(tensor.dtype))
    return feeds


def run_once(graph: Path, weights_folder: Path, stage: StageInfo, dims: Mapping[str, Dim]) -> dict[str, int]:
    """Counts the operators of one run at the smallest shapes. Raises EngineError on outputs that are not finite."""
    with tempfile.TemporaryDirectory(prefix="intaglio-build-") as folder:
        session = CpuSession(graph.stem, graph, weights_folder, stage, dims, profile=Path(folder) / "profile")
        outputs = session.run(smallest_feeds(stage, dims))
        events = json.loads(session.end_profiling().read_text("utf-8"))
    bad = [name for name, value in outputs.items() if value.dtype.kind == "f" and not np.isfinite(value).all()]
    if bad:
        raise EngineError(f"{graph.stem}: the outputs {', '.join(bad)} are not finite at the smallest shapes")
    return dict(
        Counter(e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e.get("args", {}))
    )
