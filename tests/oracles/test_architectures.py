"""Every architecture against transformers: taps, logits, cache and padding, on tiny models in float32.

Bounds: relative L2 <= 1e-5 for every tap and output. Measured: at most 1.6e-6.

Models written as GGUF files are compared with transformers running the weights that the file holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from gguf_models import TinyGGUF
from graph_text import graph_text
from tiny_models import GGUF_MODELS, TINY_MODELS, TinyModel

import intaglio
from intaglio.engines.engine import Engine, open_engine
from intaglio.errors import InputError
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.parity import compare

BOUND = 1e-5
GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@dataclass
class Case:
    tiny: TinyModel
    oracle: transformers.PreTrainedModel
    engine: Engine

    @property
    def vocab_size(self) -> int:
        return self.engine.bundle.language_model.config["vocab_size"]


# Made once each, whatever the order of the tests.
_CASES: dict[str, Case] = {}


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tiny: TinyModel = request.param
    if tiny.name not in _CASES:
        folder = tmp_path_factory.mktemp(tiny.name)
        oracle = tiny.build(folder / "checkpoint")
        layers = range(oracle.config.num_hidden_layers + 1)
        intaglio.export(folder / "checkpoint", folder / "bundle", taps=True, hidden_states=layers)
        intaglio.compile(folder / "bundle")
        _CASES[tiny.name] = Case(tiny, oracle, open_engine(folder / "bundle"))
    return _CASES[tiny.name]


def over(models: list[TinyModel]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", models, ids=lambda tiny: tiny.name, indirect=True)


all_models = over(TINY_MODELS)
own_graphs = over([tiny for tiny in TINY_MODELS if tiny.own_graph])


def random_ids(case: Case, *shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, case.vocab_size, shape)


def run_oracle(case: Case, ids: np.ndarray, names: list[str], **inputs: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The oracle's outputs, and those of the modules called ``names``."""
    seen: dict[str, np.ndarray] = {}
    modules = dict(case.oracle.named_modules())
    hooks = []
    for name in names:

        def hook(_module: Any, _inputs: Any, output: Any, name: str = name) -> None:
            value = output[0] if isinstance(output, tuple) else output
            seen[name] = value.numpy()

        hooks.append(modules[name].register_forward_hook(hook))
    try:
        with torch.no_grad():
            forget_lengths(case)
            return case.oracle(torch.from_numpy(ids), output_hidden_states=True, **inputs), seen
    finally:
        for handle in hooks:
            handle.remove()


def run_oracle_in_pieces(case: Case, pieces: list[np.ndarray]) -> list[np.ndarray]:
    """The oracle's last logits after each piece, over its own cache."""
    cache, logits = None, []
    with torch.no_grad():
        forget_lengths(case)
        for ids in pieces:
            outputs = case.oracle(torch.from_numpy(ids), use_cache=True, past_key_values=cache)
            cache = outputs.past_key_values
            logits.append(outputs.logits[:, -1].numpy())
    return logits


def forget_lengths(case: Case) -> None:
    """Dynamic rotary embeddings remember the longest sequence until they see one shorter than the model's."""
    if case.tiny.dynamic:
        case.oracle(torch.zeros((1, 1), dtype=torch.int64))


def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
    }


@all_models
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 13), (3, 40)])
def test_score_taps_and_logits(case: Case, batch: int, length: int) -> None:
    ids = random_ids(case, batch, length)
    found = case.engine.load("score").run(feeds(ids))
    taps = [name for name in found if name.startswith(("model.", "lm_head"))]
    # With the embeddings and the final norm.
    assert len(taps) == case.tiny.taps_per_layer * case.oracle.config.num_hidden_layers + 2
    expected, seen = run_oracle(case, ids, taps)
    for name in taps:
        assert compare(name, found[name], seen[name]).relative_l2 <= BOUND, name
    assert compare("logits", found["logits"], expected.logits.numpy()).relative_l2 <= BOUND
    for layer, hidden in enumerate(expected.hidden_states):
        name = f"hidden_states.{layer}"
        assert compare(name, found[name], hidden.numpy()).relative_l2 <= BOUND, name


@all_models
def test_prefill_then_decode_step_by_step(case: Case) -> None:
    ids = random_ids(case, 2, 20)
    pieces = [ids[:, :11], *np.split(ids[:, 11:], 9, axis=1)]
    cached = run_oracle_in_pieces(case, pieces)
    whole, _ = run_oracle(case, ids, [])
    decoding = Decoding(case.engine.load("generate"), ids[:, :11].tolist())
    for step, position in enumerate(range(10, 20)):
        logits = decoding.step()
        assert compare("logits", logits, cached[step]).relative_l2 <= BOUND, position
        if not case.tiny.dynamic:  # there each step has frequencies of its own
            assert compare("logits", logits, whole.logits[:, position].numpy()).relative_l2 <= BOUND, position
        if position < 19:
            decoding.put(ids[:, position + 1])


