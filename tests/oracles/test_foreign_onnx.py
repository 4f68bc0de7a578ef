"""Real ONNX files that others wrote: compiled and run, against a plain onnxruntime session and against tract.

Bounds: relative L2 <= 1e-5 to onnxruntime, <= 1e-4 to tract. Measured: 0 and at most 4e-6.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from fetched import fetched
from foreign_models import MODELS, Feeds, Foreign, random_feeds
from run_graph import run_tract

import intaglio
from intaglio.engines.onnx_file import read_onnx
from intaglio.runtimes.parity import compare


def fixed_shapes(path: Path, feeds: Feeds, outputs: Feeds) -> Path:
    """A copy of the file whose dims are those of one run."""
    model = ir.load(path)
    for values, arrays in ((model.graph.inputs, feeds), (model.graph.outputs, outputs)):
        for value in values:
            value.shape = ir.Shape(arrays[str(value.name)].shape)
    ir.save(model, path.with_name("fixed.onnx"))
    return path.with_name("fixed.onnx")


@pytest.mark.parametrize("foreign", MODELS, ids=lambda foreign: foreign.name)
def test_a_real_model(foreign: Foreign, tmp_path: Path) -> None:
    path = tmp_path / f"{foreign.name}.onnx"
    shutil.copyfile(fetched(foreign.name), path)
    (report,) = intaglio.compile(path).stages.values()
    assert report.notes == ()
    assert (report.dtype, set(report.trial_sizes)) == ("float32", set(foreign.dims))
    assert foreign.weights in (None, report.weight_count)
    assert report.weight_bytes == pytest.approx(path.stat().st_size, rel=0.15)
    described = read_onnx(path)
    assert sum(described.operators.values()) == foreign.nodes
    assert report.operators
    model = intaglio.load(path)
    assert tuple(model.dims) == foreign.dims
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.outputs]
    assert names == [output.name for output in plain.get_outputs()]
    for sizes in foreign.sizes:
        feeds = random_feeds(model.inputs, foreign, dict(zip(foreign.dims, sizes, strict=True)))
        found = model.run(feeds)
        for name, expected in zip(names, plain.run(names, feeds), strict=True):
            assert np.abs(expected).max() > 1e-3, "nothing was found, so nothing is compared"
            assert compare(name, found[name], expected).relative_l2 <= 1e-5, name
        for name, expected in run_tract(fixed_shapes(path, feeds, found) if foreign.fixed else path, feeds).items():
            assert compare(name, found[name], expected).relative_l2 <= 1e-4, name
