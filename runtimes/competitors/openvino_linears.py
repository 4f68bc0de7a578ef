"""Runs the linear layers of FLUX.2's transformer in OpenVINO, with random int8 weights: seconds for lines on stdin.

Started by ``bench`` with the request as JSON on the command line. Weights are signed bytes with a scale for each
output; activations are quantized to int8 in groups while it runs, as OpenVINO does for compressed weights. Layers of
one shape share one weight: at these numbers of rows the time of reading weights does not count.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

_ACTIVATION_GROUP = 128


def linears(config: Mapping[str, Any], image_tokens: int, text_tokens: int) -> dict[tuple[int, int, int], int]:
    """How many products ``(M, K, N)`` the blocks of one step have of each shape."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    inner = round(width * config["mlp_ratio"])
    both = image_tokens + text_tokens
    found: dict[tuple[int, int, int], int] = {}

    def add(rows: int, inputs: int, outputs: int, count: int) -> None:
        found[rows, inputs, outputs] = found.get((rows, inputs, outputs), 0) + count

    for rows in (image_tokens, text_tokens):
        add(rows, width, width, 4 * config["num_layers"])  # query, key, value, output
        add(rows, width, 2 * inner, config["num_layers"])
        add(rows, inner, width, config["num_layers"])
    add(both, width, 3 * width + 2 * inner, config["num_single_layers"])
    add(both, width + inner, width, config["num_single_layers"])
    return found


def _request(openvino: Any, shape: tuple[int, int, int], threads: int, rng: np.random.Generator) -> Any:
    """A product that is ready to run."""
    rows, inputs, outputs = shape
    ops = importlib.import_module("openvino.opset13")
    x = ops.parameter([rows, inputs], np.float32)
    codes = ops.constant(rng.integers(-127, 128, (outputs, inputs), np.int8))
    scales = ops.constant(rng.uniform(1e-4, 2e-4, (outputs, 1)).astype(np.float32))
    weight = ops.multiply(ops.convert(codes, np.float32), scales)
    model = openvino.Model([ops.matmul(x, weight, False, True)], [x])
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # Elsewhere float32 is the default; where there is AMX it would be bfloat16, without int8 activations.
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _ACTIVATION_GROUP,
    }
    ready = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
    ready.set_input_tensor(openvino.Tensor(rng.standard_normal((rows, inputs), np.float32)))
    return ready


def main() -> int:
    """Answers with the version, then the seconds of all linear layers of a step to every line."""
    request = json.loads(sys.argv[1])
    # Imported by name: it is no dependency, and its types are not installed with this package.
    openvino: Any = importlib.import_module("openvino")
    shapes = linears(request["config"], request["image_tokens"], request["text_tokens"])
    rng = np.random.default_rng(0)
    layers = [(_request(openvino, shape, request["threads"], rng), count) for shape, count in shapes.items()]
    for layer, _ in layers:
        layer.infer()
    sys.stdout.write(f"openvino {openvino.__version__}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        started = time.perf_counter()
        for layer, count in layers:
            for _ in range(count):
                layer.infer()
        sys.stdout.write(f"{time.perf_counter() - started}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
