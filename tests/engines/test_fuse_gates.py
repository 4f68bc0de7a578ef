"""``FuseGatesPass``: the two projections of a gated layer become one node, with the same numbers."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from fused_graphs import FORM, Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_gates import FuseGatesPass
from intaglio.kernels.grouped_quant import GroupedQuantFormat

EIGHT_BITS = GroupedQuantFormat(8, 32, 128)


def gated(
    up_form: GroupedQuantFormat = FORM, tapped: str = "", is_reversed: bool = False, other_x: bool = False
) -> ir.Model:
    graph = Graph({"x": ["batch", "tokens", 64], "z": ["batch", "tokens", 64]})
    op = graph.op
    gate = graph.product(graph["x"], 96, "gate")
    sigmoid = op.Sigmoid(gate)
    silu = op.Mul(sigmoid, gate) if is_reversed else op.Mul(gate, sigmoid)
    up = graph.product(graph["z" if other_x else "x"], 96, "up", up_form)
    y = op.Mul(up, silu) if is_reversed else op.Mul(silu, up)
    taps = {"gate": gate, "sigmoid": sigmoid, "silu": silu, "up": up}
    return graph.model(y=op.Relu(y), **({tapped: taps[tapped]} if tapped else {}))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_gate_becomes_one_node(is_reversed: bool) -> None:
    model = gated(is_reversed=is_reversed)
    check_pass(model, FuseGatesPass, random_feeds(model, batch=2, tokens=3), ["FusedGroupedQuantMatMul", "Relu"])


@pytest.mark.parametrize(
    "model",
    [gated(up_form=EIGHT_BITS), gated(other_x=True), *(gated(tapped=t) for t in ("gate", "sigmoid", "silu", "up"))],
    ids=["other format", "other x", "gate is read", "sigmoid is read", "silu is read", "up is read"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseGatesPass)


def test_two_halves_of_one_gate() -> None:
    """``silu(a) * a``: the gate is read by more than its silu."""
    graph = Graph({"x": ["tokens", 64]})
    a = graph.product(graph["x"], 32, "a")
    model = graph.model(y=graph.op.Mul(graph.op.Mul(a, graph.op.Sigmoid(a)), a))
    check_untouched(model, FuseGatesPass)


def test_a_gate_that_another_node_reads_stays() -> None:
    graph = Graph({"x": ["tokens", 64]})
    gate, up = graph.product(graph["x"], 32, "gate"), graph.product(graph["x"], 32, "up")
    silu = graph.op.Mul(gate, graph.op.Sigmoid(gate))
    model = graph.model(y=graph.op.Mul(silu, up), read=graph.op.Relu(gate))
    check_untouched(model, FuseGatesPass)
