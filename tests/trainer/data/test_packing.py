"""Packing against plain loops, and against tokenizing beforehand into a flat token file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import training_data as data
from hypothesis import given
from hypothesis import strategies as st

from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.packing import Document, Packer

Tokens = list[tuple[int, bool]]


@given(
    documents=st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=12), max_size=12),
    length=st.integers(1, 9),
    takes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    dropped=st.integers(0, 5),
    segments=st.booleans(),
)
def test_packs_as_plain_loops_do(
    documents: list[Tokens], length: int, takes: list[int], dropped: int, segments: bool
) -> None:
    flat = [(token, learned, number) for number, tokens in enumerate(documents) for token, learned in tokens]
    packer = Packer(length, segments)
    for tokens in documents:
        ids, learned = zip(*tokens, strict=True) if tokens else ((), ())
        packer.put(Document(np.array(ids, np.int32), np.array(learned, bool)))
    dropped = min(dropped, len(flat))
    packer.drop(dropped)
    place = dropped
    for count in takes:
        assert packer.tokens == len(flat) - place
        assert packer.windows == max(0, (len(flat) - place - 1) // length)
        if packer.windows < count:
            return
        arrays = packer.take(count)
        for row in range(count):
            window = flat[place : place + length + 1]
            place += length
            _assert_window({name: array[row].tolist() for name, array in arrays.items()}, window, segments)


def _assert_window(found: dict[str, list[int]], window: list[tuple[int, bool, int]], segments: bool) -> None:
    expected: dict[str, list[int]] = {"input_ids": [], "labels": []}
    if segments:
        expected["position_ids"] = []
    position = 0
    for i, (token, _, document) in enumerate(window[:-1]):
        following, learned, its_document = window[i + 1]
        if segments and its_document != document:
            learned = False
        expected["input_ids"].append(token)
        expected["labels"].append(following if learned else -100)
        if i == 0 or window[i - 1][2] != document:
            position = 0
        if segments:
            expected["position_ids"].append(position)
        position += 1
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_are_those_of_tokenizing_beforehand(
    workers: int, build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The reference is the `tokenizers` library alone, its ids written as a flat file."""
    texts = [*data.texts(300), "", " ", "é🙂 \u0000 <eos> <pad>"]
    data.write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    library = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    eos = library.token_to_id("<eos>")
    ids = [index for text in texts for index in [*library.encode(text).ids, eos]]
    np.array(ids, "<u2").tofile(tmp_path / "tokens.bin")
    common = {"batch_size": 3, "shuffle": False}
    stored = build(tmp_path, {"format": "tokens", "files": ["tokens.bin"], "dtype": "uint16", "length": 32, **common})
    examples = {"kind": "text", "length": 32}
    table = {"format": "jsonl", "files": ["texts.jsonl"], "examples": examples, "workers": workers, **common}
    source = build(tmp_path, table)
    batches = list(source)
    source.close()
    assert len(batches) == (len(ids) - 1) // 32 // 3
    for mine, other in zip(batches, stored, strict=True):
        assert torch.equal(mine["input_ids"], other["input_ids"])
        assert torch.equal(mine["labels"], other["labels"])
    assert source.dropped == (len(ids) - 1) // 32 % 3


def test_a_document_may_be_longer_than_many_batches(build: Callable[..., Loader], tmp_path: Path) -> None:
    """The place within a long document is part of the state."""
    data.write_jsonl(tmp_path / "long.jsonl", [{"text": " ".join(data.texts(80, i))} for i in range(3)])
    examples = {"kind": "text", "length": 16, "segments": True}
    table = {"format": "jsonl", "files": ["long.jsonl"], "examples": examples, "batch_size": 2}
    source = build(tmp_path, table)
    batches, states = [], []
    for batch in source:
        batches.append(batch)
        states.append(source.state_dict())
    assert len(batches) > 50
    assert states[20]["tokens"] == 21 * 32
    resumed = build(tmp_path, table)
    resumed.load_state_dict(states[20])
    for mine, other in zip(resumed, batches[21:], strict=True):
        for name in other:
            assert torch.equal(mine[name], other[name])


def test_segments_keep_documents_apart(build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path) -> None:
    data.write_jsonl(tmp_path / "texts.jsonl", [{"text": "ink"}, {"text": "paper press"}] * 20)
    examples = {"kind": "text", "length": 12, "segments": True, "eos": True}
    table = {"format": "jsonl", "files": ["texts.jsonl"], "examples": examples, "batch_size": 1, "shuffle": False}
    batch = next(iter(build(tmp_path, table)))
    eos = tokenizer.eos_token_ids[0]
    ends = (batch["input_ids"][0] == eos).nonzero().flatten().tolist()
    assert len(ends) > 1
    for end in ends:
        assert batch["labels"][0, end] == -100
        if end + 1 < 12:
            assert batch["position_ids"][0, end + 1] == 0
    learned = batch["labels"] != -100
    assert torch.equal(batch["labels"][:, :-1][learned[:, :-1]], batch["input_ids"][:, 1:][learned[:, :-1]])
