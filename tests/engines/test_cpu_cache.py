"""The key-value cache that a session of the target ``cpu`` appends to in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

import intaglio
from intaglio.engines import cpu_cache
from intaglio.engines.engine import open_engine
from intaglio.errors import EngineError, InputError
from intaglio.runtimes.decoding import Decoding


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTAGLIO_CACHE", str(folder / "cache"))
        intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
        intaglio.compile(folder / "bundle")
    return open_engine(folder / "bundle", "cpu").load("generate")


def feeds(rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Prompts padded on the left, for :meth:`run_with_cache`."""
    longest = max(map(len, rows))
    mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    ids = np.array([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)}


def whole_run(session: Any, rows: list[list[int]]) -> np.ndarray:
    """The logits after ``rows`` with an ordinary, empty past."""
    pasts = {
        t.name: np.zeros((len(rows), t.shape[1], 0, t.shape[3]), np.float32)
        for t in session.stage.inputs
        if t.name.startswith("past_key_values.")
    }
    logits: np.ndarray = session.run({**feeds(rows), **pasts}, ["logits"])["logits"][:, -1]
    return logits


@pytest.mark.parametrize("prompts", [[[5]], [[5, 6, 7]], [[3, 1, 4, 1, 5, 9], [2, 7]]], ids=["one", "three", "batch"])
def test_a_growing_cache_gives_what_a_whole_run_gives(
    session: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last token of the context, over several buffers."""
    monkeypatch.setattr(cpu_cache, "_LEAST_CAPACITY", 4)
    rows = [list(prompt) for prompt in prompts]
    decoding = Decoding(session, prompts)
    rng = np.random.default_rng(0)
    capacities, earlier = set(), []
    while decoding.length <= 64:
        found = decoding.step()
        earlier.append((found, found.copy()))
        np.testing.assert_allclose(found, whole_run(session, rows), rtol=1e-4, atol=1e-5)
        assert decoding._cache is not None
        assert decoding._cache.length == decoding.length
        capacities.add(decoding._cache.capacity)
        tokens = rng.integers(0, 256, len(rows))
        for row, token in zip(rows, tokens, strict=True):
            row.append(int(token))
        decoding.put(tokens)
    assert len(capacities) >= 3
    assert max(capacities) == 64
    # What was given out is the caller's: no later step writes into it.
    for found, copy in earlier:
        np.testing.assert_array_equal(found, copy)


def test_generations_take_turns(session: Any) -> None:
    prompts = [[[1, 2, 3]], [[9, 8]]]
    together = [Decoding(session, prompt) for prompt in prompts]
    steps = [[], []]
    for _ in range(5):
        for decoding, found in zip(together, steps, strict=True):
            found.append(decoding.step())
            decoding.put(found[-1].argmax(axis=-1))
    for prompt, found in zip(prompts, steps, strict=True):
        alone = Decoding(session, prompt)
        for logits in found:
            np.testing.assert_array_equal(alone.step(), logits)
            alone.put(logits.argmax(axis=-1))


def test_the_cache_holds_what_the_graph_gives(session: Any) -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache = session.new_cache(2)
    session.run_with_cache(feeds(rows), ["logits"], cache)
    assert (cache.length, cache.capacity) == (4, 64)
    pasts = {t.name: np.zeros((2, t.shape[1], 0, t.shape[3]), np.float32) for t in session.stage.inputs[3:]}
    presents = session.run({**feeds(rows), **pasts})
    assert len(pasts) == 4
    assert cache.nbytes == sum(64 // 4 * presents[name.replace("past_key_values", "present")].nbytes for name in pasts)
    for name in pasts:
        np.testing.assert_array_equal(cache.past(name), presents[name.replace("past_key_values", "present")])


def test_a_refused_run_leaves_the_cache_as_it_was(session: Any) -> None:
    cache = session.new_cache(1)
    session.run_with_cache(feeds([[1, 2, 3]]), ["logits"], cache)
    step = {
        "input_ids": np.array([[4]]),
        "attention_mask": np.ones((1, 4), np.int64),
        "position_ids": np.array([[3]]),
    }
    with pytest.raises(InputError, match="total_sequence is 7, expected past_sequence"):
        session.run_with_cache({**step, "attention_mask": np.ones((1, 7), np.int64)}, ["logits"], cache)
    with pytest.raises(InputError, match="input_ids is float32, expected int64"):
        session.run_with_cache({**step, "input_ids": np.ones((1, 1), np.float32)}, ["logits"], cache)
    too_long = {**feeds([[1] * 62]), "attention_mask": np.ones((1, 65), np.int64)}
    with pytest.raises(InputError, match="65"):
        session.run_with_cache(too_long, ["logits"], cache)
    with pytest.raises(InputError, match="batch"):
        session.run_with_cache({name: np.repeat(feed, 2, axis=0) for name, feed in step.items()}, ["logits"], cache)
    with pytest.raises(InputError, match="has no output 'logit'; there are logits"):
        session.run_with_cache(step, ["logit"], cache)
    assert cache.length == 3
    found = session.run_with_cache(step, ["logits"], cache)["logits"][:, -1]
    np.testing.assert_allclose(found, whole_run(session, [[1, 2, 3, 4]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_growth_that_fails_half_way_loses_nothing(session: Any, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cache, "_LEAST_CAPACITY", 4)
    cache = session.new_cache(1)
    session.run_with_cache(feeds([[1, 2, 3]]), ["logits"], cache)
    more = {
        "input_ids": np.array([[4] * 20]),
        "attention_mask": np.ones((1, 23), np.int64),
        "position_ids": np.arange(3, 23)[None],
    }
    whole, calls = np.empty, []

    def fail(*arguments: Any, **options: Any) -> np.ndarray:
        calls.append(arguments)
        if len(calls) > fails_at:
            raise MemoryError("Unable to allocate")
        return whole(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cpu_cache.np, "empty", fail)
        with pytest.raises(EngineError, match="not enough memory"):
            session.run_with_cache(more, ["logits"], cache)
    assert cache.length == 3
    found = session.run_with_cache(more, ["logits"], cache)["logits"][:, -1]
    np.testing.assert_allclose(found, whole_run(session, [[1, 2, 3] + [4] * 20]), rtol=1e-4, atol=1e-5)


def test_a_stage_without_a_cache_has_none(session: Any, tmp_path: Path) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "half", dtype="float16")
    intaglio.compile(tmp_path / "half")
    engine = open_engine(tmp_path / "half", "cpu")
    assert engine.load("score").new_cache(1) is None
    # In float16 attention is onnxruntime's own, and joins past and present itself.
    assert engine.load("generate").new_cache(1) is None
    assert np.isfinite(Decoding(engine.load("generate"), [[1, 2]]).step()).all()
