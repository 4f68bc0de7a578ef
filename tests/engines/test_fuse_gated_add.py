"""``FuseGatedAddPass``: a gate and the sum it goes into become one node, with the same numbers."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_gated_add import FuseGatedAddPass

ROWS, VECTOR = ["batch", "tokens", 32], ["batch", 1, 32]


def gated(
    is_tapped: bool = False, gate: list[int | str] = VECTOR, z: list[int | str] = ROWS, swap: bool = False
) -> ir.Model:
    graph = Graph({"x": ROWS, "gate": gate, "z": z})
    op = graph.op
    pair = (graph["gate"], graph["z"])
    product = op.Mul(*(pair[::-1] if swap else pair))
    y = op.Add(product, graph["x"]) if swap else op.Add(graph["x"], product)
    return graph.model(y=op.Relu(y), **({"product": product} if is_tapped else {}))


@pytest.mark.parametrize("swap", [False, True])
def test_a_gated_sum_becomes_one_node(swap: bool) -> None:
    model = gated(swap=swap)
    check_pass(model, FuseGatedAddPass, random_feeds(model, batch=2, tokens=3), ["GatedAdd", "Relu"])


@pytest.mark.parametrize(
    "model",
    [gated(is_tapped=True), gated(gate=ROWS), gated(z=["batch", 1, 32]), gated(gate=[32])],
    ids=["product is read", "a gate for each token", "repeated rows", "one vector"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseGatedAddPass)
