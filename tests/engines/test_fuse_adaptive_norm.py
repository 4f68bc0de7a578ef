"""``FuseAdaptiveNormPass``: a layer norm, its scale and its shift become one node, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_adaptive_norm import FuseAdaptiveNormPass

VECTOR = ["batch", 1, 32]


def modulated(
    tapped: str = "", weight: float = 1.0, one: float = 1.0, scale_shape: list[int | str] = VECTOR, swap: bool = False
) -> ir.Model:
    graph = Graph({"x": ["batch", "tokens", 32], "scale": scale_shape, "shift": VECTOR})
    op, x = graph.op, graph["x"]
    weights = graph.constant(np.full(32, weight, np.float32), "weights")
    normed = op.LayerNormalization(x, weights, axis=-1, epsilon=0.7)
    normed.shape, normed.dtype = x.shape, ir.DataType.FLOAT
    factor = op.Add(graph["scale"], one)
    scaled = op.Mul(factor, normed) if swap else op.Mul(normed, factor)
    y = op.Add(graph["shift"], scaled) if swap else op.Add(scaled, graph["shift"])
    taps = {"normed": normed, "scaled": scaled, "factor": factor}
    return graph.model(y=op.Relu(y), **({tapped: taps[tapped]} if tapped else {}))


@pytest.mark.parametrize("swap", [False, True])
def test_norm_scale_and_shift_become_one_node(swap: bool) -> None:
    model = modulated(swap=swap)
    check_pass(model, FuseAdaptiveNormPass, random_feeds(model, batch=2, tokens=3), ["AdaptiveLayerNorm", "Relu"])


def test_a_factor_that_others_read_stays_beside_it() -> None:
    model = modulated("factor")
    expected = ["Add", "AdaptiveLayerNorm", "Relu"]
    check_pass(model, FuseAdaptiveNormPass, random_feeds(model, batch=2, tokens=3), expected)


@pytest.mark.parametrize(
    "model",
    [
        modulated("normed"),
        modulated("scaled"),
        modulated(weight=2.0),
        modulated(one=2.0),
        modulated(scale_shape=["batch", "tokens", 32]),
    ],
    ids=["norm is read", "product is read", "has weights", "plus two", "a scale for each token"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseAdaptiveNormPass)
