"""``FuseGatherPass``: looked-up packed rows are dequantized by one node, with the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import FORM, Graph, check_untouched, ops, run

from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.kernels import functions
from intaglio.kernels.grouped_quant import DOMAIN


def embedding(
    is_flattened: bool = True, has_offsets: bool = True, is_cast: bool = False, is_tapped: bool = False
) -> ir.Model:
    graph = Graph({"ids": ["batch", "tokens"] if is_flattened else ["tokens"]}, {"ids": ir.DataType.INT64})
    op, ids = graph.op, graph["ids"]
    flat = op.Reshape(ids, [-1]) if is_flattened else ids
    flat.dtype = ir.DataType.INT64
    codes, scales, offsets = graph.table(20, 64, "table")
    if not has_offsets:
        offsets = graph.constant(np.zeros((), np.float16), "none")
    gathered = [op.Gather(table, flat) if table.shape else table for table in (codes, scales, offsets)]
    rows = op.call(functions.grouped_quant_dequantize(), *gathered, **vars(FORM))
    rows.dtype, rows.shape = ir.DataType.FLOAT, ir.Shape([None, 64])
    taps = {"rows": rows} if is_tapped else {}
    if is_cast:
        rows = op.Cast(rows, to=ir.DataType.FLOAT)
        rows.dtype = ir.DataType.FLOAT
    if is_flattened:
        rows = op.Reshape(rows, op.Concat(op.Shape(ids), [64], axis=0))
    model = graph.model(y=op.Relu(rows), **taps)
    function = functions.grouped_quant_dequantize()
    model.functions[function.identifier()] = function
    return model


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("is_flattened", [False, True])
def test_rows_come_from_one_node(is_flattened: bool, is_cast: bool, has_offsets: bool) -> None:
    model = embedding(is_flattened, has_offsets, is_cast)
    ids = np.array([[3, 19, 0], [5, 3, 1]]) if is_flattened else np.array([7, 2, 7])
    expected = run(model, {"ids": ids})["y"]
    assert FuseGatherPass()(model).modified
    assert ops(model) == ["GroupedQuantGather", "Relu"]
    assert not model.functions
    np.testing.assert_array_equal(run(model, {"ids": ids})["y"], expected)
    assert not FuseGatherPass()(model).modified


def test_rows_that_are_an_output_keep_their_shape() -> None:
    model = embedding(is_tapped=True)
    ids = np.array([[3, 19, 0], [5, 3, 1]])
    expected = run(model, {"ids": ids})
    assert FuseGatherPass()(model).modified
    found = run(model, {"ids": ids})
    for name in ("y", "rows"):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("change", ["some dims", "two dims", "a given dim"])
def test_another_shape_of_rows_stays(change: str) -> None:
    """Rows get the dims of the indices back, all of them, and one more."""
    graph = Graph({"ids": ["batch", "tokens"], "last": [1]}, dict.fromkeys(("ids", "last"), ir.DataType.INT64))
    op, ids = graph.op, graph["ids"]
    flat = op.Reshape(ids, [-1])
    flat.dtype = ir.DataType.INT64
    gathered = [op.Gather(table, flat) for table in graph.table(20, 64, "table")]
    rows = op.call(functions.grouped_quant_dequantize(), *gathered, **vars(FORM))
    rows.dtype, rows.shape = ir.DataType.FLOAT, ir.Shape([None, 64])
    dims = op.Shape(ids, start=0, end=1) if change == "some dims" else op.Shape(ids)
    tail = {"some dims": [-1], "two dims": [2, 32], "a given dim": graph["last"]}[change]
    model = graph.model(y=op.Relu(op.Reshape(rows, op.Concat(dims, tail, axis=0))))
    function = functions.grouped_quant_dequantize()
    model.functions[function.identifier()] = function
    feeds = {"ids": np.array([[3, 19, 0], [5, 3, 1]]), "last": np.array([64])}
    expected = run(model, feeds)["y"]
    FuseGatherPass()(model)
    assert "Reshape" in ops(model)
    np.testing.assert_array_equal(run(model, feeds)["y"], expected)


def test_a_whole_table_stays() -> None:
    graph = Graph({"x": ["tokens", 64]})
    weight = graph.op.GroupedQuantDequantize(*graph.table(20, 64, "table"), **vars(FORM), _domain=DOMAIN)
    check_untouched(graph.model(y=graph.op.MatMul(weight, graph["x"])), FuseGatherPass)


def test_codes_and_scales_of_different_rows_stay() -> None:
    graph = Graph({"ids": ["tokens"], "others": ["tokens"]}, dict.fromkeys(("ids", "others"), ir.DataType.INT64))
    op = graph.op
    codes, scales, offsets = graph.table(20, 64, "table")
    gathered = [op.Gather(codes, graph["ids"]), op.Gather(scales, graph["others"]), op.Gather(offsets, graph["ids"])]
    check_untouched(graph.model(y=op.GroupedQuantDequantize(*gathered, **vars(FORM), _domain=DOMAIN)), FuseGatherPass)
