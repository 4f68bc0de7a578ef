"""``DecomposeAttentionPass`` and ``PlainAttentionPass``: the numbers of ONNX's own definition of Attention.

Bounds, relative L2: 1e-6 in float32, 2e-3 in float16 against float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import build_for_gpu

from intaglio.engines.lowering.decompose_attention import DecomposeAttentionPass, heads_of
from intaglio.engines.lowering.plain_attention import PlainAttentionPass
from intaglio.engines.nvidia.lower import why_not_fused
from intaglio.errors import CompileError

F32, F16, BOOL = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL
B, H, K, S, T, E = 2, 6, 2, 7, 9, 16
FLAT = {"q": ("B", "S", H * E), "k": ("B", "T", K * E), "v": ("B", "T", K * E)}
HEADS = {"q": ("B", H, "S", E), "k": ("B", K, "T", E), "v": ("B", K, "T", E)}
PLAIN = {"q": ("B", H, "S", E), "k": ("B", H, "T", E), "v": ("B", H, "T", E)}
FLAT_HEADS = {"q_num_heads": H, "kv_num_heads": K}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...] | None, Any]] = {
    "plain": (PLAIN, {}, None, None),
    "scaled": (PLAIN, {"scale": 0.3}, None, None),
    "shared keys": (HEADS, {"scale": 0.3}, ("B", 1, "S", "T"), BOOL),
    "one key": ({**HEADS, "k": ("B", 1, "T", E), "v": ("B", 1, "T", E)}, {}, None, None),
    "rows": (FLAT, FLAT_HEADS, None, None),
    "rows under a mask of heads": (FLAT, FLAT_HEADS, ("B", H, "S", "T"), F32),
    "a mask of two axes": (PLAIN, {}, ("S", "T"), BOOL),
    "a float mask of two axes": (HEADS, {}, ("S", "T"), F32),
    "causal": (PLAIN, {"is_causal": 1}, None, None),
    "causal, shared keys, masked": (HEADS, {"is_causal": 1}, ("B", 1, "S", "T"), F32),
    "softcap": (PLAIN, {"softcap": 1.5}, None, None),
    "softcap under a mask": (HEADS, {"softcap": 1.5}, ("B", 1, "S", "T"), BOOL),
    "another size of values": ({**HEADS, "v": ("B", K, "T", 24)}, {}, None, None),
    "heads of 512": ({n: (*shape[:3], 512) for n, shape in PLAIN.items()}, {}, None, None),
}


def attention(
    shapes: dict[str, Any], attributes: dict[str, Any], mask: Any = None, mask_dtype: Any = None, dtype: Any = F32
) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="attention")
    every = {**shapes, **({"mask": mask} if mask else {})}
    for name, shape in every.items():
        kind = mask_dtype if name == "mask" else dtype
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape)))
    node = ir.node("Attention", graph.inputs, attributes, name="attention")
    graph.append(node)
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", dtype, graph.inputs[0].shape
    graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=11)


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(), {"B": B, "S": S, "T": T}
    feeds = {}
    for value in model.graph.inputs:
        shape = [d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape or ()]
        numbers = rng.standard_normal(shape)
        if value.dtype == BOOL:
            feeds[str(value.name)] = (numbers > 0.3) | (np.arange(shape[-1]) == 0)
        else:
            feeds[str(value.name)] = numbers.astype(np.float16).astype(value.dtype.numpy())
    return feeds


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(found - wide) / np.linalg.norm(wide))


def saved(model: ir.Model, folder: Path) -> Path:
    ir.save(model, folder / "attention.onnx")
    return folder / "attention.onnx"


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", CASES)
def test_taken_apart(name: str, dtype: ir.DataType, tmp_path: Path) -> None:
    shapes, attributes, mask, mask_dtype = CASES[name]
    if dtype == F16:
        attributes = {**attributes, "softmax_precision": F32}
        mask_dtype = F16 if mask_dtype == F32 else mask_dtype
    wide = attention(shapes, attributes, mask, F32 if mask_dtype == F16 else mask_dtype)
    model = attention(shapes, attributes, mask, mask_dtype, dtype)
    feeds = feeds_of(model)
    wide_feeds = {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in feeds.items()}
    (expected,) = ReferenceEvaluator(ir.serde.serialize_model(wide)).run(None, wide_feeds)
    lowering = DecomposeAttentionPass(lambda node: "asked for")
    assert lowering(model).modified
    assert lowering.notes == ["1 of Attention as MatMul and Softmax: asked for"]
    assert "Attention" not in {node.op_type for node in model.graph}
    found = run_onnxruntime(saved(model, tmp_path), feeds)["y"]
    assert found.dtype == dtype.numpy()
    assert relative_l2(found, expected) <= (1e-6 if dtype == F32 else 2e-3)
    (softmax,) = (node for node in model.graph if node.op_type == "Softmax")
    assert softmax.outputs[0].dtype == F32
    assert not DecomposeAttentionPass(lambda node: "asked for")(model).modified


@pytest.mark.parametrize(
    ("shapes", "attributes", "dtype", "why"),
    [
        (HEADS, {}, F16, None),
        (FLAT, FLAT_HEADS, ir.DataType.BFLOAT16, None),
        (HEADS, {}, F32, "float32"),
        (HEADS, {"softcap": 2.0}, F16, "softcap"),
        ({n: (*shape[:3], 512) for n, shape in PLAIN.items()}, {}, F16, "512"),
        ({n: (*shape[:3], 8) for n, shape in PLAIN.items()}, {}, F16, "heads of 8"),
        ({**HEADS, "v": ("B", K, "T", 24)}, {}, F16, "differ in size"),
    ],
)
def test_what_is_taken_apart(shapes: dict[str, Any], attributes: dict[str, Any], dtype: Any, why: str | None) -> None:
    model = attention(shapes, attributes, dtype=dtype)
    found = why_not_fused(model.graph[0])
    assert found is None if why is None else why in str(found)


def test_one_tensor_for_queries_and_keys_is_taken_apart() -> None:
    """TensorRT's builder crashes on it."""
    model = attention(PLAIN, {}, dtype=F16)
    node = model.graph[0]
    for index in (1, 2):
        node.replace_input_with(index, node.inputs[0])
    assert why_not_fused(node) == "queries and keys are one tensor"


