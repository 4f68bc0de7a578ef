"""``FuseProjectionsPass``: projections of one activation become one node, with the same numbers."""

from __future__ import annotations

from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_projections import FuseProjectionsPass
from intaglio.kernels.grouped_quant import GroupedQuantFormat

EIGHT_BITS = GroupedQuantFormat(8, 32, 128)


def test_projections_become_one_node() -> None:
    graph = Graph({"x": ["tokens", 64]})
    q, k, v = (graph.product(graph["x"], rows, name) for name, rows in (("q", 96), ("k", 32), ("v", 40)))
    # One is an output of the graph, two are read.
    model = graph.model(q=q, k_read=graph.op.Relu(k), v_read=graph.op.Relu(v))
    expected = ["FusedGroupedQuantMatMul", "Relu", "Relu"]
    check_pass(model, FuseProjectionsPass, random_feeds(model, tokens=3), expected)


def test_only_one_format_joins() -> None:
    graph = Graph({"x": ["tokens", 64]})
    x = graph["x"]
    values = {"a": graph.product(x, 32, "a"), "b": graph.product(x, 32, "b", EIGHT_BITS), "c": graph.product(x, 8, "c")}
    model = graph.model(**values)
    expected = ["FusedGroupedQuantMatMul", "GroupedQuantMatMul"]
    check_pass(model, FuseProjectionsPass, random_feeds(model, tokens=3), expected)


def test_others_stay() -> None:
    graph = Graph({"x": ["tokens", 64], "z": ["tokens", 64]})
    a, b = graph.product(graph["x"], 32, "a"), graph.product(graph["z"], 32, "b")
    check_untouched(graph.model(a=a, b=b), FuseProjectionsPass)
