"""Lowering passes: the same numbers before and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from onnxscript import GraphBuilder

from intaglio.engines.graph_stats import activation_dtype, widened_bytes
from intaglio.engines.lowering.additive_mask import AdditiveMaskPass
from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.lowering.widen_products import WidenProductsPass


def attention_model() -> ir.Model:
    """Two attentions that share one boolean mask."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="attention")
    builder = GraphBuilder(graph)
    shape = ir.Shape(["batch", 2, "sequence", 8])
    q, k, v = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=shape) for n in "qkv")
    mask_shape = ir.Shape(["batch", 1, "sequence", "sequence"])
    mask = ir.Value(name="mask", type=ir.TensorType(ir.DataType.BOOL), shape=mask_shape)
    graph.inputs.extend([q, k, v, mask])
    y = builder.op.Attention(builder.op.Attention(q, k, v, mask), k, v, mask)
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, shape
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    data = ir.serde.serialize_model(model).SerializeToString()
    return onnxruntime.InferenceSession(data).run(None, feeds)[0]


def test_additive_mask_changes_no_number() -> None:
    rng = np.random.default_rng(0)
    feeds = {n: rng.normal(size=(2, 2, 6, 8)).astype(np.float32) for n in "qkv"}
    mask = rng.random((2, 1, 6, 6)) < 0.4
    mask |= np.eye(6, dtype=bool)
    model = attention_model()
    expected = run(model, {**feeds, "mask": mask})
    assert AdditiveMaskPass()(model).modified
    masks = {node.inputs[3] for node in model.graph if node.op_type == "Attention"}
    assert len(masks) == 1
    assert masks.pop().dtype == ir.DataType.FLOAT
    np.testing.assert_allclose(run(model, {**feeds, "mask": mask}), expected, rtol=1e-6, atol=1e-6)
    # The mask matters, and a second pass finds nothing to do.
    assert not np.allclose(run(model, {**feeds, "mask": np.ones_like(mask)}), expected)
    assert not AdditiveMaskPass()(model).modified


HALF, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def half_model(folder: Path, dtype: ir.DataType) -> ir.Model:
    """A gathered table that is an output too and a tied head, a product of activations, a constant in a node."""
    table = np.random.default_rng(1).normal(size=(10, 16)).astype(dtype.numpy())
    (folder / "weights").write_bytes(table.tobytes())
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="half")
    op = GraphBuilder(graph).op
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["tokens"]))
    bias = ir.Value(name="bias", type=ir.TensorType(dtype), shape=ir.Shape([16]))
    graph.inputs.extend([ids, bias])
    weight = ir.Value(name="table", type=ir.TensorType(dtype), shape=ir.Shape([10, 16]))
    weight.const_value = ir.ExternalTensor(
        "weights", 0, table.nbytes, dtype, shape=ir.Shape([10, 16]), name="table", base_dir=folder
    )
    graph.register_initializer(weight)
    rows = op.Gather(weight, ids)
    third = op.Constant(value=ir.tensor(np.array(1 / 3, dtype.numpy())))
    third.dtype, third.shape = dtype, ir.Shape([])
    x = op.Add(op.Mul(rows, third), op.Cast(op.Cast(bias, to=WIDE), to=dtype))
    scores = op.MatMul(x, op.Transpose(x, perm=[1, 0]))
    logits = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    again = op.Add(logits, logits)
    for value, name in ((rows, "rows"), (scores, "scores"), (logits, "logits"), (again, "again")):
        value.name = name
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=11)


def half_feeds(dtype: ir.DataType) -> dict[str, np.ndarray]:
    return {"ids": np.array([3, 0, 9]), "bias": np.linspace(-1, 1, 16).astype(dtype.numpy())}


def run_external(model: ir.Model, folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    data = ir.serde.serialize_model(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options)
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def run_reference(model: ir.Model, folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ONNX's own evaluator, which computes in the dtypes that the graph states."""
    proto = load_whole(model, folder)
    names = [o.name for o in proto.graph.output]
    return dict(zip(names, ReferenceEvaluator(proto).run(None, feeds), strict=True))


def load_whole(model: ir.Model, folder: Path) -> onnx.ModelProto:
    (folder / "half.onnx").write_bytes(ir.serde.serialize_model(model).SerializeToString())
    return onnx.load(folder / "half.onnx")


def test_a_widened_graph_is_float32_everywhere(tmp_path: Path) -> None:
    feeds = half_feeds(HALF)
    expected = run_reference(half_model(tmp_path, HALF), tmp_path, feeds)
    model = half_model(tmp_path, HALF)
    assert activation_dtype(model) == "bfloat16"
    assert WidenDtypePass(HALF, [])(model).modified
    onnx.checker.check_model(load_whole(model, tmp_path), full_check=True)
    assert activation_dtype(model) == "float32"
    # The file's table stays; gathered rows are cast, and the whole table once, for the head.
    narrow = {v.name for v in model.graph.initializers.values() if v.dtype == HALF}
    narrow |= {v.name for node in model.graph for v in node.outputs if v.dtype == HALF}
    assert narrow == {"table", "rows.stored"}
    assert widened_bytes(model) == 4 * 160
    found = run_external(model, tmp_path, {**feeds, "bias": feeds["bias"].astype(np.float32)})
    for name, value in found.items():
        assert value.dtype == np.float32
        wide = expected[name].astype(np.float32)
        assert np.linalg.norm(value - wide) <= 1e-2 * np.linalg.norm(wide), name
    np.testing.assert_array_equal(found["rows"], expected["rows"].astype(np.float32))
    assert not WidenDtypePass(ir.DataType.FLOAT16, [])(model).modified


@pytest.mark.parametrize("last", [True, False], ids=["read on", "only an output"])
def test_products_are_widened_and_rounded_once(tmp_path: Path, last: bool) -> None:
    half = ir.DataType.FLOAT16
    feeds = half_feeds(half)
    expected = run_reference(half_model(tmp_path, half), tmp_path, feeds)
    model = half_model(tmp_path, half)
    if not last:
        model.graph.remove(model.graph.outputs.pop().producer(), safe=True)
    assert WidenProductsPass({("", "MatMul"): (0, 1)})(model).modified
    onnx.checker.check_model(load_whole(model, tmp_path), full_check=True)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert {v.dtype for node in products for v in (*node.inputs, *node.outputs)} == {WIDE}
    # One cast of x, however many products read it.
    assert len({node.inputs[0] for node in products}) == 1
    assert {v.name: v.dtype for v in model.graph.outputs}["logits"] == half
    assert widened_bytes(model) == 4 * 160
    for name, value in run_external(model, tmp_path, feeds).items():
        assert value.dtype == np.float16
        np.testing.assert_allclose(value, expected[name], rtol=2e-3, atol=2e-3)
    assert not WidenProductsPass({("", "MatMul"): (0, 1)})(model).modified
    assert not WidenProductsPass({("", "MatMul"): (0, 1)})(attention_model()).modified
