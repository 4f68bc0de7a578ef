"""float16 and bfloat16 graphs against transformers in float32, and node by node against what they declare.

Bounds: relative L2 of every tap and of the logits <= 5e-3 in float16 (measured: at most 3.0e-3) and <= 3e-2 in
bfloat16 (measured: at most 2.4e-2 where every node rounds, 1.6e-2 on an engine, where only weights are rounded). A
value is rounded by at most 2 ** -11 (4.9e-4) or 2 ** -8 (3.9e-3) of itself, and the errors of some thirty roundings
in a row, of weights and of activations, add up like random ones between the input and the output of three layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from gguf_models import TinyGGUF
from graph_text import graph_text
from onnx.reference import ReferenceEvaluator
from tiny_models import GGUF_MODELS, TINY_MODELS

import intaglio
from intaglio.engines.engine import Engine, open_engine, read_report
from intaglio.errors import EngineError
from intaglio.exporters.layers.dtype import DTYPES
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.parity import compare

BOUNDS = {"float16": 5e-3, "bfloat16": 3e-2}
RUNS_AS = {"float16": "float16", "bfloat16": "float32"}
GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
NAMES = ["llama-gqa", "llama-tied", "llama-biases", "mistral-yarn", "qwen2-windows", "qwen3"]
MODELS = {tiny.name: tiny for tiny in TINY_MODELS if tiny.name in NAMES}


@dataclass
class Case:
    dtype: str
    oracle: transformers.PreTrainedModel
    engine: Engine

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    def graph(self, stage: str = "score") -> ir.Model:
        return ir.load(self.engine.bundle_path / f"{stage}.onnx")


_ORACLES: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}
_CASES: dict[tuple[str, str], Case] = {}


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, dtype = request.param
    if (name, dtype) not in _CASES:
        folder = tmp_path_factory.mktemp(name)
        if name not in _ORACLES:
            _ORACLES[name] = (folder / "checkpoint", MODELS[name].build(folder / "checkpoint"))
        checkpoint, oracle = _ORACLES[name]
        intaglio.export(checkpoint, folder / "bundle", dtype=dtype, taps=True)
        intaglio.compile(folder / "bundle")
        _CASES[name, dtype] = Case(dtype, oracle, open_engine(folder / "bundle"))
    return _CASES[name, dtype]


def over(*dtypes: str, names: list[str] = NAMES) -> pytest.MarkDecorator:
    pairs = [(name, dtype) for name in names for dtype in dtypes]
    return pytest.mark.parametrize("case", pairs, ids=["-".join(pair) for pair in pairs], indirect=True)


def random_ids(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, shape)


def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
    }


def oracle_values(oracle: transformers.PreTrainedModel, ids: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """The outputs of the oracle's modules of these names, in float32, and its logits."""
    seen: dict[str, np.ndarray] = {}

    def hook(name: str) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).numpy()

        return keep

    modules = dict(oracle.named_modules())
    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            seen["logits"] = oracle(torch.from_numpy(ids)).logits.numpy()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def check(case: Case, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert len(expected) > 20
    for name, value in expected.items():
        assert compare(name, found[name], value).relative_l2 <= case.bound, name


@over("float16", "bfloat16")
def test_taps_and_logits(case: Case) -> None:
    ids = random_ids(2, 24)
    found = case.engine.load("score").run(feeds(ids))
    taps = [name for name in found if name != "logits"]
    expected = oracle_values(case.oracle, ids, taps)
    check(case, found, expected)
    for name in taps:
        assert found[name].dtype == RUNS_AS[case.dtype], name
    # Rounding is seen: float32 agrees a thousand times closer.
    assert found["logits"].dtype == np.float32
    assert compare("logits", found["logits"], expected["logits"]).relative_l2 > 1e-4


@over("float16", "bfloat16")
def test_the_graph_says_what_is_rounded(case: Case) -> None:
    """Run by ONNX's own reference, which computes in the dtypes that a graph states."""
    ids = random_ids(2, 9, seed=4)
    model = onnx.load(case.engine.bundle_path / "score.onnx")
    names = [output.name for output in model.graph.output]
    found = dict(zip(names, ReferenceEvaluator(model).run(None, feeds(ids)), strict=True))
    taps = [name for name in names if name != "logits"]
    assert {found[name].dtype for name in taps} == {np.dtype(case.dtype)}
    assert found["logits"].dtype == np.float32
    check(case, found, oracle_values(case.oracle, ids, taps))
    engine = case.engine.load("score").run(feeds(ids))
    check(case, engine, found)
    # The head's weight is dense: its product is rounded, then widened.
    rounded = found["logits"].astype(np.dtype(case.dtype)).astype(np.float32)
    np.testing.assert_array_equal(rounded, found["logits"])


@over("float16", "bfloat16")
@pytest.mark.parametrize("stage", ["generate", "score"])
def test_no_float32_outside_the_islands(case: Case, stage: str) -> None:
    graph, dtype = case.graph(stage).graph, DTYPES[case.dtype]
    stored = [v for v in graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)]
    assert {v.dtype for v in stored} == {dtype}
    cache = [v for v in graph.inputs if v.name and v.name.startswith("past")]
    assert {v.dtype for v in cache} == ({dtype} if stage == "generate" else set())
    outputs = {v.name: v.dtype for v in graph.outputs}
    assert outputs.pop("logits") == ir.DataType.FLOAT and set(outputs.values()) == {dtype}
    island, found = [], set()
    for node in graph:
        found.add(node.op_type)
        for value in node.outputs:
            assert value.dtype is not None, value
            if value.dtype.is_floating_point() and value.dtype != dtype:
                assert value.dtype == ir.DataType.FLOAT
                island.append(node)
        if node.op_type == "Attention":
            assert node.attributes["softmax_precision"].as_int() == ir.DataType.FLOAT
        if node.op_type == "RMSNormalization":
            assert node.attributes["stash_type"].as_int() == ir.DataType.FLOAT
    assert {"Attention", "RMSNormalization", "RotaryEmbedding"} <= found
    angles = [node for node in island if ".rotary_emb." in str(node.outputs[0].name)]
    logits = [node for node in island if node.outputs[0].name == "logits"]
    assert len(logits) == 1 and logits[0].op_type == "Cast" and len(angles) + 1 == len(island)
    assert {"Cos", "Sin"} <= {node.op_type for node in angles}
    # The angles leave their island through one cast each, however many layers read them.
    leaving = [u.node for node in angles for v in node.outputs for u in v.uses() if u.node not in angles]
    assert [node.op_type for node in leaving] == ["Cast", "Cast"]


