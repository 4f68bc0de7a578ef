"""Real ONNX files that others wrote, built for NVIDIA's consumer GPUs, and what TensorRT is given of them.

Bound: relative L2 <= 1e-5 in float32 between that graph and the file, both in onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from fetched import fetched
from foreign_models import MODELS, Foreign, random_feeds
from tensorrt_rtx_builds import require_tensorrt_rtx

import intaglio
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.nvidia.building import lowered_model
from intaglio.engines.nvidia.evaluation import open_lowered
from intaglio.engines.nvidia.options import RtxOptions
from intaglio.engines.onnx_file import read_onnx
from intaglio.runtimes.parity import compare

require_tensorrt_rtx()


@pytest.mark.parametrize("foreign", MODELS, ids=lambda foreign: foreign.name)
def test_it_builds_for_a_range_of_sizes(foreign: Foreign, tmp_path: Path) -> None:
    bounds = zip(foreign.dims, zip(*foreign.sizes, strict=True), strict=True)
    shapes = ",".join(f"{name}={min(sizes)}:{max(sizes)}:{max(sizes)}" for name, sizes in bounds)
    report = intaglio.compile(
        fetched(foreign.name), "tensorrt-rtx", output=tmp_path / "engines", sm="86,89,120", shapes=shapes
    )
    stage = report.stages[foreign.name]
    assert stage.package_bytes > stage.weight_bytes > 0
    if foreign.weights is not None:
        assert stage.weight_count == foreign.weights
    if foreign.name == "minilm-int8":
        assert stage.quantized_bits_per_weight == pytest.approx(8, 1e-3)


@pytest.mark.parametrize("foreign", MODELS, ids=lambda foreign: foreign.name)
def test_what_is_built_is_the_file(foreign: Foreign, tmp_path: Path) -> None:
    path = fetched(foreign.name)
    model, _ = lowered_model(path, RtxOptions())
    write_graph(model, tmp_path / "lowered.onnx")
    lowered = open_lowered(tmp_path / "lowered.onnx", foreign.name)
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in plain.get_outputs()]
    for sizes in foreign.sizes:
        feeds = random_feeds(read_onnx(path).inputs, foreign, dict(zip(foreign.dims, sizes, strict=True)))
        for name, found, expected in zip(names, lowered.run(names, feeds), plain.run(names, feeds), strict=True):
            assert np.abs(expected).max() > 1e-3, "nothing was found, so nothing is compared"
            assert compare(name, found, expected).relative_l2 <= 1e-5, (name, sizes)
