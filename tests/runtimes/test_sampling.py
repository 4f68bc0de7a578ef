"""Sampling, against transformers' logits warpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

import intaglio
from intaglio.errors import EngineError, InputError
from intaglio.runtimes.sampling import Sampler, SamplingParams

BATCH, VOCAB = 4, 500


def draw_logits(seed: int, ties: bool = False) -> np.ndarray:
    logits_BV = np.random.default_rng(seed).normal(scale=4, size=(BATCH, VOCAB)).astype(np.float32)
    return np.round(logits_BV) if ties else logits_BV


def warped(logits_BV: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The distribution transformers' `generate` draws from, in float64: its list of warpers in its order."""
    import torch
    import transformers.generation.logits_process as process

    scores = torch.from_numpy(logits_BV.astype(np.float64))
    warpers: list[Any] = [process.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        warpers.append(process.TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(process.TopPLogitsWarper(top_p))
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, dim=-1).numpy()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_p", [None, 1e-20, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 40, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_distribution_against_transformers(
    temperature: float, top_k: int | None, top_p: float | None, ties: bool
) -> None:
    sampler = Sampler(SamplingParams(temperature, top_k, top_p))
    for seed in range(3):
        logits_BV = draw_logits(seed, ties)
        expected_BV = warped(logits_BV, temperature, top_k, top_p)
        found_BV = sampler.probabilities(logits_BV)
        if ties:
            # Which of several equal scores top-p keeps is left open by torch's sort; how many it keeps is
            # not.
            found_BV, expected_BV = np.sort(found_BV), np.sort(expected_BV)
        np.testing.assert_array_equal(found_BV > 0, expected_BV > 0)
        np.testing.assert_allclose(found_BV, expected_BV, rtol=1e-12, atol=0)


def test_equal_scores() -> None:
    # top-k keeps all that equal the last one; top-p keeps the lowest ids, so its narrowest form is greedy.
    logits_BV = np.array([[1, 3, 2, 3, 2, 2]], np.float32)
    assert (Sampler(SamplingParams(1.0, top_k=3)).probabilities(logits_BV) > 0).tolist() == [[False] + [True] * 5]
    kept_BV = Sampler(SamplingParams(1.0, top_p=1e-9)).probabilities(logits_BV) > 0
    assert np.flatnonzero(kept_BV).tolist() == [1]
    kept_BV = Sampler(SamplingParams(1.0, top_p=0.7)).probabilities(logits_BV) > 0
    assert np.flatnonzero(kept_BV).tolist() == [1, 2, 3]


def test_order_of_the_filters() -> None:
    # The kept set depends on the order: temperature changes what top-p keeps, and top-p counts what top-k
    # left.
    logits_BV = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=2, top_p=0.55))
    assert (sampler.probabilities(logits_BV) > 0).tolist() == [[True, False, False, False]]
    assert (Sampler(SamplingParams(1.0, None, 0.55)).probabilities(logits_BV) > 0).sum() == 2
    assert (Sampler(SamplingParams(0.1, None, 0.55)).probabilities(logits_BV) > 0).sum() == 1


def test_greedy() -> None:
    logits_BV = draw_logits(0, ties=True)
    tokens_B = Sampler(SamplingParams()).sample(logits_BV)
    assert tokens_B.dtype == np.int64
    np.testing.assert_array_equal(tokens_B, logits_BV.argmax(axis=-1))
    # top-k and top-p cannot change the most probable token
    np.testing.assert_array_equal(Sampler(SamplingParams(0, 3, 0.5, 1)).sample(logits_BV), tokens_B)
    with pytest.raises(InputError, match="temperature is 0"):
        Sampler(SamplingParams()).probabilities(logits_BV)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits_BV = draw_logits(1) * np.float32(1e30)
    sampler = Sampler(SamplingParams(temperature, 40, 0.9, 0))
    np.testing.assert_array_equal(sampler.sample(logits_BV), logits_BV.argmax(axis=-1))