@over("float16", "bfloat16")
def test_valid_onnx(case: Case) -> None:
    for stage in case.engine.bundle.stages.values():
        onnx.checker.check_model(str(case.engine.bundle_path / stage.file), full_check=True)


@over("float16", "bfloat16")
def test_prefill_and_decode_over_the_cache(case: Case) -> None:
    ids = random_ids(2, 18)
    expected = oracle_values(case.oracle, ids, [])["logits"]
    session = case.engine.load("generate")
    cache = [t for t in session.stage.inputs if t.name.startswith("past")]
    assert {t.dtype for t in cache} == {RUNS_AS[case.dtype]}
    decoding = Decoding(session, ids[:, :11].tolist())
    for position in range(10, 17):
        found = decoding.step()
        assert compare("logits", found, expected[:, position]).relative_l2 <= case.bound, position
        decoding.put(ids[:, position + 1])


@over("float16", "bfloat16")
def test_left_padding(case: Case) -> None:
    """No row may become NaN, and each gets what it gets alone."""
    rows = [random_ids(5, seed=1), random_ids(14, seed=2)]
    mask = np.array([[0] * 9 + [1] * 5, [1] * 14])
    ids = np.stack([np.concatenate([np.full(9, 7), rows[0]]), rows[1]])
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)}
    score = case.engine.load("score")
    together = score.run(padded)
    for name, value in together.items():
        assert np.isfinite(value).all(), name
    for row, tokens in enumerate(rows):
        alone = score.run(feeds(tokens[None]), ["logits"])["logits"][0]
        assert compare("logits", together["logits"][row, -len(tokens) :], alone).relative_l2 <= 1e-3
    both = Decoding(case.engine.load("generate"), [row.tolist() for row in rows], pad_token_id=7)
    for _ in range(3):
        logits = both.step()
        assert np.isfinite(logits).all()
        both.put(logits.argmax(axis=-1))