def test_numbers_of_heads_that_nobody_says_are_refused() -> None:
    with pytest.raises(CompileError, match="numbers of heads"):
        heads_of(attention(dict.fromkeys("qkv", ("B", "S", H * E)), {}).graph[0])


def test_a_cache_of_its_own_is_refused() -> None:
    model = attention(PLAIN, {})
    node = model.graph[0]
    node.resize_outputs(3)
    node.outputs[1].name, node.outputs[1].dtype = "present_key", F32
    model.graph.outputs.append(node.outputs[1])
    with pytest.raises(CompileError, match="cache"):
        DecomposeAttentionPass(lambda node: "asked for")(model)


def test_what_the_parser_refuses_goes(tmp_path: Path) -> None:
    attributes = {"softmax_precision": F32, "softcap": 0.0, "qk_matmul_output_mode": 0, "scale": 0.25}
    model = attention(HEADS, attributes, ("B", 1, "S", "T"), F32, F16)
    model.graph[0].resize_outputs(3)
    assert PlainAttentionPass()(model).modified
    (bound, cast, node) = model.graph
    assert (bound.op_type, cast.op_type) == ("Max", "Cast")
    assert (node.inputs[3], len(node.outputs)) == (cast.outputs[0], 1)
    assert node.inputs[3].dtype == F16
    assert list(node.attributes) == ["scale"]
    assert not PlainAttentionPass()(model).modified
    pytest.importorskip("tensorrt_rtx_bindings")
    built = build_for_gpu(saved(model, tmp_path), {"B": (1, 1, 2), "S": (1, 16, 64), "T": (1, 16, 64)})
    assert not built.failure, built


@pytest.mark.parametrize("name", ["shared keys", "rows", "causal, shared keys, masked", "softcap", "heads of 512"])
def test_tensorrt_builds_what_was_taken_apart(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    shapes, attributes, mask, mask_dtype = CASES[name]
    model = attention(shapes, {**attributes, "softmax_precision": F32}, mask, mask_dtype, F16)
    DecomposeAttentionPass(lambda node: "asked for")(model)
    built = build_for_gpu(saved(model, tmp_path), {"B": (1, 1, 2), "S": (1, 16, 64), "T": (1, 16, 64)})
    assert not built.failure, built
