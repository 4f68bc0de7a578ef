"""Text through Core ML's sessions, whose caches are states, on a machine that pretends to be a Mac."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from coreml_mac import PretendedMac, pretend_mac

import intaglio
from intaglio.engines.coreml.models import EvaluatedModel
from intaglio.engines.coreml.session import CoreMLSession
from intaglio.engines.engine import open_engine
from intaglio.errors import EngineError, InputError

# The cache is float16.
BOUND = 5e-3
CONTEXT = 160
PROMPTS = ("The capital of France is", "x", "a" * 70, "To be or not to be, that is")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with taps, compiled for both targets."""
    folder = tmp_path_factory.mktemp("decoder")
    checkpoint = tiny_checkpoint.write(folder / "checkpoint", config={"max_position_embeddings": CONTEXT})
    intaglio.export(checkpoint, folder / "bundle", taps=True)
    intaglio.compile(folder / "bundle")
    intaglio.compile(folder / "bundle", "coreml", shapes="batch=1")
    return folder / "bundle"


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> PretendedMac:
    return pretend_mac(monkeypatch)


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_the_cpu(bundle: Path, mac: PretendedMac, prompt: str) -> None:
    found = intaglio.load(bundle, "coreml", compute_units="cpu+ne")(prompt, max_new_tokens=8)
    assert found == intaglio.load(bundle)(prompt, max_new_tokens=8)
    assert {units for _, _, units in mac.loaded} == {"CPU_AND_NE"}
    assert ("generate", "decode", "CPU_AND_NE") in mac.loaded


def test_it_is_measured(bundle: Path, mac: PretendedMac) -> None:
    (row,) = intaglio.bench(bundle, "coreml", prompt_tokens=3, new_tokens=2, repeats=1)["rows"]
    assert (row["target"], row["prompt_tokens"], row["new_tokens"]) == ("coreml", 3, 2)
    assert row["decode_tokens_per_second"] > 0


def test_streams_and_scores(bundle: Path, mac: PretendedMac) -> None:
    ours, theirs = intaglio.load(bundle, "coreml"), intaglio.load(bundle)
    assert list(ours.stream(PROMPTS[0], max_new_tokens=5)) == list(theirs.stream(PROMPTS[0], max_new_tokens=5))
    found, expected = ours.score(PROMPTS[3]), theirs.score(PROMPTS[3])
    assert found.token_ids == expected.token_ids
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def test_logits_of_every_token_and_the_cache_itself(bundle: Path, mac: PretendedMac) -> None:
    """The whole interface of the stage, as parity compares it: chunks, padding and single tokens behind a past."""
    engine = open_engine(bundle, "coreml")
    session, reference = engine.load("generate"), open_engine(bundle).load("generate")
    for past, tokens in ((0, 5), (0, 1), (3, 70), (90, 64), (97, 63), (CONTEXT - 1, 1), (0, CONTEXT)):
        sizes = {"batch": 1, "sequence": tokens, "past_sequence": past, "total_sequence": past + tokens}
        feeds = stage_feeds(session, sizes)
        found, expected = session.run(feeds), reference.run(feeds)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].shape == value.shape, (name, sizes)
            assert found[name].dtype == value.dtype
            assert relative_l2(found[name], value) <= BOUND, (name, sizes)


def stage_feeds(session: CoreMLSession, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(sizes.values()))
    past, tokens = sizes["past_sequence"], sizes["sequence"]
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, 250, (1, tokens)),
        "attention_mask": np.ones((1, past + tokens), np.int64),
        "position_ids": np.arange(past, past + tokens)[None],
    }
    for tensor in session.stage.inputs:
        if tensor.name not in feeds:
            assert tensor.shape is not None
            shape = [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
            feeds[tensor.name] = rng.standard_normal(shape).astype(tensor.dtype)
    return feeds


def test_a_run_that_fails_leaves_the_cache(bundle: Path, mac: PretendedMac, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_engine(bundle, "coreml").load("generate")
    cache = session.new_cache(1)
    feeds = {
        "input_ids": np.arange(70, 77)[None],
        "attention_mask": np.ones((1, 7), np.int64),
        "position_ids": np.arange(7)[None],
    }
    first = session.run_with_cache(feeds, ["logits"], cache)["logits"]
    assert (first.shape[:2], cache.length) == ((1, 1), 7)
    more = {**feeds, "attention_mask": np.ones((1, 14), np.int64), "position_ids": np.arange(7, 14)[None]}
    expected = session.run_with_cache(more, ["logits"], cache)["logits"]
    cache.length = 7
    predict, calls = EvaluatedModel.predict, []

    def fail_at_last(self: EvaluatedModel, data: Any, state: Any = None) -> Any:
        calls.append(self)
        made = predict(self, data, state)
        if len(calls) == 2:
            raise RuntimeError("the GPU is gone")
        return made

    monkeypatch.setattr(EvaluatedModel, "predict", fail_at_last)
    with pytest.raises(EngineError, match="generate: the run failed: the GPU is gone"):
        session.run_with_cache(more, ["logits"], cache)
    assert cache.length == 7
    found = session.run_with_cache(more, ["logits"], cache)["logits"]
    np.testing.assert_array_equal(found, expected)
    assert cache.length == 14


def test_what_does_not_fit(bundle: Path, mac: PretendedMac) -> None:
    pipe = intaglio.load(bundle, "coreml")
    with pytest.raises(InputError, match="2 texts at once are asked for, and its cache was compiled for 1"):
        pipe.batch(["a", "b"])
    with pytest.raises(InputError, match=f"{CONTEXT} tokens, no room is left in a context of {CONTEXT}"):
        pipe("a" * CONTEXT)
    session = open_engine(bundle, "coreml").load("generate")
    cache = session.new_cache(1)
    feeds = {
        "input_ids": np.ones((1, 2), np.int64),
        "attention_mask": np.ones((1, 3), np.int64),
        "position_ids": np.arange(2)[None],
    }
    with pytest.raises(InputError, match="total_sequence is 3, expected"):
        session.run_with_cache(feeds, ["logits"], cache)
    with pytest.raises(InputError, match="inputs are missing"):
        session.run_with_cache({"input_ids": feeds["input_ids"]}, ["logits"], cache)