@over("float16", "bfloat16", names=["qwen3"])
def test_references(case: Case) -> None:
    path = case.engine.bundle_path
    report = intaglio.parity(path, against="onnxruntime")
    assert report.first_divergent is None and report.bound == {"float16": 1e-2, "bfloat16": 1e-4}[case.dtype]
    assert intaglio.parity(path, against="onnxruntime", stage="generate").first_divergent is None
    if case.dtype == "float16":
        assert intaglio.parity(path, against="tract").first_divergent is None
    else:
        with pytest.raises(EngineError, match="has bfloat16 weights, a type that tract does not read"):
            intaglio.parity(path, against="tract")


@over("float16", "bfloat16", names=["llama-tied"])
def test_the_report_says_what_runs(case: Case) -> None:
    report = read_report(case.engine.bundle_path, "cpu").stages["score"]
    said = {"float16": "float16 (products in float32)", "bfloat16": "float32 (widened from bfloat16)"}
    assert report.dtype == said[case.dtype]
    parameters = dict(case.oracle.named_parameters())
    assert report.weight_bytes == 2 * sum(p.numel() for p in parameters.values())
    assert report.bits_per_weight == 16
    # Copied whole are the matrices, the tied head's too; norms are where the whole graph is widened.
    copied = [p for n, p in parameters.items() if case.dtype == "bfloat16" or "norm" not in n]
    assert report.widened_bytes == 4 * sum(p.numel() for p in copied)
    # Weights are cast at load: a run transposes heads only, and these where attention is onnxruntime's own; it casts
    # at most the inputs and outputs of an op.
    layers = case.oracle.config.num_hidden_layers
    assert report.operators.get("Transpose", 0) == (4 * layers if case.dtype == "float16" else 0)
    assert (report.operators["Cast"] < 8) == (case.dtype == "bfloat16")


@over("float16", names=["llama-gqa"])
def test_graph_text_is_the_golden_one(case: Case, request: pytest.FixtureRequest) -> None:
    file = GOLDENS / "llama-gqa.generate.float16.txt"
    text = graph_text(case.graph("generate"))
    if request.config.getoption("--write-goldens"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "written",
    [
        TinyGGUF(GGUF_MODELS["llama-biases"], gguf.GGMLQuantizationType.Q4_0, {"type": "none"}),
        TinyGGUF(GGUF_MODELS["qwen3"], gguf.GGMLQuantizationType.Q4_1),
    ],
    ids=lambda written: written.name,
)
def test_quantized_weights_stay_as_they_are(tmp_path: Path, written: TinyGGUF, dtype: str) -> None:
    oracle = written.build(tmp_path / "checkpoint")
    source = tmp_path / "checkpoint" / "model.gguf"
    intaglio.export(source, tmp_path / "float32", stages=["score"])
    intaglio.export(source, tmp_path / "bundle", stages=["score"], dtype=dtype, taps=True)
    intaglio.compile(tmp_path / "bundle")
    case = Case(dtype, oracle, open_engine(tmp_path / "bundle"))
    ids = random_ids(2, 17)
    found = case.engine.load("score").run(feeds(ids))
    expected = oracle_values(oracle, ids, [name for name in found if name != "logits"])
    check(case, found, expected)
    assert compare("logits", found["logits"], expected["logits"]).relative_l2 > 1e-4 or dtype == "bfloat16"
    graph, wide = case.graph().graph, ir.load(tmp_path / "float32" / "score.onnx").graph
    quantized = [n for n in graph.initializers if n.endswith((".codes", ".scales", ".offsets"))]
    assert len(quantized) > 40
    for name in quantized:
        np.testing.assert_array_equal(graph.initializers[name].const_value, wide.initializers[name].const_value)
    # Float32 are the rows of the embedding until they are rounded, the head's input and product, and the angles.
    floats = [n for n in graph if n.outputs[0].dtype == ir.DataType.FLOAT]
    islands = [n.op_type for n in floats if ".rotary_emb." not in str(n.outputs[0].name)]
    assert islands == ["GroupedQuantDequantize", "Cast", "GroupedQuantMatMul"]
    assert intaglio.parity(tmp_path / "bundle", against="onnxruntime").first_divergent is None


def test_dtype_names_are_numpys() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.numpy() == np.dtype(getattr(ml_dtypes, name, name))
        assert dtype.numpy().name == name
