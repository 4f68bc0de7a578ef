"""A resumed source goes on exactly as an uninterrupted one: every reader, shuffled, with workers and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import training_data as data

from intaglio.errors import CheckpointError
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.source import Batch


def endless(source: Loader) -> Iterator[Batch]:
    """Batches, epoch after epoch."""
    while True:
        yield from source


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    """Compares batches bit for bit."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert list(mine) == list(other)
        for name in mine:
            assert mine[name].dtype == other[name].dtype
            assert torch.equal(mine[name], other[name]), name


@pytest.mark.parametrize("name", data.TABLES)
def test_resumes_anywhere_without_workers(name: str, build: Callable[..., Loader], corpora: Path) -> None:
    """From the state after each batch of an epoch and a half, the next batches are the same."""
    table = {**data.TABLES[name], "batch_size": 4}
    source = build(corpora, table)
    batches, states = [], [source.state_dict()]
    for batch in islice(endless(source), 24):
        batches.append(batch)
        states.append(json.loads(json.dumps(source.state_dict())))
    assert states[-1]["epoch"] >= 1
    for n in (0, 1, 2, 5, 9, 13, 14, 15, 16, 20):
        resumed = build(corpora, table)
        resumed.load_state_dict(states[n])
        assert resumed.state_dict() == states[n]
        assert_same(list(islice(endless(resumed), 4)), batches[n : n + 4])
        if n + 4 < len(states):
            assert resumed.state_dict() == states[n + 4]


@pytest.mark.parametrize("name", data.TABLES)
def test_resumes_with_workers_as_without(name: str, build: Callable[..., Loader], corpora: Path) -> None:
    table = {**data.TABLES[name], "batch_size": 4}
    expected = list(islice(endless(build(corpora, table)), 12))
    source = build(corpora, {**table, "workers": 1})
    first = list(islice(endless(source), 5))
    state = json.loads(json.dumps(source.state_dict()))
    without = build(corpora, table)
    without.load_state_dict(state)
    assert_same(first + list(islice(endless(without), 7)), expected)
    source.load_state_dict(state)
    assert_same(list(islice(endless(source), 7)), expected[5:])
    source.close()


@pytest.mark.parametrize("name", data.TABLES)
def test_epochs_differ_and_cover_the_same(name: str, build: Callable[..., Loader], corpora: Path) -> None:
    source = build(corpora, {**data.TABLES[name], "batch_size": 1})
    first, epochs = [], []
    for batch in source:
        first.append(batch)
        epochs.append(source.state_dict()["epoch"])
    # With the last batch the cursor is at the next epoch.
    assert epochs == [0] * (len(first) - 1) + [1]
    second = list(source)
    assert source.epoch == 2
    key = "input_ids" if name.startswith("tokens") else "labels"
    if "examples" in data.TABLES[name] and data.TABLES[name]["examples"].get("kind") == "text":
        return  # windows are cut elsewhere in each epoch
    assert len(first) == len(second)
    if key in first[0]:
        assert [batch[key].tolist() for batch in first] != [batch[key].tolist() for batch in second]
        assert sorted(batch[key].tolist() for batch in first) == sorted(batch[key].tolist() for batch in second)


def test_refuses_other_data(build: Callable[..., Loader], corpora: Path) -> None:
    table = {**data.TABLES["jsonl"], "batch_size": 4}
    source = build(corpora, table)
    next(iter(source))
    state = source.state_dict()
    for other in ({**table, "files": ["0.jsonl"]}, {**table, "shuffle": False}, {**table, "shuffle_buffer": 9}):
        with pytest.raises(CheckpointError, match=r"saved in the middle of jsonl data of \d+ bytes.*0\.jsonl"):
            build(corpora, other).load_state_dict(state)
    with pytest.raises(CheckpointError):
        build(corpora, table, seed=4).load_state_dict(state)
    build(corpora, {**table, "batch_size": 8, "workers": 3}).load_state_dict(state)


def test_files_come_in_another_order_each_epoch(build: Callable[..., Loader], tmp_path: Path) -> None:
    """A buffer of two hardly shuffles: of one order of 40 files the first 20 drawn are of the first 21 in any epoch."""
    for i in range(40):
        data.write_csv(tmp_path / f"{i:02}.csv", [{"x": i}])
    examples = {"kind": "numbers", "fields": ["x"]}
    table = {"format": "csv", "files": ["*.csv"], "shuffle_buffer": 2, "batch_size": 1, "examples": examples}
    source = build(tmp_path, table)
    first, second = ([int(batch["inputs"]) for batch in source] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(40))
    assert len(set(first[:20]) & set(second[:20])) < 17
    assert len(set(first[:20]) & set(range(21))) < 17
    in_order = build(tmp_path, {**table, "shuffle": False})
    assert [int(batch["inputs"]) for batch in in_order] == list(range(40))
