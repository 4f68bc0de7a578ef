"""Two ranks over gloo: against one with the doubled batch, cut short, and resumed on another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from training_parts import ListSource, Regression, recipe, regression_examples

from intaglio.errors import ConfigError, TrainingError
from intaglio.progress import ProgressEvent
from intaglio.trainer.checkpoint import read_tensors
from intaglio.trainer.data.source import Batch
from intaglio.trainer.logs import read_log
from intaglio.trainer.loop import Trainer
from intaglio.trainer.parallel import Ranks

STEPS = 20


def build() -> Regression:
    torch.manual_seed(5)
    return Regression(noise=0.0, dropout=0.0)


def train(
    ranks: Ranks,
    folder: Path,
    batch_size: int,
    kind: str = "ddp",
    optimizer: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    killed_after: int | None = None,
    evaluation: Batch | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Trains on this rank's share; returns the weights of the last checkpoint."""

    def kill(event: ProgressEvent) -> None:
        if event.done == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    train_settings = {"steps": STEPS, "ema": 0.9, "checkpoint_every": 6, **settings}
    more: dict[str, Any] = {"evaluation_data": {}} if evaluation is not None else {}
    trainer = Trainer(
        build(),
        ListSource(regression_examples(), batch_size, ranks.rank, ranks.world_size),
        recipe(
            train_settings,
            data={"batch_size": batch_size},
            optimizer=optimizer or {"lr": 0.01},
            parallel={"kind": kind},
            schedule={"kind": "constant", "warmup": 3},
            **more,
        ),
        folder,
        None if evaluation is None else ListSource(evaluation, batch_size, ranks.rank, ranks.world_size),
        kill if killed_after is not None and ranks.rank == ranks.world_size - 1 else None,
        ranks=ranks,
        rebuild=build,
    )
    result = trainer.run(resume)
    return read_tensors(folder / "checkpoints" / f"step-{result.step:08}", "weights")


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "adamw": {"kind": "adamw", "lr": 0.01},
    "muon": {"kind": "muon", "lr": 0.01},
    "lion": {"kind": "lion", "lr": 0.001},
    "shampoo": {"kind": "shampoo", "lr": 0.01},
}
CASES = [(kind, name) for kind in ("ddp", "fsdp") for name in OPTIMIZERS if (kind, name) != ("fsdp", "shampoo")]


