"""ONNX files given to TensorRT-RTX's parser and builder in a child process: its compiler can crash, and needs no GPU.

What is built is not run: nothing here has a driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The least, the usual and the greatest size of a named dim.
Range = tuple[int, int, int]
_SECONDS = 600


@dataclass(frozen=True)
class Built:
    """What became of a file: ``layers`` of the parsed network by type, ``engine_bytes`` 0 where none was built."""

    failure: str
    layers: dict[str, int]
    engine_bytes: int
    messages: tuple[str, ...]


def require_tensorrt_rtx() -> None:
    """Skips what needs TensorRT for RTX where it is not installed, unless INTAGLIO_REQUIRE_MODELS is set."""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None and not os.environ.get("INTAGLIO_REQUIRE_MODELS"):
        pytest.skip("TensorRT for RTX is not installed (extra tensorrt-rtx)", allow_module_level=True)


def build_for_gpu(graph: Path, dims: Mapping[str, int | Range], sms: Sequence[int] = (86,)) -> Built:
    """Parses and builds ``graph`` for the compute capabilities ``sms``; ``dims`` are those of its inputs by name."""
    require_tensorrt_rtx()
    request = {"graph": str(graph), "dims": dict(dims), "sms": list(sms)}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        tail = tuple(done.stderr.splitlines()[-8:])
        return Built(f"the builder ended with {done.returncode}", {}, 0, tail)
    return Built(**json.loads(done.stdout.splitlines()[-1]))


def parse_for_gpu(graphs: Sequence[Path]) -> dict[str, str]:
    """Parses ``graphs`` one after the other in one child process: what failed, by name; a crash is that of the last."""
    request = {"graphs": [str(graph) for graph in graphs]}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    failures = {name: failure for name, failure in lines if failure}
    if done.returncode or len(lines) != len(graphs):
        failures[str(graphs[len(lines)].name)] = f"the parser ended with {done.returncode}: {done.stderr[-300:]}"
    return failures


def _parse(graphs: Sequence[str]) -> None:
    import tensorrt_rtx_bindings as trt

    messages: list[str] = []
    logger = _logger(trt, messages)
    builder = trt.Builder(logger)
    for graph in graphs:
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        parsed = parser.parse_from_file(graph)
        errors = [f"{(e := parser.get_error(i)).node_name()}: {e.desc()}" for i in range(parser.num_errors)]
        sys.stdout.write("\n" + json.dumps([Path(graph).name, "" if parsed else "; ".join(errors)]) + "\n")
        sys.stdout.flush()


def _logger(trt: Any, messages: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                messages.append(text)

    return Logger()


def _build(request: dict[str, Any]) -> dict[str, Any]:
    import tensorrt_rtx_bindings as trt

    messages: list[str] = []

    def result(failure: str, engine_bytes: int = 0) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for i in range(network.num_layers):
            kind = network.get_layer(i).type.name
            counts[kind] = counts.get(kind, 0) + 1
        return {"failure": failure, "layers": counts, "engine_bytes": engine_bytes, "messages": messages[-8:]}

    logger = _logger(trt, messages)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["graph"]):
        return result("parser: " + "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(request["sms"])
    for i, sm in enumerate(request["sms"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        value = network.get_input(i)
        if -1 in tuple(value.shape):
            names = [value.get_dimension_name(axis) for axis in range(len(value.shape))]
            sizes = [
                request["dims"][name] if size == -1 else size for name, size in zip(names, value.shape, strict=True)
            ]
            profile.set_shape(
                value.name, *([s if isinstance(s, int) else s[which] for s in sizes] for which in range(3))
            )
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    return result("builder", 0) if engine is None else result("", engine.nbytes)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if "graphs" in asked:
        _parse(asked["graphs"])
    else:
        sys.stdout.write("\n" + json.dumps(_build(asked)) + "\n")
