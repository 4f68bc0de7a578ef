"""``FuseHeadNormsPass``: norms of heads read packed rows and write joint sequences, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_head_norms import FuseHeadNormsPass


def norm(graph: Graph, rows: ir.Value, name: str, epsilon: float = 0.7) -> ir.Value:
    heads = graph.op.Reshape(rows, [0, 0, 4, 16])
    heads.dtype = ir.DataType.FLOAT
    weight = graph.constant(np.linspace(-1, 2, 16, dtype=np.float32), f"{name}.weight")
    return graph.op.RMSNormalization(heads, weight, axis=-1, epsilon=epsilon)


def cut(is_last: bool = True) -> ir.Model:
    graph = Graph({"rows": ["batch", "tokens", 200] if is_last else ["batch", 3, 64]})
    if is_last:
        parts = graph.constant(np.array([64, 64, 72]), "parts")
        query, key, rest = graph.op.Split(graph["rows"], parts, axis=-1, _outputs=3)
    else:
        query, key, rest = graph.op.Split(graph["rows"], num_outputs=3, axis=1, _outputs=3)
    for value in (query, key):
        value.shape, value.dtype = ir.Shape(["batch", "tokens", 64]), ir.DataType.FLOAT
    return graph.model(q=norm(graph, query, "q"), k=norm(graph, key, "k"), rest=graph.op.Relu(rest))


def joint(axis: int = 1, epsilon: float = 0.7, is_tapped: bool = False) -> ir.Model:
    graph = Graph({"text": ["batch", "text", 64], "image": ["batch", "image", 64]})
    text, image = norm(graph, graph["text"], "t"), norm(graph, graph["image"], "i", epsilon)
    y = graph.op.Concat(text, image, axis=axis)
    return graph.model(y=y, **({"normed": image} if is_tapped else {}))


def test_heads_are_read_where_they_lie() -> None:
    model = cut()
    expected = ["Split", "HeadRMSNorm", "HeadRMSNorm", "Relu"]
    check_pass(model, FuseHeadNormsPass, random_feeds(model, batch=2, tokens=3), expected)


def test_two_sequences_become_one() -> None:
    model = joint()
    check_pass(model, FuseHeadNormsPass, random_feeds(model, batch=2, text=3, image=5), ["HeadRMSNorm"])


@pytest.mark.parametrize(
    "model",
    [cut(is_last=False), joint(axis=2), joint(epsilon=0.1), joint(is_tapped=True)],
    ids=["cut along tokens", "joined along heads", "two epsilons", "norm is read"],
)
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseHeadNormsPass)
