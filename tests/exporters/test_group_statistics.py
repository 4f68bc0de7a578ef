"""The statistics of a band's groups, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript import GraphBuilder

from intaglio.exporters.layers.group_norm import group_statistics


@pytest.mark.parametrize(("dtype", "bound"), [(ir.DataType.FLOAT, 3e-6), (ir.DataType.FLOAT16, 3e-6)])
def test_statistics_of_large_groups(dtype: ir.DataType, bound: float) -> None:
    """Half a million values a group: added up one by one they would be off by 3e-4."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="statistics")
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["batch", 6, "rows", "width"]))
    graph.inputs.append(x)
    mean, variance = group_statistics(GraphBuilder(graph).op, x, 3)
    mean.name, variance.name = "mean", "variance"
    graph.outputs.extend([mean, variance])
    for value in (mean, variance):
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch", 3])
    values = np.random.default_rng(0).normal(5, 2, size=(2, 6, 256, 1024)).astype(dtype.numpy())
    data = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
    found = onnxruntime.InferenceSession(data).run(["mean", "variance"], {"x": values})
    groups = values.astype(np.float64).reshape(2, 3, -1)
    for name, expected in zip(found, (groups.mean(axis=2), groups.var(axis=2)), strict=True):
        np.testing.assert_allclose(name, expected, rtol=bound)
