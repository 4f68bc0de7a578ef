"""The tasks that learn pictures on two ranks over gloo, against one rank with the doubled batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from tiny_painter import LENGTH, MODEL, TASK, VAE, write_tokenizer
from training_parts import ListSource, recipe

from intaglio.trainer.checkpoint import read_tensors
from intaglio.trainer.data.source import Batch
from intaglio.trainer.logs import read_log
from intaglio.trainer.loop import Trainer
from intaglio.trainer.parallel import Ranks
from intaglio.trainer.tasks import autoencoder, flow_matching
from intaglio.trainer.tasks.task import Task

STEPS = 4
CASES = [(kind, name) for kind in ("ddp", "fsdp") for name in ("painter", "autoencoder")]


def build_painter(folder: Path) -> Task:
    tokenizer = write_tokenizer(folder / "tokenizer")
    torch.manual_seed(3)
    task = flow_matching.build_task(TASK, MODEL, root=folder, tokenizer=tokenizer)
    for parameter in task.transformer.parameters():
        if not parameter.any():  # it starts as the identity, which would hide everything
            parameter.data.normal_(std=0.05)
    return task


def build_autoencoder(folder: Path) -> Task:
    torch.manual_seed(3)
    return autoencoder.build_task({"kind": "autoencoder"}, VAE, root=folder, tokenizer=None)


BUILDERS = {"painter": build_painter, "autoencoder": build_autoencoder}


def examples(name: str) -> Batch:
    generator = torch.Generator().manual_seed(7)
    count = 16
    pixels = {"pixel_values": torch.rand(count, 3, 16, 16, generator=generator) * 2 - 1}
    if name == "autoencoder":
        return pixels
    mask = torch.ones(count, LENGTH, dtype=torch.int64)
    mask[::3, 4:] = 0
    return pixels | {"input_ids": torch.randint(3, 9, (count, LENGTH), generator=generator), "attention_mask": mask}


def train(ranks: Ranks, folder: Path, batch_size: int, kind: str, name: str) -> dict[str, torch.Tensor]:
    """Trains with an average and evaluations; returns the weights and buffers of the last checkpoint."""

    def build() -> Task:
        return BUILDERS[name](folder / str(ranks.rank))

    def source() -> ListSource:
        return ListSource(examples(name), batch_size, ranks.rank, ranks.world_size)

    settings: dict[str, Any] = {
        "data": {"batch_size": batch_size},
        "evaluation_data": {"batch_size": batch_size},
        # With a small eps AdamW would make much of gradients that are nothing but rounding.
        "optimizer": {"lr": 0.003, "eps": 1e-4},
        "parallel": {"kind": kind},
    }
    table = {"steps": STEPS, "ema": 0.9, "evaluate_every": 2, "log_every": 1}
    trainer = Trainer(build(), source(), recipe(table, **settings), folder, source(), ranks=ranks, rebuild=build)
    trainer.run()
    return read_tensors(folder / "checkpoints" / f"step-{STEPS:08}", "weights")


def train_all(ranks: Ranks, folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    return {(kind, name): train(ranks, folder / f"{kind}-{name}", 2, kind, name) for kind, name in CASES}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, train_all, folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, {name: train(Ranks(), folder / name, 4, "ddp", name) for name in BUILDERS}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_two_ranks_equal_one_with_the_doubled_batch(
    one_rank: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, list[Any]], kind: str, name: str
) -> None:
    """Weights, statistics of the latents, losses and evaluations: the noise of an example is the same."""
    one = one_rank[1][name]
    for of_rank in two_ranks[1]:
        two = of_rank[kind, name]
        assert one.keys() == two.keys()
        assert max(float((one[key] - two[key]).abs().max()) for key in one) <= 1e-5
    logs = [read_log(folder / "log.csv") for folder in (one_rank[0] / name, two_ranks[0] / f"{kind}-{name}")]
    for column in ("loss", "gradient_norm"):
        first, second = ([row[column] for row in log] for log in logs)
        assert first == pytest.approx(second, rel=1e-4)
    first, second = ([row["evaluation_loss"] for row in log if "evaluation_loss" in row] for log in logs)
    assert len(first) == 2
    assert first == pytest.approx(second, rel=1e-4)
    if name == "autoencoder":
        assert one["vae.bn.num_batches_tracked"] == STEPS
