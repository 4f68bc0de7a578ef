"""The loop against a loop written out in plain torch, and against itself when it is cut short and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import on_ranks
from safetensors import SafetensorError
from torch.nn import functional
from training_parts import ListSource, Regression, recipe, regression_examples

from intaglio.errors import (
    CancelledError,
    CheckpointError,
    ConfigError,
    InputError,
    OutputError,
    RuntimeMissingError,
    TrainingError,
)
from intaglio.trainer import checkpoint, logs, loop
from intaglio.trainer.checkpoint import saved_steps
from intaglio.trainer.data.source import Batch
from intaglio.trainer.logs import Row, read_log
from intaglio.trainer.loop import Trainer
from intaglio.trainer.parallel import Ranks
from intaglio.trainer.tasks.task import Losses


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


def test_compiled_training_learns_the_same_and_still_names_what_is_not_finite(tmp_path: Path) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    trainers = [build(tmp_path / str(on), {"steps": 4, "compile": on}, dropout=0.0) for on in (False, True)]
    for trainer in trainers:
        trainer.run()
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    plain, compiled = map(weights, trainers)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)
    broken = build(tmp_path / "broken", {"steps": 3, "compile": True})
    broken.task.get_submodule("blocks.0.norm").register_forward_hook(lambda module, inputs, output: output / 0.0)
    with pytest.raises(TrainingError, match=r"the output of blocks\.0\.norm;"):
        broken.run()


def test_what_sharded_training_has_not_is_refused(tmp_path: Path) -> None:
    ranks, parallel = Ranks(world_size=2), {"kind": "fsdp"}
    for train, optimizer, said in (
        ({"compile": True}, {}, "leave train.compile out"),
        ({"precision": "float16"}, {}, "does not scale losses for float16"),
        ({}, {"kind": "shampoo"}, "Shampoo needs whole gradients"),
    ):
        settings = recipe({"steps": 2, **train}, parallel=parallel, optimizer=optimizer)
        with pytest.raises(InputError, match=said):
            Trainer(Regression(), ListSource(regression_examples(), 8), settings, tmp_path, ranks=ranks)


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


def test_a_gradient_that_is_not_finite_names_where(tmp_path: Path) -> None:
    """The root of zero has the gradient infinity; the loss itself is finite."""

    class Root(Regression):
        def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
            total = super().forward(batch, generator).total
            return Losses(
                total + self.blocks[1].linear.weight.sub(self.blocks[1].linear.weight.detach()).abs().sqrt().sum(), {}
            )

    trainer = Trainer(Root(), ListSource(regression_examples(), 8), recipe({"steps": 3}), tmp_path)
    with pytest.raises(
        TrainingError, match=r"step 1: the gradient is not finite: micro-batch 1 of 1: the gradient of bl.*1.l"
    ):
        trainer.run()
    assert torch.isfinite(trainer.task.get_submodule("blocks.1.linear").weight).all()


def test_a_module_whose_output_is_not_finite_is_named(tmp_path: Path) -> None:
    trainer = build(tmp_path, {"steps": 3})
    trainer.task.get_submodule("blocks.0.norm").register_forward_hook(lambda module, inputs, output: output / 0.0)
    with pytest.raises(TrainingError, match=r"step 1: .*micro-batch 1 of 1: the output of blocks\.0\.norm;"):
        trainer.run()


def test_float16_scales_the_loss_and_resumes_with_the_scale(tmp_path: Path) -> None:
    train = {"steps": 12, "precision": "float16", "checkpoint_every": 5, "log_every": 1}
    # Weights that hardly change: the steps left out for a scale that was too large leave the others as they are.
    whole = build(tmp_path / "whole", train, optimizer={"lr": 1e-7}, dropout=0.0)
    whole.run()
    build(tmp_path / "plain", train | {"precision": "float32"}, optimizer={"lr": 1e-7}, dropout=0.0).run()
    norms = [[row["gradient_norm"] for row in read_log(tmp_path / name / "log.csv")] for name in ("whole", "plain")]
    kept = [pair for pair in zip(*norms, strict=True) if math.isfinite(pair[0])]
    assert len(kept) >= 6
    assert all(half == pytest.approx(single, rel=0.05) for half, single in kept)
    build(tmp_path / "cut", train | {"steps": 5}, optimizer={"lr": 1e-7}, dropout=0.0).run()
    resumed = build(tmp_path / "cut", train, optimizer={"lr": 1e-7}, dropout=0.0)
    resumed.run(resume=True)
    assert resumed.scaler.state_dict() == whole.scaler.state_dict() and whole.scaler.get_scale() > 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(event: Any) -> None:
        if event.done == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = build(tmp_path / "cut", {"steps": 9}, progress=interrupt).run()
    assert signal.getsignal(number) is before
    assert (result.stopped, result.step, saved_steps(tmp_path / "cut" / "checkpoints")) == (number.name, 4, [4])
    assert not (tmp_path / "cut" / "model").exists()
    resumed, whole = build(tmp_path / "cut", {"steps": 9}), build(tmp_path / "whole", {"steps": 9})
    assert resumed.run(resume=True).stopped is None
    whole.run()
    assert_equal(weights(whole), weights(resumed))


def test_a_signal_that_comes_while_a_step_ends_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after what was asked for in the second step was read."""

    def signalled(self: Ranks, values: Sequence[float]) -> list[float]:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return list(values)

    monkeypatch.setattr(Ranks, "max", signalled)
    trainer = build(tmp_path, {"steps": 9})
    result = trainer.run()
    assert (result.stopped, result.step, saved_steps(tmp_path / "checkpoints")) == ("SIGTERM", 3, [3])