@all_models
def test_prefill_in_two_pieces_over_the_cache(case: Case) -> None:
    """Several new tokens with a past: the mask's alignment when query and key lengths differ."""
    ids = random_ids(case, 1, 17)
    session = case.engine.load("generate")
    empty = {
        t.name: np.zeros((1, t.shape[1], 0, t.shape[3]), np.float32)
        for t in session.stage.inputs
        if t.name.startswith("past")
    }
    first = session.run({**feeds(ids[:, :6]), **empty})
    past = {n.replace("present.", "past_key_values."): v for n, v in first.items() if n.startswith("present.")}
    second = session.run(
        {
            "input_ids": ids[:, 6:],
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(6, 17)[None],
            **past,
        }
    )
    expected = run_oracle_in_pieces(case, [ids[:, :6], ids[:, 6:]])[1]
    assert compare("logits", second["logits"][:, 0], expected).relative_l2 <= BOUND


@all_models
def test_left_padding_gives_each_row_what_it_gets_alone(case: Case) -> None:
    rows = [random_ids(case, 5, seed=1), random_ids(case, 14, seed=2)]
    mask = np.array([[0] * 9 + [1] * 5, [1] * 14])
    ids = np.stack([np.concatenate([np.full(9, 7), rows[0]]), rows[1]])
    padded = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
    }
    score = case.engine.load("score")
    together = score.run(padded)
    for name, value in together.items():
        assert np.isfinite(value).all(), f"{name}: a padding row is not finite"
    inputs = {name: torch.from_numpy(padded[name]) for name in ("attention_mask", "position_ids")}
    expected = run_oracle(case, ids, [], **inputs)[0].logits.numpy()
    assert compare("logits", together["logits"][mask == 1], expected[mask == 1]).relative_l2 <= BOUND
    if case.tiny.dynamic:
        return  # the longest row sets the frequencies of all
    for row, tokens in enumerate(rows):
        alone = score.run(feeds(tokens[None]), ["logits"])["logits"][0]
        found = together["logits"][row, -len(tokens) :]
        assert compare("logits", found, alone).relative_l2 <= BOUND
    generate = case.engine.load("generate")
    both = Decoding(generate, [row.tolist() for row in rows], pad_token_id=7)
    each = [Decoding(generate, [row.tolist()]) for row in rows]
    for _ in range(4):
        logits = both.step()
        alone = np.concatenate([decoding.step() for decoding in each])
        assert compare("logits", logits, alone).relative_l2 <= BOUND
        tokens = alone.argmax(axis=-1)
        both.put(tokens)
        for decoding, token in zip(each, tokens, strict=True):
            decoding.put(token[None])


@own_graphs
@pytest.mark.parametrize("against", ["onnxruntime", "tract"])
def test_other_runtimes_agree_with_the_engine(case: Case, against: str) -> None:
    report = intaglio.parity(case.engine.bundle_path, against=against, bound=BOUND)
    assert report.first_divergent is None, report.first_divergent
    assert len(report.differences) > 20


@own_graphs
def test_graphs_are_valid_onnx(case: Case) -> None:
    import onnx

    for stage in case.engine.bundle.stages.values():
        onnx.checker.check_model(str(case.engine.bundle_path / stage.file), full_check=True)


@own_graphs
@pytest.mark.parametrize("stage", ["generate", "score"])
def test_graph_text_is_the_golden_one(case: Case, stage: str, request: pytest.FixtureRequest) -> None:
    """After an intended change, read the diff, then rewrite the files with ``pytest --write-goldens``."""
    if stage == "score" and case.tiny is not TINY_MODELS[0]:
        pytest.skip("the two stages differ alike for all")
    check_golden(case.engine.bundle_path / f"{stage}.onnx", f"{case.tiny.name}.{stage}", request)


