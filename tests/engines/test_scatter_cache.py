"""``ScatterCachePass``: a decoder over buffers of a fixed length, with the numbers of the portable graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from gpu_stages import export_decoder, relative_l2, run_widened, write_lowered

from intaglio.engines.lowering.scatter_cache import POSITION, ScatterCachePass
from intaglio.errors import CompileError

CONTEXT, BATCH = 24, 2
BOUND = 1e-5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_decoder(tmp_path_factory.mktemp("decoder"))


def tokens(lengths: list[int]) -> list[dict[str, np.ndarray]]:
    """Feeds of a prompt and of steps after it; the second row is padded on the left."""
    rng, steps, past = np.random.default_rng(), [], 0
    for count in lengths:
        mask = np.ones((BATCH, past + count), np.int64)
        mask[1, :2] = 0
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        ids = rng.integers(0, 256, (BATCH, count))
        steps.append({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
        past += count
    return steps


def caches(graph: Path, length: int, fill: float) -> dict[str, np.ndarray]:
    inputs = [value for value in ir.load(graph).graph.inputs if str(value.name).startswith("past_key_values.")]
    return {
        str(value.name): np.full((BATCH, int(value.shape[1]), length, int(value.shape[3])), fill, np.float32)
        for value in inputs
        if value.shape is not None
    }


def presents(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.replace("present", "past_key_values"): array.astype(np.float32)
        for name, array in outputs.items()
        if name.startswith("present.")
    }


def test_a_prompt_and_steps_after_it(bundle: Path, tmp_path: Path) -> None:
    graph = bundle / "generate.onnx"
    lowered, _ = write_lowered(graph, tmp_path, context=CONTEXT)
    # What nothing has been written to holds other numbers.
    buffers, past = caches(lowered, CONTEXT, 9.0), caches(graph, 0, 0.0)
    position = 0
    for feeds in tokens([7, 1, 1, 3, 1]):
        expected = run_widened(graph, {**feeds, **past})
        padded = np.zeros((BATCH, CONTEXT), np.int64)
        length = feeds["attention_mask"].shape[1]
        padded[:, :length] = feeds["attention_mask"]
        given = {**feeds, "attention_mask": padded, POSITION: np.array([position])}
        found = run_widened(lowered, {**given, **buffers})
        assert relative_l2(found["logits"], expected["logits"]) <= BOUND
        past, buffers = presents(expected), presents(found)
        for name, array in past.items():
            assert relative_l2(buffers[name][:, :, :length], array) <= BOUND
            assert (buffers[name][:, :, length:] == 9.0).all()
        position = length


def test_what_it_says_of_the_graph(bundle: Path) -> None:
    model = ir.load(bundle / "generate.onnx")
    lowering = ScatterCachePass(CONTEXT)
    assert lowering(model).modified
    assert [(each.past, each.present) for each in lowering.caches] == [
        (f"past_key_values.{layer}.{part}", f"present.{layer}.{part}")
        for layer in range(2)
        for part in ("key", "value")
    ]
    shapes = {str(value.name): list(value.shape or ()) for value in (*model.graph.inputs, *model.graph.outputs)}
    for name, shape in shapes.items():
        if name.startswith(("past_key_values.", "present.")):
            assert shape[1:] == [2, CONTEXT, 32]
    assert shapes["attention_mask"][1] == CONTEXT
    assert shapes[POSITION] == [1]
    assert model.graph.opset_imports[""] == 24
    assert not any(node.op_type == "Concat" and "present" in str(node.outputs[0].name) for node in model.graph)
    assert not ScatterCachePass(CONTEXT)(model).modified


def test_a_graph_without_a_cache_is_left(bundle: Path) -> None:
    model = ir.load(bundle / "score.onnx")
    assert not ScatterCachePass(CONTEXT)(model).modified
    assert len(model.graph.inputs) == 3


@pytest.mark.parametrize("change", ["no mask", "a position", "another reader", "all dims"])
def test_what_a_buffer_cannot_answer_is_refused(bundle: Path, change: str) -> None:
    model = ir.load(bundle / "generate.onnx")
    graph = model.graph
    past = next(value for value in graph.inputs if value.name == "past_key_values.1.key")
    if change == "no mask":
        next(value for value in graph.inputs if value.name == "attention_mask").name = "mask"
    elif change == "a position":
        graph.inputs.append(ir.Value(name=POSITION, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1])))
    else:
        node = ir.node("Neg" if change == "another reader" else "Shape", [past])
        graph.append(node)
    with pytest.raises(CompileError, match={"no mask": "attention_mask", "a position": "position"}.get(change, "past")):
        ScatterCachePass(CONTEXT)(model)
