"""Small ONNX models for tests of the Core ML target: written as text, run as saved packages and in onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser

from intaglio.engines.coreml.conversion import Converted, convert
from intaglio.engines.coreml.evaluator.evaluate import Evaluator
from intaglio.engines.coreml.package import write_package
from intaglio.exporters.bundle import Dim

Feeds = Mapping[str, np.ndarray]


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    """The model of a graph in ONNX's own text form."""
    header = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    return parser.parse_model(f"{header}\n{text}")


def packaged(proto: onnx.ModelProto, dims: Mapping[str, int | Dim] | None = None) -> Converted:
    """The model as a MIL program."""
    return convert(ir.from_proto(proto), "model.onnx", dims=dims)


def evaluated(
    proto: onnx.ModelProto, *feeds: Feeds, dims: Mapping[str, int | Dim] | None = None
) -> list[list[np.ndarray]]:
    """The outputs of the saved package for each of the feeds."""
    converted = packaged(proto, dims)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.mlpackage"
        write_package(converted, path)
        evaluator = Evaluator(path)
        results = []
        for given in feeds:
            fed = {p.mil_name: np.atleast_1d(given[p.name]) for p in converted.inputs}
            made = evaluator.run({n: a.astype(np.int32) if a.dtype.kind in "biu" else a for n, a in fed.items()})
            results.append([made[p.mil_name] for p in converted.outputs])
        return results


def expected(proto: onnx.ModelProto, feeds: Feeds) -> list[np.ndarray]:
    """The outputs that onnxruntime gives."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def assert_same(
    proto: onnx.ModelProto, *feeds: Feeds, dims: Mapping[str, int | Dim] | None = None, rtol: float = 1e-5
) -> None:
    """Integers and booleans are equal to onnxruntime's, floats to within ``rtol`` of the largest."""
    for given, found in zip(feeds, evaluated(proto, *feeds, dims=dims), strict=True):
        for ours, theirs in zip(found, expected(proto, given), strict=True):
            ours = ours.reshape(theirs.shape) if theirs.ndim == 0 else ours
            assert ours.shape == theirs.shape
            if theirs.dtype.kind == "f":
                scale = float(np.max(np.abs(theirs[np.isfinite(theirs)]), initial=1e-30))
                np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * scale)
            else:
                np.testing.assert_array_equal(ours.astype(theirs.dtype), theirs)
