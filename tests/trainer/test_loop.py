"""The loop against a loop written out in plain torch, and against itself when it is cut short and resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from training_parts import ListSource, Regression, recipe, regression_examples

from intaglio.errors import CancelledError, CheckpointError, ConfigError, InputError, TrainingError
from intaglio.trainer.checkpoint import saved_steps
from intaglio.trainer.logs import read_log
from intaglio.trainer.loop import Trainer


def build(folder: Path, train: dict[str, Any], *, batch_size: int = 8, **more: Any) -> Trainer:
    tables = {name: more.pop(name) for name in ("optimizer", "schedule") if name in more}
    noise, dropout = more.pop("noise", 0.1), more.pop("dropout", 0.1)
    torch.manual_seed(5)
    task = Regression(noise, dropout)
    source = ListSource(more.pop("examples", None) or regression_examples(), batch_size)
    return Trainer(task, source, recipe(train, **tables), folder, **more)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.task.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_steps_equal_a_plain_loop(tmp_path: Path) -> None:
    """Accumulation, weights, clipping, warmup and cosine, decay groups and the average, written out in float32."""
    trainer = build(
        tmp_path,
        {"steps": 12, "accumulate": 2, "clip": 0.5, "ema": 0.9},
        noise=0.0,
        dropout=0.0,
        optimizer={"lr": 0.02, "weight_decay": 0.1},
        schedule={"kind": "cosine", "warmup": 3, "final": 0.1},
    )
    start = weights(trainer)
    trainer.run()

    torch.manual_seed(5)
    task = Regression(0.0, 0.0)
    task.load_state_dict(start)
    matrices = [p for p in task.parameters() if p.ndim >= 2]
    others = [p for p in task.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, foreach=False)
    average = {name: p.detach().clone() for name, p in task.named_parameters()}
    source = ListSource(regression_examples(), 8)
    batches: list[Any] = []
    while len(batches) < 24:
        batches += list(source)
    for step in range(12):
        rate = 0.02 * (step + 1) / 3
        if step >= 3:
            rate = 0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 9)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        micro = batches[2 * step : 2 * step + 2]
        total = sum(float(batch["weight"].sum()) for batch in micro)
        loss = torch.zeros(())
        for batch in micro:
            hidden = task.embed(batch["x"])
            for block in task.blocks:
                hidden = hidden + torch.tanh(block.norm(block.linear(hidden)))
            errors = functional.mse_loss(task.head(hidden)[:, 0], batch["y"], reduction="none")
            loss = loss + (errors * batch["weight"]).sum() / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (2 + step) / (11 + step))
        for name, parameter in task.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * parameter.detach()
    for name, parameter in task.named_parameters():
        torch.testing.assert_close(trainer.parameters[name].detach(), parameter.detach(), rtol=1e-4, atol=1e-5)
        assert trainer.average is not None
        torch.testing.assert_close(trainer.average.weights[name], average[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon", "lion", "shampoo"])
def test_a_run_that_was_cut_short_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path, kind: str) -> None:
    train = {"steps": 11, "accumulate": 2, "ema": 0.9, "checkpoint_every": 3}
    optimizer = {"kind": kind, "lr": 0.01, **({"momentum": 0.9} if kind in ("sgd", "shampoo") else {})}
    whole = build(tmp_path / "whole", train, optimizer=optimizer)
    whole.run()

    def stop(event: Any) -> bool:
        return event.done < 5

    with pytest.raises(CancelledError):
        build(tmp_path / "cut", train, optimizer=optimizer, progress=stop).run()
    resumed = build(tmp_path / "cut", train, optimizer=optimizer)
    torch.manual_seed(99)  # what the checkpoint does not put back would show
    resumed.run(resume=True)
    assert_equal(weights(whole), weights(resumed))
    assert whole.average is not None and resumed.average is not None
    assert_equal(whole.average.weights, resumed.average.weights)
    assert_equal(whole.optimizers.state()[0], resumed.optimizers.state()[0])
    assert whole.optimizers.state()[1] == resumed.optimizers.state()[1]
    drop = ("seconds", "examples_per_second")
    rows = [
        [{k: v for k, v in row.items() if k not in drop} for row in read_log(tmp_path / name / "log.csv")]
        for name in ("whole", "cut")
    ]
    assert rows[0] == rows[1]


def test_bfloat16_learns_and_keeps_float32_weights(tmp_path: Path) -> None:
    trainer = build(tmp_path, {"steps": 60, "precision": "bfloat16", "log_every": 1}, optimizer={"lr": 0.02}, noise=0.0)
    trainer.run()
    losses = [row["loss"] for row in read_log(tmp_path / "log.csv")]
    assert sum(losses[-8:]) < 0.3 * sum(losses[:8])
    assert all(p.dtype == torch.float32 for p in trainer.parameters.values())


def test_resume_names_what_may_not_differ(tmp_path: Path) -> None:
    build(tmp_path, {"steps": 2}).run()
    with pytest.raises(InputError, match="--resume"):
        build(tmp_path, {"steps": 4}).run()
    with pytest.raises(ConfigError, match=r"optimizer.lr = 0.001, the recipe says 0.5"):
        build(tmp_path, {"steps": 4}, optimizer={"lr": 0.5}).run(resume=True)
    with pytest.raises(CheckpointError, match="other data"):
        build(tmp_path, {"steps": 4}, examples=regression_examples(seed=1)).run(resume=True)
    assert build(tmp_path, {"steps": 4}).run(resume=True).step == 4


def test_last_checkpoints_are_kept_and_what_was_left_half_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-00000002.partial-x"
    left.mkdir(parents=True)
    build(tmp_path, {"steps": 7, "checkpoint_every": 2, "keep": 2}).run()
    assert saved_steps(tmp_path / "checkpoints") == [6, 7]
    assert not left.exists()


def test_loss_that_is_not_finite_names_where(tmp_path: Path) -> None:
    examples = regression_examples()
    trainer = build(tmp_path, {"steps": 40, "checkpoint_every": 2, "accumulate": 2}, examples=examples)

    def poison(event: Any) -> None:
        if event.done == 5:
            with torch.no_grad():
                trainer.task.get_submodule("blocks.1.linear").weight[0, 0] = float("nan")

    trainer._progress = poison
    with pytest.raises(
        TrainingError, match=r"step 6: .*parameter blocks.1.linear.weight.*checkpoint of step 4 is kept"
    ):
        trainer.run()
    examples["x"][17, 2] = float("inf")
    with pytest.raises(TrainingError, match=r"micro-batch \d of 2: x of the data.*no checkpoint"):
        build(tmp_path / "data", {"steps": 40, "accumulate": 2}, examples=examples).run()
