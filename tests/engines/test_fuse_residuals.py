"""``FuseResidualsPass``: a product and the sum that it goes into become one node, with the same numbers."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_residuals import FuseResidualsPass


def summed(residual_shape: list[int | str], is_tapped: bool = False, is_first: bool = False) -> ir.Model:
    graph = Graph({"x": ["batch", "tokens", 64], "residual": residual_shape})
    product = graph.product(graph["x"], 48, "product")
    pair = (graph["residual"], product)
    y = graph.op.Add(*(pair[::-1] if is_first else pair))
    return graph.model(y=graph.op.Relu(y), **({"product": product} if is_tapped else {}))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_sum_becomes_part_of_its_product(is_first: bool) -> None:
    model = summed(["batch", "tokens", 48], is_first=is_first)
    check_pass(model, FuseResidualsPass, random_feeds(model, batch=2, tokens=3), ["FusedGroupedQuantMatMul", "Relu"])


def test_a_residual_that_comes_later_than_the_product() -> None:
    graph = Graph({"x": ["tokens", 64]})
    product = graph.product(graph["x"], 64, "product")
    late = graph.op.Relu(graph["x"])
    late.shape, late.dtype = graph["x"].shape, ir.DataType.FLOAT
    model = graph.model(y=graph.op.Add(late, product), late=late)
    check_pass(model, FuseResidualsPass, random_feeds(model, tokens=4), ["Relu", "FusedGroupedQuantMatMul"])


@pytest.mark.parametrize(
    "model",
    [
        summed(["batch", "tokens", 48], is_tapped=True),
        summed([48]),
        summed(["batch", 1, 48]),
        summed(["batch", None, 48]),
    ],
    ids=["product is read", "bias", "broadcast", "unknown"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseResidualsPass)


def test_a_product_added_to_itself_stays() -> None:
    graph = Graph({"x": ["tokens", 64]})
    product = graph.product(graph["x"], 48, "product")
    check_untouched(graph.model(y=graph.op.Add(product, product)), FuseResidualsPass)