def test_a_plot_that_cannot_be_drawn_is_said_before_training_or_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train = {"steps": 3, "checkpoint_every": 2, "log_every": 1, "plot": True}

    def plot(rows: Sequence[Row], path: Path) -> None:
        drawn.append(saved_steps(tmp_path / "a" / "checkpoints")[-1])
        raise ValueError("no font")

    drawn: list[int] = []
    monkeypatch.setattr(logs, "plot_loss", plot)
    assert build(tmp_path / "a", train).run().step == 3
    assert drawn == [2, 3]  # after the checkpoint
    assert (tmp_path / "a" / "model" / "model.pt").is_file()
    assert "loss.png is not drawn (no font); the run goes on" in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeMissingError, match="matplotlib, which is not installed"):
        build(tmp_path / "b", train).run()
    assert not (tmp_path / "b" / "log.csv").exists()


def train_until_killed(_: Ranks, folder: Path, writes: int) -> None:
    """Dies by SIGKILL in the middle of writing its n-th file of tensors."""

    def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
        nonlocal writes
        writes -= 1
        safetensors.torch.save_file(tensors, path)
        if writes == 0:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = write  # type: ignore[assignment]
    build(folder, {"steps": 9, "checkpoint_every": 2, "keep": 1, "ema": 0.9}).run(resume=True)


