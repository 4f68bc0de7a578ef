"""The machine that a benchmark runs on, and its ceilings, measured in the same run."""

from __future__ import annotations

import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.onnxruntime_ import import_onnxruntime


def describe_machine(threads: int) -> dict[str, Any]:
    """Processor, threads and system."""
    return {"processor": _processor(), "threads": threads or os.cpu_count(), "system": platform.platform()}


# Of what Linux says a processor has, what decides how fast products are.
_FEATURES = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def processor_features() -> list[str]:
    """Instructions for products that the system says the processor has; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
    found = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    return [name for name in _FEATURES if name in found]


def load_average() -> float | None:
    """How many threads wanted to run, on average of the last minute: what else the machine does. None on Windows."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def available_bytes() -> int:
    """Memory that programs can take without swapping; 0 where the system does not say. Linux only."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which ``threads`` threads read memory."""
    # Larger than any cache of today's desktops; each thread sums its own part.
    parts = [np.ones((32 << 20) // threads, np.float64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.add.reduce, parts))  # starts the threads
        started = time.perf_counter()
        list(pool.map(np.add.reduce, parts))
        return sum(part.nbytes for part in parts) / (time.perf_counter() - started)


class Float32MatMul:
    """onnxruntime's float32 product of ``[1536, 3072]`` and ``[3072, 9216]``, that of a picture's transformer."""

    def __init__(self, threads: int) -> None:
        import onnx_ir as ir

        ort = import_onnxruntime()
        self._shapes = (1536, 3072), (3072, 9216)
        values = [
            ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
            for name, shape in zip("ab", self._shapes, strict=True)
        ]
        node = ir.node("MatMul", values)
        node.outputs[0].name = "y"
        graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="matmul")
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_cpu_mem_arena = False  # which would stay in the memory that is measured
        data = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
        self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def operations_per_second(self) -> float:
        """Of one run, an operation being one multiplication or one addition."""
        feeds = {name: np.ones(shape, np.float32) for name, shape in zip("ab", self._shapes, strict=True)}
        started = time.perf_counter()
        self._session.run(None, feeds)
        (m, k), (_, n) = self._shapes
        return 2 * m * k * n / (time.perf_counter() - started)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