def train_all(ranks: Ranks, folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """SGD and AdamW take the 8 examples of a step in two micro-batches on each rank."""
    return {
        (kind, name): train(
            ranks,
            folder / f"{kind}-{name}",
            2 if name in ("sgd", "adamw") else 4,
            kind,
            OPTIMIZERS[name],
            evaluate_every=10,
            evaluation=regression_examples(seed=1),
            accumulate=2 if name in ("sgd", "adamw") else 1,
        )
        for kind, name in CASES
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, train_all, folder)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_two_ranks_equal_one_with_the_doubled_batch(
    tmp_path: Path, two_ranks: tuple[Path, list[Any]], kind: str, name: str
) -> None:
    """Weights, losses, gradient norms, evaluations and published models.

    Muon's products are in bfloat16, and in another order where its matrices are sharded: hence its bound.
    """
    bound = 1e-2 if (kind, name) == ("fsdp", "muon") else 1e-5
    one = train(
        Ranks(), tmp_path, 8, optimizer=OPTIMIZERS[name], evaluate_every=10, evaluation=regression_examples(seed=1)
    )
    folder, weights = two_ranks[0] / f"{kind}-{name}", two_ranks[1]
    for of_rank in weights:
        assert difference(one, of_rank[kind, name]) <= bound
    ones, twos = read_log(tmp_path / "log.csv"), read_log(folder / "log.csv")
    for column in ("loss", "gradient_norm", "evaluation_loss"):
        assert [row[column] for row in ones] == pytest.approx([row[column] for row in twos], rel=max(1e-4, bound))
    for model in ("model", "best"):
        saved = [torch.load(run / model / "model.pt") for run in (tmp_path, folder)]
        assert difference(*saved) <= bound


def train_evaluated(ranks: Ranks, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Evaluations get worse and worse: saving the best one, or a checkpoint, would drop the gathered weights."""
    opposite = regression_examples(seed=1)
    opposite["y"] = -opposite["y"]
    return [
        train(ranks, folder / "plain", 4, "fsdp"),
        train(ranks, folder / "evaluated", 4, "fsdp", evaluate_every=3, evaluation=opposite, checkpoint_every=STEPS),
    ]


def test_evaluations_of_averaged_weights_leave_sharded_ones_alone(tmp_path: Path) -> None:
    for plain, evaluated in on_ranks(2, train_evaluated, tmp_path):
        assert difference(plain, evaluated) == 0.0


def stopped(ranks: Ranks, folder: Path) -> tuple[str | None, int]:
    """A signal reaches the second rank alone, while the ranks agree on whether to stop after the second step."""
    reduced = Ranks.max

    def signalled(self: Ranks, values: Sequence[float]) -> list[float]:
        result = reduced(self, values)
        if trainer.step == 2 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    Ranks.max = signalled  # type: ignore[method-assign]
    source = ListSource(regression_examples(), 4, ranks.rank, ranks.world_size)
    trainer = Trainer(build(), source, recipe({"steps": 9}), folder, ranks=ranks)
    result = trainer.run()
    return result.stopped, result.step


def test_a_signal_to_one_rank_stops_all_whenever_it_comes(tmp_path: Path) -> None:
    assert on_ranks(2, stopped, tmp_path) == [("SIGTERM", 3)] * 2


def train_killed(ranks: Ranks, folder: Path, kind: str) -> None:
    train(ranks, folder, 4, kind, killed_after=15)


def train_resumed(ranks: Ranks, folder: Path) -> None:
    """Runs that were killed, and runs that one rank began."""
    for kind in ("ddp", "fsdp"):
        train(ranks, folder / f"killed-{kind}", 4, kind, resume=True)
        train(ranks, folder / f"whole-{kind}", 4, kind)
        train(ranks, folder / f"from-one-{kind}", 4, kind, resume=True)


def test_killed_and_resumed_on_as_many_ranks_and_on_others(tmp_path: Path) -> None:
    """A killed rank: bit for bit on as many ranks; from one rank to two and from two to one within 1e-5."""
    for kind in ("ddp", "fsdp"):
        with pytest.raises(RuntimeError, match="died"):
            on_ranks(2, train_killed, tmp_path / f"killed-{kind}", kind)
        shutil.copytree(tmp_path / f"killed-{kind}", tmp_path / f"to-one-{kind}")
        train(Ranks(), tmp_path / f"from-one-{kind}", 8, kind, steps=10)
    on_ranks(2, train_resumed, tmp_path)
    one = train(Ranks(), tmp_path / "one", 8)
    for kind in ("ddp", "fsdp"):
        last = f"checkpoints/step-{STEPS:08}"
        for name in ("weights", "average", "optimizer"):
            whole, killed = (read_tensors(tmp_path / f"{run}-{kind}" / last, name) for run in ("whole", "killed"))
            assert difference(whole, killed) == 0.0
        assert difference(one, read_tensors(tmp_path / f"from-one-{kind}" / last, "weights")) <= 1e-5
        with pytest.raises(ConfigError, match=r"a step had 8 = 4 x 1 x 2 examples .* now 4 = 4 x 1 x 1"):
            train(Ranks(), tmp_path / f"to-one-{kind}", 4, kind, resume=True)
        assert difference(one, train(Ranks(), tmp_path / f"to-one-{kind}", 4, kind, resume=True, accumulate=2)) <= 1e-5


class Unequal(ListSource):
    """Fewer batches on the second rank."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(regression_examples(64 if ranks.is_first else 40), 4, ranks.rank, ranks.world_size)


def train_unequal(ranks: Ranks, folder: Path) -> str:
    trainer = Trainer(build(), Unequal(ranks), recipe({"steps": 9}), folder, ranks=ranks)
    with pytest.raises(TrainingError) as caught:
        trainer.run()
    return str(caught.value)


def test_unequal_shards_are_named(tmp_path: Path) -> None:
    messages = on_ranks(2, train_unequal, tmp_path)
    assert messages[0].startswith("step 6: rank 0 has come to the end of 0 epochs")
    assert messages[1].startswith("step 6: rank 1 has come to the end of 1 epochs")