def test_huge_temperature_is_uniform() -> None:
    np.testing.assert_allclose(Sampler(SamplingParams(1e300)).probabilities(draw_logits(1)), 1 / VOCAB)


def test_frequencies_follow_the_distribution() -> None:
    logits_BV = draw_logits(2)[:1, :50]
    sampler = Sampler(SamplingParams(temperature=2.0, top_k=20, top_p=0.95, seed=5))
    probabilities_V = sampler.probabilities(logits_BV)[0]
    draws = 40_000
    tokens_B = sampler.sample(np.repeat(logits_BV, draws, axis=0))
    counts_V = np.bincount(tokens_B, minlength=50)
    assert not counts_V[probabilities_V == 0].any()
    deviation_V = np.sqrt(draws * probabilities_V * (1 - probabilities_V))
    assert (np.abs(counts_V - draws * probabilities_V) <= 4.5 * deviation_V).all()


def test_inverse_of_the_cumulative_distribution() -> None:
    logits_BV = draw_logits(3)
    params = SamplingParams(temperature=1.5, top_k=100, seed=123)
    cumulative_BV = np.cumsum(Sampler(params).probabilities(logits_BV), axis=-1)
    uniforms = np.random.Generator(np.random.Philox(123))
    sampler = Sampler(params)
    for _ in range(5):
        expected_B = (cumulative_BV <= uniforms.random(BATCH)[:, None] * cumulative_BV[:, -1:]).sum(axis=-1)
        np.testing.assert_array_equal(sampler.sample(logits_BV), expected_B)


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (np.nextafter(1.0, 0.0), 3)])
def test_ends_of_the_distribution(uniform: float, expected: int) -> None:
    """Tokens of probability 0 are never drawn, at neither end."""

    class Fixed:
        def random(self, count: int) -> np.ndarray:
            return np.full(count, uniform)

    sampler = Sampler(SamplingParams(temperature=1.0, top_k=2))
    sampler._generator = Fixed()  # type: ignore[assignment]
    assert sampler.sample(np.array([[-5, 1, -5, 1, -5]], np.float32)).tolist() == [expected]


def test_seeds() -> None:
    logits_BV = draw_logits(4)

    def run(seed: int | None) -> list[list[int]]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed))
        return [sampler.sample(logits_BV).tolist() for _ in range(4)]

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(None) != run(None)
    assert len({tuple(step) for step in run(0)}) > 1
    # Pinned, so that a release that changes what a seed means is noticed.
    assert run(2026) == [[83, 6, 336, 214], [282, 403, 257, 146], [366, 158, 138, 30], [266, 345, 417, 383]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(value: float, temperature: float) -> None:
    logits_BV = draw_logits(5)
    logits_BV[2, [3, 9, 11]] = value
    logits_BV[3, 0] = value
    with pytest.raises(EngineError, match=r"row 2 .* 3 of 500 values"):
        Sampler(SamplingParams(temperature)).sample(logits_BV)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(5, np.float32),
        np.zeros((1, 2, 5), np.float32),
        np.zeros((1, 0), np.float32),
        np.zeros((1, 5)),
    ],
)
def test_logits_of_another_form(logits: np.ndarray) -> None:
    with pytest.raises(EngineError, match=r"expected float32 \[batch, vocab\]"):
        Sampler(SamplingParams()).sample(logits)


def test_empty_batch() -> None:
    for temperature in (0.0, 1.0):
        assert Sampler(SamplingParams(temperature)).sample(np.zeros((0, 5), np.float32)).shape == (0,)


