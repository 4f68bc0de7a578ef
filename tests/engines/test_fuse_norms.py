"""``FuseNormsPass``: an RMSNorm and the one node that reads it become one, with the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_norms import FuseNormsPass
from intaglio.engines.lowering.fuse_projections import FuseProjectionsPass


def normed(names: str = "a", tapped: bool = False, axis: int = -1, **attributes: Any) -> ir.Model:
    graph = Graph({"x": ["batch", "tokens", 64]})
    weight = graph.constant(np.linspace(-2, 3, 64, dtype=np.float32), "weight")
    norm = graph.op.RMSNormalization(graph["x"], weight, axis=axis, **attributes)
    norm.shape, norm.dtype = graph["x"].shape, ir.DataType.FLOAT
    outputs = {name: graph.product(norm, 48, name) for name in names}
    return graph.model(**outputs, **({"norm": norm} if tapped else {}))


# Of a size that the statistics feel; absent is ONNX's 1e-5.
@pytest.mark.parametrize("attributes", [{"epsilon": 0.7}, {}, {"axis": 2, "epsilon": 0.7}])
def test_a_norm_joins_its_product(attributes: dict[str, Any]) -> None:
    model = normed(**attributes)
    check_pass(model, FuseNormsPass, random_feeds(model, batch=2, tokens=3), ["FusedGroupedQuantMatMul"])


def test_a_norm_joins_joined_products() -> None:
    model = normed("abc", epsilon=0.7)
    assert FuseProjectionsPass()(model).modified
    check_pass(model, FuseNormsPass, random_feeds(model, batch=2, tokens=3), ["FusedGroupedQuantMatMul"])


@pytest.mark.parametrize(
    "model",
    [normed("ab"), normed(tapped=True), normed(axis=1)],
    ids=["two products", "norm is read", "over two axes"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseNormsPass)


def test_a_norm_that_a_residual_is_stays() -> None:
    graph = Graph({"x": ["tokens", 64]})
    weight = graph.constant(np.ones(64, np.float32), "weight")
    norm = graph.op.RMSNormalization(graph["x"], weight, axis=-1)
    norm.shape, norm.dtype = graph["x"].shape, ir.DataType.FLOAT
    model = graph.model(y=graph.op.Add(norm, graph.product(norm, 64, "a")))
    check_untouched(model, FuseNormsPass)
