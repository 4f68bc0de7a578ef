"""``SplitAttentionCachePass``: Attention with a cache of its own, with the numbers of ONNX's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import build_for_gpu, require_tensorrt_rtx

from intaglio.engines.lowering.split_attention_cache import SplitAttentionCachePass
from intaglio.engines.nvidia.lower import lower
from intaglio.errors import CompileError

F32, F16, BOOL = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL
B, H, K, E, S, P = 2, 4, 2, 16, 3, 5


def model_of(
    *, is_flat: bool = False, past: bool = True, mask: Any = None, dtype: ir.DataType = F32, **attributes: Any
) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="cached")
    heads = {"q": H, "k": K, "v": K}
    shapes: dict[str, list[Any]] = {
        name: ["B", "S", count * E] if is_flat else ["B", count, "S", E] for name, count in heads.items()
    }
    if mask is not None:
        shapes["mask"] = ["B", 1, "S", "T"]
    if past:
        shapes |= {name: ["B", K, "P", E] for name in ("past_k", "past_v")}
    values = {}
    for name, shape in shapes.items():
        kind = mask if name == "mask" else dtype
        values[name] = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
    graph.inputs.extend(values.values())
    inputs = [values.get(name) for name in ("q", "k", "v", "mask", "past_k", "past_v")]
    if is_flat:
        attributes |= {"q_num_heads": H, "kv_num_heads": K}
    node = ir.node("Attention", inputs if past else inputs[:4], attributes, num_outputs=3, name="attention")
    graph.append(node)
    for value, name in zip(node.outputs, ("y", "present_k", "present_v"), strict=True):
        value.name, value.dtype = name, dtype
        value.shape = ir.Shape(shapes["q"] if name == "y" else ["B", K, "T", E])
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=11)


def feeds_of(model: ir.Model, past: bool) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(), {"B": B, "S": S, "P": P, "T": P + S if past else S}
    feeds = {}
    for value in model.graph.inputs:
        shape = [d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape or ()]
        numbers = rng.standard_normal(shape)
        visible = (numbers > 0.2) | (np.arange(shape[-1]) == 0)
        feeds[str(value.name)] = visible if value.dtype == BOOL else numbers.astype(np.float32)
    return feeds


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("mask", [None, BOOL, F32], ids=["no mask", "booleans", "floats"])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}, {"scale": 0.4, "softcap": 2.0}], ids=str)
def test_the_numbers_stay(is_flat: bool, past: bool, mask: Any, attributes: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(is_flat=is_flat, past=past, mask=mask, **attributes)
    feeds = feeds_of(model, past)
    expected = ReferenceEvaluator(ir.serde.serialize_model(model)).run(None, feeds)
    assert SplitAttentionCachePass()(model).modified
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert len(node.outputs) == 1
    assert len(node.inputs) <= 4
    ir.save(model, tmp_path / "split.onnx")
    found = run_onnxruntime(tmp_path / "split.onnx", feeds)
    for name, values in zip(("y", "present_k", "present_v"), expected, strict=True):
        assert found[name].shape == values.shape
        difference = np.linalg.norm(found[name] - values.astype(np.float64))
        assert difference <= 1e-6 * np.linalg.norm(values), name
    assert not SplitAttentionCachePass()(model).modified


@pytest.mark.parametrize("is_flat", [False, True])
def test_tensorrt_builds_it(is_flat: bool, tmp_path: Path) -> None:
    require_tensorrt_rtx()
    model = model_of(is_flat=is_flat, dtype=F16, is_causal=1)
    assert lower(model) == []
    ir.save(model, tmp_path / "split.onnx")
    built = build_for_gpu(tmp_path / "split.onnx", {"B": (1, 1, 2), "S": (1, 1, 8), "P": (1, 8, 32)})
    assert not built.failure, built
    assert built.layers["ATTENTION_INPUT"] == 1


def test_scores_are_refused() -> None:
    model = model_of()
    (node,) = model.graph
    node.resize_outputs(4)
    node.outputs[3].name, node.outputs[3].dtype = "scores", F32
    model.graph.outputs.append(node.outputs[3])
    with pytest.raises(CompileError, match="scores"):
        SplitAttentionCachePass()(model)


@pytest.mark.parametrize("mask", [BOOL, F32])
def test_a_mask_of_keys_is_of_all_queries_then(mask: Any) -> None:
    """Its axis of queries was 1, and under causality no longer is: what reads its shape would be misled."""
    model = model_of(mask=mask, is_causal=1)
    model.graph.inputs[3].shape = ir.Shape(["B", 1, 1, "T"])
    SplitAttentionCachePass()(model)
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    shape = node.inputs[3].shape
    assert [str(dim) for dim in shape[:2]] == ["B", "1"]
    assert shape[2] != 1
