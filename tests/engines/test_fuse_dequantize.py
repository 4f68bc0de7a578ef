"""``FuseDequantizePass``: an integer weight and its scale become one DequantizeLinear, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_untouched, ops, run

from intaglio.engines.lowering.fuse_dequantize import FuseDequantizePass

X = np.random.default_rng().normal(size=(8, 4)).astype(np.float32)


def product(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, is_tapped: bool = False, first: bool = False
) -> ir.Model:
    """``x + (weight - zero) * scale``; ``first`` puts the scale first."""
    graph = Graph({"x": [8, 4]})
    op = graph.op
    cast = op.Cast(graph.constant(weight, "w"), to=ir.DataType.FLOAT)
    shifted = cast if zero is None else op.Sub(cast, graph.constant(zero, "z"))
    factors = [shifted, graph.constant(scale, "s")]
    wide = op.Mul(*(factors[::-1] if first else factors))
    return graph.model(y=op.Add(graph["x"], wide), **({"tap": cast} if is_tapped else {}))


def integers(dtype: type[np.integer]) -> np.ndarray:
    ends = np.iinfo(dtype)
    return np.random.default_rng().integers(ends.min, ends.max + 1, (8, 4), dtype)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng().uniform(0.1, 1, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "scale", "zero", "axis"),
    [
        (np.int8, scales(1, 4), None, 1),
        (np.int8, scales(4), None, 1),
        (np.uint8, scales(8, 1), np.array(128, np.float32), 0),
        (np.uint8, scales(), np.array([[3], [0], [255], [9], [1], [2], [4], [8]], np.float32), 0),
        (np.int8, scales(1, 1), np.array([-3], np.float32), None),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_weight_and_its_scale_are_one_node(dtype, scale, zero, axis, first):
    model = product(integers(dtype), scale, zero, first=first)
    expected = run(model, {"x": X})["y"]
    assert FuseDequantizePass()(model).modified
    assert ops(model) == ["DequantizeLinear", "Add"]
    (node,) = (node for node in model.graph if node.op_type == "DequantizeLinear")
    assert node.inputs[0] is not None and node.inputs[0].name == "w"
    assert (node.attributes["axis"].value if "axis" in node.attributes else None) == axis
    np.testing.assert_allclose(run(model, {"x": X})["y"], expected, rtol=1e-6)
    assert not FuseDequantizePass()(model).modified


def test_a_cast_that_is_read_elsewhere_stays():
    model = product(integers(np.int8), scales(4), is_tapped=True)
    expected = run(model, {"x": X})
    assert FuseDequantizePass()(model).modified
    for name, array in run(model, {"x": X}).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        product(integers(np.int8), scales(8, 4)),  # a scale for each value
        product(integers(np.int8), scales(1, 4), scales(8, 1) * 0 + 1),  # two axes
        product(integers(np.int8), scales(4), np.array(0.5, np.float32)),  # no integer
        product(integers(np.int8), scales(4), np.array(200, np.float32)),  # no int8
        product(integers(np.int32), scales(4)),
        product(integers(np.int8), scales(2, 8, 4)[:1]),  # more axes than the weight
    ],
)
def test_what_is_no_dequantization_is_left(model):
    check_untouched(model, FuseDequantizePass)
