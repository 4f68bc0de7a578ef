"""Real ONNX files that others wrote, as saved packages, against a plain onnxruntime session.

Bound: relative L2 <= 1e-5 in float32. Measured: at most 3e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from fetched import fetched
from foreign_models import MODELS, Foreign, random_feeds

from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.evaluator.evaluate import Evaluator
from intaglio.engines.coreml.package import write_package
from intaglio.engines.onnx_file import read_onnx
from intaglio.exporters.bundle import Dim
from intaglio.runtimes.parity import compare

# Half a minute and more each.
SLOW = ("rapidocr-rec", "minilm-int8")


def check(foreign: Foreign, dims: Mapping[str, int | Dim], runs: Sequence[Mapping[str, int]], folder: Path) -> None:
    """One package, at some sizes; it is as large as the file, whose integers stay integers."""
    path = fetched(foreign.name)
    described, model = read_onnx(path), ir.load(path)
    given = {value.name: value for value in model.graph.inputs}
    for tensor in described.inputs:
        assert tensor.shape is not None
        given[tensor.name].shape = ir.Shape(tensor.shape)
    converted = convert(model, foreign.name, dims=dims)
    package = folder / "model.mlpackage"
    write_package(converted, package)
    size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    assert size <= max(1.05 * path.stat().st_size, path.stat().st_size + 50_000)
    evaluator = Evaluator(package)
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [port.name for port in converted.outputs] == [output.name for output in plain.get_outputs()]
    for sizes in runs:
        feeds = random_feeds(described.inputs, foreign, sizes)
        fed = {p.mil_name: feeds[p.name] for p in converted.inputs}
        made = evaluator.run({n: a.astype(np.int32) if a.dtype.kind in "biu" else a for n, a in fed.items()})
        for port, expected in zip(converted.outputs, plain.run(None, feeds), strict=True):
            assert np.abs(expected).max() > 1e-3, "nothing was found, so nothing is compared"
            assert compare(port.name, made[port.mil_name], expected).relative_l2 <= 1e-5, (port.name, sizes)


def parameters(slow: bool) -> list[object]:
    marks = [pytest.mark.full_size]
    return [pytest.param(m, id=m.name, marks=marks if (m.name in SLOW) == slow else []) for m in MODELS]


@pytest.mark.parametrize("foreign", parameters(slow=True))
def test_sizes_that_vary(foreign: Foreign, tmp_path: Path) -> None:
    runs = [dict(zip(foreign.dims, sizes, strict=True)) for sizes in foreign.sizes]
    bounds: dict[str, int | Dim] = {
        name: Dim(min=min(sizes), max=max(sizes)) for name, sizes in ((n, [r[n] for r in runs]) for n in foreign.dims)
    }
    check(foreign, bounds, runs, tmp_path)


@pytest.mark.parametrize("foreign", parameters(slow=False))
def test_sizes_that_are_fixed(foreign: Foreign, tmp_path: Path) -> None:
    for number, sizes in enumerate(foreign.sizes):
        dims = dict(zip(foreign.dims, sizes, strict=True))
        folder = tmp_path / str(number)
        folder.mkdir()
        check(foreign, dims, [dims], folder)