def test_logits_are_left_alone() -> None:
    logits_BV = draw_logits(6)
    before_BV = logits_BV.copy()
    Sampler(SamplingParams(0.7, 10, 0.9)).sample(logits_BV)
    np.testing.assert_array_equal(logits_BV, before_BV)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_k", value) for value in (0, -1, 1.0, True, "5")),
        *(("top_p", value) for value in (0, 0.0, -0.5, 1.01, float("nan"), True, "0.5")),
        *(("seed", value) for value in (-1, 1.0, True, "7")),
    ],
)
def test_parameters_that_mean_nothing(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{field} is "):
        SamplingParams(**{field: value})


def test_parameters_of_numpy() -> None:
    params = SamplingParams(np.float32(0.5), np.int64(3), np.float64(0.9), np.uint64(7))  # type: ignore[arg-type]
    plain = Sampler(SamplingParams(0.5, 3, 0.9, 7)).sample(draw_logits(7))
    np.testing.assert_array_equal(Sampler(params).sample(draw_logits(7)), plain)


def draw_tokens(seed: int) -> list[list[int]]:
    """Tokens so far of each row: of different lengths, with repetitions, one row with none."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() * 2 for length in (0, 1, 30, 200)][:BATCH]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 1.3, 10.0])
def test_repetition_penalty_against_transformers(penalty: float) -> None:
    """To the last bit in float32, through the distribution and through the greedy choice."""
    import torch
    import transformers.generation.logits_process as process

    for seed in range(3):
        logits_BV, tokens = draw_logits(seed), draw_tokens(seed)
        processor = process.RepetitionPenaltyLogitsProcessor(penalty)
        expected_BV = np.concatenate(
            [
                processor(torch.tensor([row], dtype=torch.int64), torch.from_numpy(logits_V[None])).numpy()
                for row, logits_V in zip(tokens, logits_BV, strict=True)
            ]
        )
        greedy = Sampler(SamplingParams(repetition_penalty=penalty))
        np.testing.assert_array_equal(greedy._penalized(logits_BV, tokens), expected_BV)
        np.testing.assert_array_equal(greedy.sample(logits_BV, tokens), expected_BV.argmax(axis=-1))
        drawn = Sampler(SamplingParams(0.7, 40, 0.9, repetition_penalty=penalty))
        expected_BV = warped(expected_BV, 0.7, 40, 0.9)
        np.testing.assert_allclose(drawn.probabilities(logits_BV, tokens), expected_BV, rtol=1e-12, atol=0)


def test_repetition_penalty_leaves_padding_out_as_transformers_does() -> None:
    """The tokens of the padded row of a batch, given to transformers as its ``generate`` gives them."""
    import torch
    import transformers.generation.logits_process as process

    logits_BV = draw_logits(8)[:2]
    pad, rows = 7, [[3, 4], [5, 6, 8, 9]]
    padded = torch.tensor([[pad] * (4 - len(row)) + row for row in rows])
    ignored = torch.tensor([4 - len(row) for row in rows])
    processor = process.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignored)
    expected_BV = processor(padded, torch.from_numpy(logits_BV)).numpy()
    found_BV = Sampler(SamplingParams(repetition_penalty=1.7))._penalized(logits_BV, rows)
    np.testing.assert_array_equal(found_BV, expected_BV)
    assert (found_BV[:, pad] == logits_BV[:, pad]).all()


def test_repetition_penalty_at_the_edges() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits_BV = np.array([[2.0, 1.5, -1.0]], np.float32)
    # Ids past the logits stand for nothing that can be drawn; a token counts once however often it was seen.
    assert sampler._penalized(logits_BV, [[0, 0, 0, 2, 3, 99]]).tolist() == [[1.0, 1.5, -2.0]]
    assert sampler.sample(logits_BV, [[0]]).tolist() == [1]
    for tokens in (None, [], [[1], [2]]):
        with pytest.raises(InputError, match="needs the tokens so far"):
            sampler.sample(logits_BV, tokens)
    largest = np.finfo(np.float32).max
    huge = Sampler(SamplingParams(1.0, repetition_penalty=1e-3))
    assert np.isfinite(huge.probabilities(np.array([[largest, 0.0]], np.float32), [[0]])).all()
    before_BV = logits_BV.copy()
    sampler.sample(logits_BV, [[0, 1]])
    np.testing.assert_array_equal(logits_BV, before_BV)


@pytest.mark.parametrize("min_p", [0.0, 1e-6, 0.02, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (40, None), (None, 0.8), (40, 0.8)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_min_p_against_transformers(temperature: float, top_k: int | None, top_p: float | None, min_p: float) -> None:
    import torch
    import transformers.generation.logits_process as process

    sampler = Sampler(SamplingParams(temperature, top_k, top_p, min_p=min_p))
    for seed in range(2):
        logits_BV = draw_logits(seed)
        with np.errstate(divide="ignore"):
            scores_BV = np.log(warped(logits_BV, temperature, top_k, top_p))
        scores = process.MinPLogitsWarper(min_p)(None, torch.from_numpy(scores_BV))
        expected_BV = torch.softmax(scores, dim=-1).numpy()
        found_BV = sampler.probabilities(logits_BV)
        np.testing.assert_array_equal(found_BV > 0, expected_BV > 0)
        np.testing.assert_allclose(found_BV, expected_BV, rtol=1e-12, atol=0)


def test_the_order_of_all_filters_is_that_of_generate() -> None:
    """The list that transformers itself builds from a generation configuration."""
    import torch
    import transformers

    settings = {"temperature": 1.4, "top_k": 60, "top_p": 0.7, "min_p": 0.15, "repetition_penalty": 1.8}
    config = transformers.GenerationConfig(do_sample=True, **settings)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    processors = model._get_logits_processor(config, input_ids_seq_length=4)
    logits_BV, tokens = draw_logits(11), [np.argsort(-row)[:4].tolist() for row in draw_logits(11)]
    expected_BV = torch.softmax(processors(torch.tensor(tokens), torch.from_numpy(logits_BV)), dim=-1).numpy()
    found_BV = Sampler(SamplingParams(**settings)).probabilities(logits_BV, tokens)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found_BV > 0, expected_BV > 0)
    np.testing.assert_allclose(found_BV, expected_BV, rtol=1e-5)  # transformers' are float32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("min_p", value) for value in (-0.1, 1.01, float("nan"), True, "0.5")),
        *(("repetition_penalty", value) for value in (0, -1.0, float("nan"), float("inf"), True, "1")),
    ],
)
def test_penalties_that_mean_nothing(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{field} is "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("penalty", [None, 1.15, 1.5, 0.7])
def test_greedy_text_with_a_repetition_penalty(penalty: float | None, tmp_path: Path) -> None:
    """20 tokens each for two prompts of different lengths, alone and as a padded batch, against ``generate``."""
    import torch
    import transformers

    prompts = ["abcabcabc", "the quick brown fox jumps over the lazy dog"]
    # As many rows as the tokenizer has tokens, and no end.
    weights = tiny_checkpoint.tensors()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:258]
    config = {"eos_token_id": None, "vocab_size": 258}
    checkpoint = tiny_checkpoint.write(tmp_path / "checkpoint", config=config, weights=weights)
    intaglio.export(checkpoint, tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    pipeline = intaglio.load(tmp_path / "bundle")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = [pipeline.tokenizer.encode(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    pad = 5  # a token that the model would write, so that a penalty on padding shows
    padded = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    written = model.generate(
        padded, attention_mask=mask, max_new_tokens=20, do_sample=False, repetition_penalty=penalty, pad_token_id=pad
    )  # fmt: skip
    expected = [tuple(row[longest:].tolist()) for row in written]
    together = pipeline.batch(prompts, max_new_tokens=20, repetition_penalty=penalty)
    alone = [pipeline(prompt, max_new_tokens=20, repetition_penalty=penalty) for prompt in prompts]
    assert [output.token_ids for output in together] == expected
    assert [output.token_ids for output in alone] == expected
    if penalty is not None and penalty > 1:
        plain = [pipeline(prompt, max_new_tokens=20).token_ids for prompt in prompts]
        assert expected != plain
