"""Lowering passes: the same numbers before and after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxscript import GraphBuilder

from intaglio.engines.lowering.additive_mask import AdditiveMaskPass


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
