"""``FuseAttentionPass``: the same numbers before and after, and nothing taken that the kernel lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript import GraphBuilder, OpBuilder

from intaglio.engines.cpu_cache import CACHE_IN_PLACE
from intaglio.engines.lowering.fuse_attention import OP_TYPE, FuseAttentionPass
from intaglio.kernels.cpu.library import library_path

HEADS, KV_HEADS, SIZE = 4, 2, 8
MOVING = {"Transpose", "Reshape", "RotaryEmbedding", "Concat", "Attention"}
Body = Callable[[OpBuilder, dict[str, ir.Value]], dict[str, ir.Value]]


def build(shapes: dict[str, tuple[Any, ...]], body: Body, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """A graph of the inputs ``shapes``: tokens and masks by their names, else ``dtype``."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="attention")
    kinds = {"attention_mask": ir.DataType.INT64, "input_ids": ir.DataType.INT64, "mask": ir.DataType.BOOL}
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(kinds.get(name, dtype)), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    }
    graph.inputs.extend(inputs.values())
    for name, value in body(GraphBuilder(graph).op, inputs).items():
        value.name = name
        value.dtype = value.dtype or dtype
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    data = ir.serde.serialize_model(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run([output.name for output in model.graph.outputs], feeds)


def lowered(model: ir.Model, feeds: dict[str, np.ndarray], *, fused: int = 1) -> set[str]:
    """Lowers ``model``, checks its numbers and the count of fused nodes, and gives the op types that are left."""
    names = [output.name for output in model.graph.outputs]
    shapes = [output.shape for output in model.graph.outputs]
    expected = run(model, feeds)
    assert FuseAttentionPass()(model).modified == bool(fused)
    assert [output.name for output in model.graph.outputs] == names
    assert [output.shape for output in model.graph.outputs] == shapes
    for name, found, wanted in zip(names, run(model, feeds), expected, strict=True):
        assert found.shape == wanted.shape, name
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max(), err_msg=str(name))
    assert sum(node.op_type == OP_TYPE for node in model.graph) == fused
    assert not FuseAttentionPass()(model).modified
    return {node.op_type for node in model.graph}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def cos_and_sin(batch: int, tokens: int) -> dict[str, np.ndarray]:
    angles = np.random.default_rng(tokens).uniform(-3, 3, size=(batch, tokens, SIZE // 2))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


ROWS = {"q": ("B", "S", HEADS * SIZE), "k": ("B", "S", KV_HEADS * SIZE), "v": ("B", "S", KV_HEADS * SIZE)}
TABLES = {"cos": ("B", "S", SIZE // 2), "sin": ("B", "S", SIZE // 2)}
ROW_FEEDS = {name: random(2, 5, shape[2]) for name, shape in ROWS.items()}


def heads_of(op: OpBuilder, x_BSD: ir.Value, heads: int) -> ir.Value:
    x_BSHE = op.Reshape(x_BSD, [0, 0, heads, SIZE])
    x_BSHE.shape = ir.Shape(["B", "S", heads, SIZE])
    x_BHSE = op.Transpose(x_BSHE, perm=[0, 2, 1, 3])
    x_BHSE.shape, x_BHSE.dtype = ir.Shape(["B", heads, "S", SIZE]), x_BSD.dtype
    return x_BHSE


def all_heads(op: OpBuilder, x: dict[str, ir.Value]) -> list[ir.Value]:
    return [heads_of(op, x["q"], HEADS), heads_of(op, x["k"], KV_HEADS), heads_of(op, x["v"], KV_HEADS)]


def rotary(op: OpBuilder, x: ir.Value, cos: ir.Value, sin: ir.Value, **attributes: int) -> ir.Value:
    turned = op.RotaryEmbedding(x, cos, sin, **attributes)
    turned.shape, turned.dtype = x.shape, x.dtype
    return turned


def attention(op: OpBuilder, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    out = op.Attention(*inputs, **attributes)
    assert inputs[0] is not None
    out.shape, out.dtype = inputs[0].shape, inputs[0].dtype
    return out


def merged(op: OpBuilder, x_BHSE: ir.Value) -> ir.Value:
    return op.Reshape(op.Transpose(x_BHSE, perm=[0, 2, 1, 3]), [0, 0, -1])


@pytest.mark.parametrize("interleaved", [0, 1])
def test_all_that_moves_numbers_is_absorbed(interleaved: int) -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        q, k = (rotary(op, part, x["cos"], x["sin"], interleaved=interleaved) for part in (q, k))
        return {"y": op.Neg(merged(op, attention(op, q, k, v, x["mask"], scale=0.3)))}

    mask = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.5
    mask[..., 0] = True
    model = build({**ROWS, **TABLES, "mask": ("B", 1, "S", "S")}, body)
    left = lowered(model, {**ROW_FEEDS, **cos_and_sin(2, 5), "mask": mask})
    assert left == {OP_TYPE, "Neg"}


def test_heads_that_were_never_rows() -> None:
    """Inputs and an output with the heads first."""
    shapes = {n: ("B", heads, "S", SIZE) for n, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    model = build(shapes, lambda op, x: {"y": attention(op, x["q"], x["k"], x["v"], is_causal=1)})
    feeds = {name: random(2, shape[1], 5, SIZE) for name, shape in shapes.items()}
    assert lowered(model, feeds) == {OP_TYPE}


def test_rows_that_attention_splits_itself() -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        return {"y": attention(op, x["q"], x["k"], x["v"], q_num_heads=HEADS, kv_num_heads=KV_HEADS)}

    assert lowered(build(ROWS, body), ROW_FEEDS) == {OP_TYPE}


def test_what_others_read_stays() -> None:
    """Rotated queries, split keys and unmerged results are outputs as well."""

    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        q, turned = (rotary(op, part, x["cos"], x["sin"], interleaved=0) for part in (q, k))
        out = attention(op, q, turned, v)
        return {"y": merged(op, out), "q_turned": q, "k_split": k, "heads": out}

    left = lowered(build({**ROWS, **TABLES}, body), {**ROW_FEEDS, **cos_and_sin(2, 5)})
    assert {"Transpose", "Reshape", "RotaryEmbedding"} <= left


def test_two_kinds_of_rotation_are_left() -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        q = rotary(op, q, x["cos"], x["sin"], interleaved=0)
        k = rotary(op, k, x["cos"], x["sin"], interleaved=1)
        return {"y": merged(op, attention(op, q, k, v))}

    assert "RotaryEmbedding" in lowered(build({**ROWS, **TABLES}, body), {**ROW_FEEDS, **cos_and_sin(2, 5)})


def test_another_transpose_is_left() -> None:
    """Tokens and heads exchanged twice, and a shape of no heads."""

    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        k = op.Transpose(op.Transpose(k, perm=[1, 0, 2, 3]), perm=[1, 0, 2, 3])
        k.shape, k.dtype = v.shape, v.dtype
        out = attention(op, q, k, v)
        return {"y": op.Reshape(op.Transpose(out, perm=[0, 2, 3, 1]), [0, 0, -1])}

    assert {"Transpose", "Reshape"} <= lowered(build(ROWS, body), ROW_FEEDS)


@pytest.mark.parametrize("attributes", [{"softcap": 2.0}, {"qk_matmul_output_mode": 1}], ids=str)
def test_what_the_kernel_lacks_is_left(attributes: dict[str, Any]) -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        return {"y": merged(op, attention(op, *all_heads(op, x), **attributes))}

    assert "Attention" in lowered(build(ROWS, body), ROW_FEEDS, fused=0)


def test_halves_are_left() -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        return {"y": merged(op, attention(op, *all_heads(op, x)))}

    model = build(ROWS, body, ir.DataType.FLOAT16)
    assert "Attention" in lowered(model, {n: a.astype(np.float16) for n, a in ROW_FEEDS.items()}, fused=0)


def test_a_past_of_attention_itself() -> None:
    heads = dict.fromkeys(("past_k", "past_v"), ("B", KV_HEADS, "P", SIZE))

    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        y, present_k, present_v = op.Attention(q, k, v, None, x["past_k"], x["past_v"], is_causal=1, _outputs=3)
        y.shape, y.dtype = q.shape, q.dtype
        return {"y": merged(op, y), "present_k": present_k, "present_v": present_v}

    feeds = {**ROW_FEEDS, **{name: random(2, KV_HEADS, 3, SIZE) for name in heads}}
    assert lowered(build({**ROWS, **heads}, body), feeds) == {OP_TYPE}


LAYERS = 2
CACHE = {
    f"past_key_values.{layer}.{part}": ("B", KV_HEADS, "P", SIZE)
    for layer in range(LAYERS)
    for part in ("key", "value")
}
TOKENS = {"input_ids": ("B", "S"), "attention_mask": ("B", "T")}


def decoder(op: OpBuilder, x: dict[str, ir.Value], *, cache_is_read: bool = False) -> dict[str, ir.Value]:
    """Two layers over a cache, as the exporters write it."""
    past_S = op.Shape(x["past_key_values.0.key"], start=2, end=3)
    past_S.dtype, past_S.shape = ir.DataType.INT64, ir.Shape([1])
    keys_T = op.CumSum(op.Expand([1], op.Shape(x["attention_mask"], start=1, end=2)), 0)
    queries_S = op.Add(op.CumSum(op.Expand([1], op.Shape(x["input_ids"], start=1, end=2)), 0), past_S)
    causal_ST = op.LessOrEqual(keys_T, op.Unsqueeze(queries_S, [-1]))
    mask = op.And(causal_ST, op.Unsqueeze(op.Cast(x["attention_mask"], to=ir.DataType.BOOL), [1, 2]))
    mask.dtype, mask.shape = ir.DataType.BOOL, ir.Shape(["B", 1, "S", "T"])
    outputs: dict[str, ir.Value] = {}
    row = x["q"]
    for layer in range(LAYERS):
        q, k, v = heads_of(op, row, HEADS), heads_of(op, x["k"], KV_HEADS), heads_of(op, x["v"], KV_HEADS)
        q, k = (rotary(op, part, x["cos"], x["sin"], interleaved=0) for part in (q, k))
        joined = []
        for part, new in (("key", k), ("value", v)):
            both = op.Concat(x[f"past_key_values.{layer}.{part}"], new, axis=2)
            both.shape, both.dtype = ir.Shape(["B", KV_HEADS, "T", SIZE]), ir.DataType.FLOAT
            outputs[f"present.{layer}.{part}"] = both
            joined.append(both)
        row = merged(op, attention(op, q, *joined, mask))
        row.shape, row.dtype = x["q"].shape, ir.DataType.FLOAT
    if cache_is_read:
        outputs["sum"] = op.ReduceSum(x["past_key_values.1.value"], [2])
    return {"y": row, **outputs}


def cache_feeds(past: int, new: int) -> dict[str, np.ndarray]:
    mask = np.ones((2, past + new), np.int64)
    mask[1, :2] = 0
    return {
        **{name: random(2, new, shape[2]) for name, shape in ROWS.items()},
        **cos_and_sin(2, new),
        **{name: random(2, KV_HEADS, past, SIZE) for name in CACHE},
        "input_ids": np.zeros((2, new), np.int64),
        "attention_mask": mask,
    }


@pytest.mark.parametrize(("past", "new"), [(0, 3), (6, 1), (6, 4)])
def test_a_cache_is_absorbed(past: int, new: int) -> None:
    model = build({**ROWS, **TABLES, **TOKENS, **CACHE}, decoder)
    left = lowered(model, cache_feeds(past, new), fused=LAYERS)
    assert not left & MOVING
    assert model.metadata_props == {CACHE_IN_PLACE: "1"}
    # No length is taken from a past: it may be longer than what is filled of it.
    feeds = cache_feeds(past, new)
    expected = run(model, feeds)
    roomy = {
        n: np.concatenate([a, np.full((2, KV_HEADS, new + 2, SIZE), 9, np.float32)], axis=2)
        for n, a in feeds.items()
        if n in CACHE
    }
    found = run(model, {**feeds, **roomy})
    np.testing.assert_array_equal(found[0], expected[0])
    for given, wanted in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(given[:, :, : past + new], wanted)


def test_a_cache_that_others_read_is_not_marked() -> None:
    model = build({**ROWS, **TABLES, **TOKENS, **CACHE}, lambda op, x: decoder(op, x, cache_is_read=True))
    lowered(model, cache_feeds(6, 1), fused=LAYERS)
    assert not model.metadata_props


def test_a_cache_without_counted_tokens_is_not_marked() -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        joined = [op.Concat(x[f"past_key_values.0.{part}"], new, axis=2) for part, new in (("key", k), ("value", v))]
        for value in joined:
            value.shape, value.dtype = ir.Shape(["B", KV_HEADS, "T", SIZE]), ir.DataType.FLOAT
        y = merged(op, attention(op, q, *joined))
        return {"y": y, "present.0.key": joined[0], "present.0.value": joined[1]}

    pasts = {name: shape for name, shape in CACHE.items() if ".0." in name}
    model = build({**ROWS, **pasts}, body)
    lowered(model, {name: array for name, array in cache_feeds(6, 1).items() if name in (*ROWS, *pasts)})
    assert not model.metadata_props


@pytest.mark.parametrize("change", ["no mask", "mask of one key", "present of another name", "present of another part"])
def test_a_cache_whose_filling_is_not_told_is_not_marked(change: str) -> None:
    """Only a mask over all keys says how much of a buffer is filled, and only the cache's own outputs are bound."""

    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        outputs = decoder(op, x)
        for node in op.builder.graph:
            if node.op_type == "Attention" and change == "no mask":
                node.resize_inputs(3)
            elif node.op_type == "Attention" and change == "mask of one key":
                node.replace_input_with(3, x["mask"])
        if change == "present of another name":
            outputs["present.9.key"] = outputs.pop("present.1.key")
        elif change == "present of another part":
            parts = outputs.pop("present.0.key"), outputs.pop("present.0.value")
            outputs["present.0.value"], outputs["present.0.key"] = parts
        return outputs

    shapes = {**ROWS, **TABLES, **TOKENS, **CACHE, "mask": ("B", 1, "S", 1)}
    model = build(shapes, body)
    FuseAttentionPass()(model)
    assert sum(node.op_type == OP_TYPE for node in model.graph) == LAYERS
    assert not model.metadata_props


def test_causality_over_a_joined_past_starts_at_its_first_key() -> None:
    def body(op: OpBuilder, x: dict[str, ir.Value]) -> dict[str, ir.Value]:
        q, k, v = all_heads(op, x)
        joined = [op.Concat(x[name], new, axis=2) for name, new in (("past_k", k), ("past_v", v))]
        for value in joined:
            value.shape, value.dtype = ir.Shape(["B", KV_HEADS, "T", SIZE]), ir.DataType.FLOAT
        y = merged(op, attention(op, q, *joined, is_causal=1))
        return {"y": y, "present_k": joined[0], "present_v": joined[1]}

    heads = dict.fromkeys(("past_k", "past_v"), ("B", KV_HEADS, "P", SIZE))
    feeds = {**ROW_FEEDS, **{name: random(2, KV_HEADS, 3, SIZE) for name in heads}}
    assert "Concat" in lowered(build({**ROWS, **heads}, body), feeds)


def test_a_seventh_input_is_left() -> None:
    """From opset 24 on it says how many keys count."""
    shapes = {n: ("B", heads, "S", SIZE) for n, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    model = build(
        {**shapes, "input_ids": ("B",)},
        lambda op, x: {"y": attention(op, x["q"], x["k"], x["v"])},
    )
    (node,) = model.graph
    node.resize_inputs(7)
    node.replace_input_with(6, model.graph.inputs[3])
    assert not FuseAttentionPass()(model).modified


def test_the_faster_accuracy_is_asked_for() -> None:
    model = build(ROWS, lambda op, x: {"y": merged(op, attention(op, *all_heads(op, x)))})
    FuseAttentionPass(is_fast=True)(model)
    (node,) = (node for node in model.graph if node.op_type == OP_TYPE)
    assert node.attributes["fast"].as_int() == 1
