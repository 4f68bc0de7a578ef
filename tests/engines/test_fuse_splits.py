"""``FuseSplitsPass``: parts of rows that nothing reads are not written."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph, check_pass, check_untouched, random_feeds

from intaglio.engines.lowering.fuse_splits import FuseSplitsPass
from intaglio.kernels.grouped_quant import DOMAIN


def parts(*read: int, is_output: int | None = None, axis: int = -1) -> ir.Model:
    """Rows cut in three, of which some parts are read by a node and one may be an output of the graph."""
    graph = Graph({"rows": ["batch", "tokens", 30]})
    sizes = graph.constant(np.array([5, 10, 15]), "sizes")
    values = graph.op.Split(graph["rows"], sizes, axis=axis, _outputs=3)
    outputs = {f"read{i}": graph.op.Relu(values[i]) for i in read}
    if is_output is not None:
        outputs["part"] = values[is_output]
    return graph.model(y=graph.op.Relu(graph["rows"]), **outputs)


@pytest.mark.parametrize("read", [(), (1,), (0, 2)])
def test_what_is_read_becomes_slices(read: tuple[int, ...]) -> None:
    model = parts(*read)
    expected = ["Slice"] * len(read) + ["Relu"] * (len(read) + 1)
    check_pass(model, FuseSplitsPass, random_feeds(model, batch=2, tokens=3), expected)


def test_a_part_that_is_an_output_keeps_its_name() -> None:
    model = parts(0, is_output=2)
    check_pass(model, FuseSplitsPass, random_feeds(model, batch=2, tokens=3), ["Slice", "Slice", "Relu", "Relu"])


@pytest.mark.parametrize("model", [parts(0, 1, 2), parts(0, axis=1)], ids=["all are read", "other axis"])
def test_what_does_not_fit_stays(model: ir.Model) -> None:
    check_untouched(model, FuseSplitsPass)


@pytest.mark.parametrize("is_key_read", [False, True])
def test_attention_reads_rows_where_they_lie(is_key_read: bool) -> None:
    """Queries of four heads, keys and values of two, behind ten other numbers."""
    graph = Graph({"rows": ["batch", "tokens", 10 + 4 * 16 + 2 * 16 + 2 * 8]})
    sizes = graph.constant(np.array([10, 64, 32, 16]), "sizes")
    _, *attended = graph.op.Split(graph["rows"], sizes, axis=-1, _outputs=4)
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    y = graph.op.FusedAttention(*attended, **heads, _domain=DOMAIN)
    outputs = {"key": graph.op.Relu(attended[1])} if is_key_read else {}
    model = graph.model(y=y, **outputs)
    expected = [*["Slice"] * is_key_read, "FusedAttention", *["Relu"] * is_key_read]
    check_pass(model, FuseSplitsPass, random_feeds(model, batch=2, tokens=5), expected)
