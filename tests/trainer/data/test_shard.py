"""Ranks: no example twice, as many batches on each, and together what one with the larger batch sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import training_data as data

from intaglio.errors import DataError, InputError
from intaglio.trainer.data.loader import Loader


@pytest.mark.parametrize("name", data.TABLES)
def test_two_ranks_are_one_with_the_doubled_batch(name: str, build: Callable[..., Loader], corpora: Path) -> None:
    table = {**data.TABLES[name], "batch_size": 3}
    ranks = [list(build(corpora, table).shard(rank, 2)) for rank in range(2)]
    doubled = build(corpora, {**table, "batch_size": 6})
    expected = list(doubled)
    assert len(expected) == len(ranks[0]) == len(ranks[1]) > 2
    for first, second, both in zip(*ranks, expected, strict=True):
        for tensor_name in both:
            assert torch.equal(torch.cat([first[tensor_name], second[tensor_name]]), both[tensor_name])


@pytest.mark.parametrize("table", ["csv-numbers", "npy"])
def test_shards_cover_an_epoch_once(table: str, build: Callable[..., Loader], corpora: Path, tmp_path: Path) -> None:
    data.write_csv(tmp_path / "n.csv", [{"x": i} for i in range(61)])
    np.save(tmp_path / "n.npy", np.arange(61, dtype=np.float32)[:, None])
    numbers = {"examples": {"kind": "numbers", "fields": ["x"]}, "batch_size": 4}
    if table == "npy":
        settings = {"format": "npy", "arrays": {"x": "n.npy"}, **numbers}
    else:
        settings = {"format": "csv", "files": ["n.csv"], "shuffle_buffer": 7, **numbers}
    seen = []
    for rank in range(3):
        source = build(tmp_path, settings).shard(rank, 3)
        batches = list(source)
        assert len(batches) == 5
        assert source.dropped == 1
        seen += [int(x) for batch in batches for x in batch["inputs"].flatten()]
    assert len(set(seen)) == len(seen) == 60
    assert set(seen) < set(range(61))
    assert seen != sorted(seen)


def test_a_state_is_of_any_rank_and_number_of_ranks(build: Callable[..., Loader], corpora: Path) -> None:
    """A run of two ranks goes on as one with the doubled batch."""
    table = {**data.TABLES["jsonl"], "batch_size": 3}
    ranks = [build(corpora, table).shard(rank, 2) for rank in range(2)]
    for rank in ranks:
        stream = iter(rank)
        for _ in range(4):
            next(stream)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    one = build(corpora, {**table, "batch_size": 6})
    expected = list(one)[4:]
    one = build(corpora, {**table, "batch_size": 6})
    one.load_state_dict(ranks[1].state_dict())
    for mine, other in zip(one, expected, strict=True):
        assert torch.equal(mine["input_ids"], other["input_ids"])


def test_the_rest_is_kept_where_asked(build: Callable[..., Loader], corpora: Path) -> None:
    table = {**data.TABLES["csv-numbers"], "batch_size": 16, "drop_last": False}
    source = build(corpora, table)
    assert [len(batch["inputs"]) for batch in source] == [16, 16, 16, 13]
    assert source.dropped == 0
    assert source.epoch == 1
    with pytest.raises(InputError, match="drop_last"):
        source.shard(0, 2)
    windows = build(corpora, {**data.TABLES["jsonl"], "batch_size": 16, "drop_last": False})
    dropping = build(corpora, {**data.TABLES["jsonl"], "batch_size": 16})
    counts = [len(batch["input_ids"]) for batch in windows]
    assert len(list(dropping)) == len(counts) - 1
    assert dropping.dropped == counts[-1] < 16


def test_refuses_ranks_that_are_none_and_epochs_without_a_batch(build: Callable[..., Loader], corpora: Path) -> None:
    source = build(corpora, {**data.TABLES["npy"], "batch_size": 31})
    for rank, world_size in ((2, 2), (-1, 2)):
        with pytest.raises(InputError, match=f"rank {rank} of 2"):
            source.shard(rank, world_size)
    with pytest.raises(InputError, match="part 0 of 2"):
        source.shard(0, 2).shard(0, 2)
    with pytest.raises(DataError, match=r"an epoch has no batch. 61 examples were found.*takes 31 on each of 2 ranks"):
        list(source.shard(0, 2))
