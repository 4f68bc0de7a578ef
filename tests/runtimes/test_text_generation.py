"""The pipeline around the numbers: options, prompts, limits, vocabularies with holes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint

import intaglio
from intaglio.errors import CancelledError, InputError
from intaglio.runtimes.text_generation import TextGenerationPipeline


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
    intaglio.compile(folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def pipeline(bundle: Path) -> TextGenerationPipeline:
    return intaglio.load(bundle)


def test_stream_batch_and_call_write_the_same(pipeline: TextGenerationPipeline) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.3, "seed": 5}
    text = pipeline("hello", **options).text
    assert "".join(pipeline.stream("hello", **options)) == text
    assert pipeline.batch(["hello"], **options)[0].text == text
    assert pipeline.batch([]) == []


def test_a_conversation_goes_through_the_template(pipeline: TextGenerationPipeline) -> None:
    one = pipeline("hi", chat=True, max_new_tokens=4)
    assert one == pipeline([{"role": "user", "content": "hi"}], max_new_tokens=4)
    assert one == pipeline("[hi]", max_new_tokens=4)
    two = pipeline([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], max_new_tokens=4)
    assert two.prompt_tokens == len("[a][b]")


def test_progress_counts_and_cancels_streams_too(pipeline: TextGenerationPipeline) -> None:
    seen: list[int] = []
    list(pipeline.stream("hello", max_new_tokens=5, progress=lambda event: seen.append(event.done)))
    assert seen == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CancelledError, match="cancelled after 2 of 9 tokens"):
        list(pipeline.stream("hello", max_new_tokens=9, progress=lambda event: event.done < 2))
    with pytest.raises(CancelledError):
        pipeline("hello", max_new_tokens=9, progress=lambda event: event.done < 2)


def test_stream_checks_its_arguments_before_the_first_piece(pipeline: TextGenerationPipeline) -> None:
    with pytest.raises(InputError, match="temperature"):
        pipeline.stream("hello", temperature=-1)
    with pytest.raises(InputError, match="no room is left in a context of 64"):
        pipeline.stream("x" * 64)
    with pytest.raises(TypeError, match="temperatur"):
        pipeline.stream("hello", temperatur=1)  # type: ignore[call-arg]


def test_text_ends_where_the_context_does(pipeline: TextGenerationPipeline) -> None:
    output = pipeline("x" * 60, max_new_tokens=100, temperature=2.0, seed=0)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 4


def test_shapes_of_the_engine_bound_the_text(tmp_path: Path) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle", shapes="past_sequence=0:4:8,sequence=1:4:6")
    narrow = intaglio.load(tmp_path / "bundle")
    assert narrow.context_length == 9
    assert len(narrow("hello", max_new_tokens=50).token_ids) == 4
    with pytest.raises(InputError, match="7 tokens, but the engine was compiled for at most 6"):
        narrow("goodbye")


def test_ids_that_stand_for_nothing_are_never_chosen(tmp_path: Path) -> None:
    """A vocabulary that is padded at its end and has a hole: neither is ever drawn, and the end token still is."""
    table = np.random.default_rng(1).normal(scale=0.3, size=(270, 32)).astype(np.float32)
    weights = {**tiny_checkpoint.tensors(), "model.embed_tokens.weight": table}
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", config={"vocab_size": 270}, weights=weights)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = {**tokenizer["model"]["vocab"], "<s>": 256, "</s>": 257}
    hole = set(range(100, 150)) - {vocab["A"]}
    tokenizer["model"]["vocab"] = {token: i for token, i in vocab.items() if i not in hole}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    intaglio.export(folder, tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    text = intaglio.load(tmp_path / "bundle")
    known = {*text.tokenizer._tokenizer.get_vocab().values()}
    drawn: set[int] = set()
    for seed in range(40):
        drawn |= set(text("A", max_new_tokens=30, temperature=3.0, seed=seed).token_ids)
    assert drawn <= known
    assert 257 in drawn
    assert len(drawn) > 100


def test_an_end_token_is_no_text_even_where_it_is_not_special(bundle: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", config={"eos_token_id": list(range(256))})
    intaglio.export(folder, tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    text = intaglio.load(tmp_path / "bundle")
    output = text("hello")
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("", "stop", 1)
    assert "".join(text.stream("hello")) == ""


def test_score_needs_two_tokens(pipeline: TextGenerationPipeline) -> None:
    assert pipeline.score("ab").perplexity > 1
    with pytest.raises(InputError, match="at least two"):
        pipeline.score("a")
