"""``GroupNormPass``: the same numbers before and after, against onnx's reference implementation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from onnxscript import GraphBuilder

from intaglio.engines.lowering.group_norm import GroupNormPass


def model(shape: tuple[int | str, ...], dtype: ir.DataType, epsilons: tuple[float | None, ...]) -> ir.Model:
    """Group norms one after another, of six channels in three groups."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="norms")
    op = GraphBuilder(graph).op
    kind = ir.TensorType(dtype)
    x = ir.Value(name="x", type=kind, shape=ir.Shape(shape))
    weight, bias = (ir.Value(name=n, type=kind, shape=ir.Shape([6])) for n in ("weight", "bias"))
    graph.inputs.extend([x, weight, bias])
    y = x
    for epsilon in epsilons:
        told = {} if epsilon is None else {"epsilon": epsilon}
        y = op.GroupNormalization(y, weight, bias, num_groups=3, **told)
        y.shape, y.dtype = x.shape, dtype
    y.name = "y"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (1, 6, 1, 2), (3, 6, 9)])
@pytest.mark.parametrize(("dtype", "bound"), [(ir.DataType.FLOAT, 3e-6), (ir.DataType.FLOAT16, 4e-3)])
def test_lowered_norms_change_no_number(shape: tuple[int, ...], dtype: ir.DataType, bound: float) -> None:
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.normal(2, 3, size=shape).astype(dtype.numpy()),
        "weight": rng.normal(size=6).astype(dtype.numpy()),
        "bias": rng.normal(size=6).astype(dtype.numpy()),
    }
    # Of a size that the statistics feel; absent is ONNX's 1e-5.
    graph = model(("batch", 6, *("abc"[: len(shape) - 2])), dtype, (0.7, None))
    expected = ReferenceEvaluator(ir.to_proto(graph)).run(None, feeds)[0]
    assert GroupNormPass()(graph).modified
    assert not any(node.op_type == "GroupNormalization" for node in graph.graph)
    assert not GroupNormPass()(graph).modified
    data = ir.serde.serialize_model(graph).SerializeToString()
    found = onnxruntime.InferenceSession(data).run(["y"], feeds)[0]
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())


def normalized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One lowered norm without weights in onnxruntime, and the same in float64."""
    ones = np.ones(6, np.float32)
    graph = model((1, 6, "h", "w"), ir.DataType.FLOAT, (1e-6,))
    GroupNormPass()(graph)
    data = ir.serde.serialize_model(graph).SerializeToString()
    found = onnxruntime.InferenceSession(data).run(None, {"x": x, "weight": ones, "bias": 0 * ones})[0]
    groups = x.astype(np.float64).reshape(1, 3, -1)
    expected = (groups - groups.mean(axis=2, keepdims=True)) / groups.std(axis=2, keepdims=True)
    return found, expected.reshape(x.shape)


def test_far_from_zero() -> None:
    """The statistics come from distances to the mean, which float32 holds."""
    x = np.random.default_rng(1).normal(1000, 0.5, size=(1, 6, 64, 64)).astype(np.float32)
    found, expected = normalized(x)
    assert np.abs(found - expected).max() <= 2e-3


def test_large_groups() -> None:
    """Half a million values a group: added up one by one their variance would be off by 3e-4."""
    x = np.random.default_rng(2).normal(5, 2, size=(1, 6, 256, 1024)).astype(np.float32)
    found, expected = normalized(x)
    assert np.linalg.norm(found - expected) <= 3e-6 * np.linalg.norm(expected)