def test_a_run_killed_while_it_writes_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL in the first checkpoint, in a later one, in each of its files; then to the end, bit for bit."""
    for writes in (2, 7, 3, 4):
        with pytest.raises(RuntimeError, match="died"):
            on_ranks(1, train_until_killed, tmp_path / "killed", writes)
    train = {"steps": 9, "checkpoint_every": 2, "keep": 1, "ema": 0.9}
    resumed, whole = build(tmp_path / "killed", train), build(tmp_path / "whole", train)
    steps = saved_steps(tmp_path / "killed" / "checkpoints")
    assert steps and steps[-1] < 9
    resumed.run(resume=True)
    whole.run()
    assert_equal(weights(whole), weights(resumed))
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-00000009"]


def evaluated(folder: Path, train: dict[str, Any], **more: Any) -> Trainer:
    return build(folder, train, evaluation_source=ListSource(regression_examples(24, seed=2), 8), **more)


def test_evaluation_takes_averaged_weights_the_same_noise_and_changes_nothing(tmp_path: Path) -> None:
    train = {"steps": 10, "ema": 0.9, "log_every": 5}
    trainer, plain = evaluated(tmp_path / "a", train | {"evaluate_every": 2}), build(tmp_path / "b", train)
    for each in (trainer, plain):  # in evaluations too, what draws from the global generator
        each.task.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0 * torch.rand(1),))
    result = trainer.run()
    plain.run()
    assert_equal(weights(trainer), weights(plain))
    rows = read_log(tmp_path / "a" / "log.csv")
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [2, 4, 6, 8, 10]
    assert result.evaluation_loss == rows[-1]["evaluation_loss"] == 2 * rows[-1]["evaluation_half"]
    again = trainer._evaluate(trainer.evaluation_source)  # type: ignore[arg-type]
    assert again["evaluation_loss"] == result.evaluation_loss
    # by hand: the published weights, the mean over the examples' weights
    task = Regression(0.1)
    task.load_state_dict(torch.load(tmp_path / "a" / "model" / "model.pt"))
    task.eval()
    source = ListSource(regression_examples(24, seed=2), 8)
    batches = list(source)
    generators = [torch.Generator().manual_seed(loop._seed(3, 1, 0) + 8 * i) for i in range(len(batches))]
    losses = [float(task(batch, g).total.detach()) for batch, g in zip(batches, generators, strict=True)]
    assert sum(losses) / sum(float(b["weight"].sum()) for b in batches) == pytest.approx(
        result.evaluation_loss, rel=1e-6
    )


def test_the_run_ends_when_the_evaluation_gets_no_better_and_the_best_is_kept(tmp_path: Path) -> None:
    train = {"steps": 400, "evaluate_every": 1, "patience": 3, "log_every": 100}
    trainer = evaluated(tmp_path, train, optimizer={"kind": "sgd", "lr": 0.3}, schedule={"kind": "constant"})
    result = trainer.run()
    losses = [row["evaluation_loss"] for row in read_log(tmp_path / "log.csv")]
    assert result.stopped == "patience" and len(losses) == result.step < 400
    best = min(range(len(losses)), key=losses.__getitem__)
    assert result.best_step == best + 1 == result.step - 3
    kept, last = (torch.load(tmp_path / name / "model.pt") for name in ("best", "model"))
    assert not torch.equal(kept["head.weight"], last["head.weight"])
    rerun = evaluated(
        tmp_path / "again",
        {**train, "steps": best + 1},
        optimizer={"kind": "sgd", "lr": 0.3},
        schedule={"kind": "constant"},
    )
    rerun.run()
    assert_equal(kept, weights(rerun))


def test_what_is_not_trained_is_no_part_of_checkpoints_but_has_to_be_the_same(tmp_path: Path) -> None:
    def frozen(folder: Path, steps: int) -> Trainer:
        torch.manual_seed(5)
        task = Regression()
        task.embed.requires_grad_(False)
        return Trainer(task, ListSource(regression_examples(), 8), recipe({"steps": steps, "ema": 0.9}), folder)

    trainer = frozen(tmp_path, 2)
    trainer.run()
    folder = checkpoint.checkpoint_folder(tmp_path / "checkpoints", 2)
    assert not any(
        "embed" in name for n in ("weights", "average", "optimizer") for name in checkpoint.read_tensors(folder, n)
    )
    assert frozen(tmp_path, 3).run(resume=True).step == 3
    other = frozen(tmp_path, 4)
    with torch.no_grad():
        other.task.get_submodule("embed").weight += 1  # type: ignore[operator]
    changed = Trainer(other.task, other.source, other.settings, tmp_path)
    with pytest.raises(CheckpointError, match="other weights in the part of the model that is not trained"):
        changed.run(resume=True)
    other.task.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter of the task is trained"):
        Trainer(other.task, other.source, other.settings, tmp_path)


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    build(tmp_path, {"steps": 2}).run()
    folder = checkpoint.checkpoint_folder(tmp_path / "checkpoints", 2)
    for name, cut in (("optimizer.safetensors", 100), ("state.json", 50)):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:cut])
        with pytest.raises(CheckpointError, match=f"{name}: cannot be read"):
            build(tmp_path, {"steps": 4}).run(resume=True)
        (folder / name).write_bytes(kept)
    state = json.loads((folder / "state.json").read_text())
    for change, message in (
        ({"step": None}, "lacks step; move .*step-00000002 away, then start anew"),
        ({"optimizer": []}, "holds something else than a run saves"),
        ({"random": []}, "holds something else than a run saves"),
        ({"interval": 3}, "holds something else than a run saves"),
    ):
        changed = {name: value for name, value in (state | change).items() if value is not None or name == "best"}
        (folder / "state.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            build(tmp_path, {"steps": 4}).run(resume=True)
    (folder / "state.json").write_text(json.dumps(state))
    tensors = checkpoint.read_tensors(folder, "weights")
    task = Regression()
    with pytest.raises(CheckpointError, match=r"head\.weight is missing"):
        checkpoint.load_weights(task, {k: v for k, v in tensors.items() if k != "head.weight"}, folder)
    with pytest.raises(CheckpointError, match=r"zzz is in the checkpoint only"):
        checkpoint.load_weights(task, tensors | {"zzz": torch.zeros(1)}, folder)
    with pytest.raises(CheckpointError, match=r"head\.bias has shape \(2,\), the model \(1,\)"):
        checkpoint.load_weights(task, tensors | {"head.bias": torch.zeros(2)}, folder)


def test_the_advice_names_the_checkpoint_before(tmp_path: Path) -> None:
    build(tmp_path, {"steps": 4, "checkpoint_every": 2}).run()
    (checkpoint.checkpoint_folder(tmp_path / "checkpoints", 4) / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"move .*step-00000004 away, then --resume goes on from step 2"):
        build(tmp_path, {"steps": 6}).run(resume=True)


def test_a_log_that_is_damaged_and_a_best_that_is_gone_do_not_stop_a_run(tmp_path: Path) -> None:
    evaluation = {"evaluate_every": 2}

    def source() -> ListSource:
        return ListSource(regression_examples(), 8)

    build(tmp_path, {"steps": 2, **evaluation}, evaluation_source=source()).run()
    (tmp_path / "log.csv").write_bytes(b"step,loss\n\xff\xfe,\x00")
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    assert build(tmp_path, {"steps": 2, **evaluation}, evaluation_source=source()).run(resume=True).best_step is None
    assert build(tmp_path, {"steps": 4, **evaluation}, evaluation_source=source()).run(resume=True).best_step == 4


def test_an_evaluation_that_is_not_finite_stops_and_is_not_the_best(tmp_path: Path) -> None:
    examples = regression_examples()
    examples["x"] = torch.full_like(examples["x"], math.nan)
    trainer = build(
        tmp_path, {"steps": 4, "evaluate_every": 3, "checkpoint_every": 2}, evaluation_source=ListSource(examples, 8)
    )
    with pytest.raises(TrainingError, match=r"step 3: the evaluation's loss is nan.*the checkpoint of step 2 is kept"):
        trainer.run()
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, {"steps": 2}).run()

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OutputError, match=r"step-00000004: cannot be written .*No space left.*Earlier checkpoints are kept"
    ):
        build(tmp_path, {"steps": 4}).run(resume=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: cannot take a run"):
        build(tmp_path / "file", {"steps": 2}).run()


def test_no_batch_and_nothing_to_predict_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no batch"):
        build(tmp_path / "a", {"steps": 2}, batch_size=65).run()
    examples = regression_examples()
    examples["weight"] = torch.zeros(64)
    with pytest.raises(TrainingError, match="step 1: nothing in its batches is predicted"):
        build(tmp_path / "b", {"steps": 2}, examples=examples).run()
