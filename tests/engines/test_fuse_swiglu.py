"""``FuseSwiGLUPass``: a gate whose halves were cut from one row reads them where they lie, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_swiglu import FuseSwiGLUPass


def halves(tapped: str = "", axis: int = -1) -> ir.Model:
    graph = Graph({"rows": ["batch", 4, 64]})
    op = graph.op
    gate, up = op.Split(graph["rows"], num_outputs=2, axis=axis, _outputs=2)
    silu = op.Mul(gate, op.Sigmoid(gate))
    taps = {"gate": gate, "silu": silu, "up": up}
    return graph.model(y=op.Relu(op.Mul(silu, up)), **({tapped: taps[tapped]} if tapped else {}))


def packed(is_tapped: bool = False, is_behind: bool = True, sizes: tuple[int, ...] = (10, 16, 16)) -> ir.Model:
    """Other rows, then gate and up, whose product goes behind what was made of the other rows."""
    graph = Graph({"rows": ["batch", "tokens", sum(sizes)]})
    op = graph.op
    parts = graph.constant(np.array(sizes), "parts")
    other, gate, up = op.Split(graph["rows"], parts, axis=2, _outputs=3)
    before = op.Relu(other)
    before.shape, before.dtype = ir.Shape(["batch", "tokens", 10]), ir.DataType.FLOAT
    product = op.Mul(op.Mul(op.Sigmoid(gate), gate), up)
    y = op.Concat(before, product, axis=-1) if is_behind else op.Concat(product, before, axis=-1)
    return graph.model(y=y, **({"product": product} if is_tapped else {}))


def test_halves_become_one_node() -> None:
    model = halves()
    check_pass(model, FuseSwiGLUPass, random_feeds(model, batch=2), ["Split", "SwiGLU", "Relu"])


def test_the_result_is_written_behind_other_rows() -> None:
    model = packed()
    check_pass(model, FuseSwiGLUPass, random_feeds(model, batch=2, tokens=3), ["Split", "Relu", "SwiGLU"])


@pytest.mark.parametrize("model", [packed(is_tapped=True), packed(is_behind=False)], ids=["is read", "in front"])
def test_other_joints_stay(model: ir.Model) -> None:
    feeds = random_feeds(model, batch=2, tokens=3)
    check_pass(model, FuseSwiGLUPass, feeds, ["Split", "Relu", "SwiGLU", "Concat"])


@pytest.mark.parametrize(
    "model",
    [halves("gate"), halves("silu"), halves("up"), halves(axis=1)],
    ids=["gate is read", "silu is read", "up is read", "other axis"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseSwiGLUPass)


def test_a_gate_that_another_node_reads_stays() -> None:
    graph = Graph({"rows": ["tokens", 64]})
    gate, up = graph.op.Split(graph["rows"], num_outputs=2, axis=-1, _outputs=2)
    silu = graph.op.Mul(gate, graph.op.Sigmoid(gate))
    model = graph.model(y=graph.op.Mul(silu, up), read=graph.op.Relu(gate))
    check_untouched(model, FuseSwiGLUPass)