def check_golden(graph: Path, name: str, request: pytest.FixtureRequest) -> None:
    file = GOLDENS / f"{name}.txt"
    text = graph_text(ir.load(graph))
    if request.config.getoption("--write-goldens"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


@pytest.mark.parametrize(("name", "layers"), [("llama-gqa", (1,)), ("qwen2-windows", (0, 2)), ("qwen3", (3, 1))])
def test_encode_holds_only_the_layers_it_needs(tmp_path: Path, name: str, layers: tuple[int, ...]) -> None:
    tiny = next(tiny for tiny in TINY_MODELS if tiny.name == name)
    oracle = tiny.build(tmp_path / "checkpoint")
    intaglio.export(tmp_path / "checkpoint", tmp_path / "bundle", stages=["encode"], hidden_states=layers, taps=True)
    intaglio.compile(tmp_path / "bundle")
    engine = open_engine(tmp_path / "bundle")
    case = Case(tiny, oracle, engine)
    ids = random_ids(case, 2, 21)
    found = engine.load("encode").run(feeds(ids))
    expected, _ = run_oracle(case, ids, [])
    assert {f"hidden_states.{layer}" for layer in layers} == {n for n in found if n.startswith("hidden_states")}
    for layer in layers:
        difference = compare("hidden", found[f"hidden_states.{layer}"], expected.hidden_states[layer].numpy())
        assert difference.relative_l2 <= BOUND, layer
    depth, total = max(layers), oracle.config.num_hidden_layers
    stated = set(oracle.state_dict())
    unneeded = {n for n in stated if n.startswith(tuple(f"model.layers.{i}." for i in range(depth, total)))}
    unneeded |= {"lm_head.weight"} | ({"model.norm.weight"} if depth < total else set())
    assert set(engine.bundle.language_model.unused_tensors) == unneeded
    assert engine.bundle.weights.tensors == len(stated) - len(unneeded)


def test_encode_is_exported_only_when_it_is_asked_for(tmp_path: Path) -> None:
    TINY_MODELS[0].build(tmp_path / "checkpoint")
    bundle = intaglio.export(tmp_path / "checkpoint", tmp_path / "bundle", hidden_states=[1], dry_run=True)
    assert set(bundle.stages) == {"generate", "score"}
    assert bundle.language_model.unused_tensors == ()
    with pytest.raises(InputError, match="--hidden-states"):
        intaglio.export(tmp_path / "checkpoint", tmp_path / "bundle", stages=["encode"])


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
YARN_BETAS = {
    "type": "yarn",
    "factor": 6.0,
    "original_context_length": 24,
    "yarn_beta_fast": 3.0,
    "yarn_beta_slow": 0.4,
}
GGUFS = [
    TinyGGUF(GGUF_MODELS["llama-llama3"], gguf.GGMLQuantizationType.F32, rope_freqs=True),
    TinyGGUF(GGUF_MODELS["llama-linear"], gguf.GGMLQuantizationType.Q8_0, {"type": "linear", "factor": 3.0}),
    TinyGGUF(GGUF_MODELS["llama-yarn"], gguf.GGMLQuantizationType.Q4_1, YARN),
    TinyGGUF(GGUF_MODELS["llama-biases"], gguf.GGMLQuantizationType.Q4_0, {"type": "none"}),
    TinyGGUF(GGUF_MODELS["qwen2-yarn"], gguf.GGMLQuantizationType.Q8_0, YARN_BETAS),
    TinyGGUF(GGUF_MODELS["qwen3"], gguf.GGMLQuantizationType.Q4_1),
    *(
        TinyGGUF(GGUF_MODELS["llama-wide"], gguf.GGMLQuantizationType[storage])
        for storage in ("Q4_K", "Q5_1", "Q6_K", "TQ1_0", "TQ2_0")
    ),
]


@pytest.mark.parametrize("written", GGUFS, ids=lambda written: written.name)
def test_gguf_equals_the_dequantized_model(tmp_path: Path, written: TinyGGUF, request: pytest.FixtureRequest) -> None:
    oracle = written.build(tmp_path / "checkpoint")
    intaglio.export(tmp_path / "checkpoint" / "model.gguf", tmp_path / "bundle", stages=["generate"])
    intaglio.compile(tmp_path / "bundle")
    engine = open_engine(tmp_path / "bundle")
    assert engine.bundle.language_model.unused_tensors == ()
    matrices = [info for info in engine.bundle.language_model.quantization if info.storage == written.storage.name]
    group_size = {"F32": None, "Q6_K": 16, "TQ1_0": 256, "TQ2_0": 256}.get(written.storage.name, 32)
    assert [info.group_size for info in matrices] == [group_size]
    if written.name == "llama-biases-Q4_0":
        check_golden(tmp_path / "bundle" / "generate.onnx", f"{written.name}.generate", request)
    case = Case(written.tiny, oracle, engine)
    ids = random_ids(case, 2, 40)
    expected, _ = run_oracle(case, ids, [])
    decoding = Decoding(engine.load("generate"), ids[:, :30].tolist())
    for position in range(29, 39):
        found = decoding.step()
        assert compare("logits", found, expected.logits[:, position].numpy()).relative_l2 <= BOUND, position
        decoding.put(ids[:, position + 1])
