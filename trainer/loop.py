"""The training loop: batches from a source, a loss from a task, updates, evaluations, checkpoints, a log."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from intaglio.errors import CancelledError, CheckpointError, InputError, OutputError, TrainingError
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback
from intaglio.trainer import checkpoint as checkpoints
from intaglio.trainer.data.source import Batch, BatchSource
from intaglio.trainer.diagnosis import explain_not_finite
from intaglio.trainer.ema import WeightAverage
from intaglio.trainer.logs import Row, RunLog
from intaglio.trainer.optimizers import build_optimizers
from intaglio.trainer.parallel import Ranks, parallelize, reshard, set_gradient_sync
from intaglio.trainer.recipe import Recipe, check_same_recipe
from intaglio.trainer.schedules import learning_rate_factor
from intaglio.trainer.sharding import local, whole
from intaglio.trainer.tasks.task import Losses, Task

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Below this the gradients themselves are not finite, whatever the scale of the loss.
_SMALLEST_LOSS_SCALE = 2.0**-10
# What a seed is drawn for.
_TRAINING, _EVALUATION, _RANK = 0, 1, 2
# Why a run ends before its last step, in the order in which one reason of a rank outweighs those of others.
_STOPS = (None, "patience", "cancelled", "SIGTERM", "SIGINT")


# What a checkpoint says beside its tensors; see _save_checkpoint.
_STATE = (
    "step", "seconds", "world_size", "recipe", "fingerprint", "frozen", "data", "random", "optimizer",
    "average_updates", "scaler", "interval", "best", "stale_evaluations",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended: after which step, with which losses, and what stopped it before its last step.

    ``skipped`` counts the damaged records that this rank left out, each once an epoch.
    """

    step: int
    loss: float | None
    evaluation_loss: float | None
    best_step: int | None
    stopped: str | None
    skipped: int = 0


class Trainer:
    """Trains ``task`` on ``source`` as ``settings`` says; everything that comes of it lies in ``folder``.

    ``report`` gets every row of the log. ``rebuild`` builds the task once more: a sharded one is saved through it.
    """

    def __init__(
        self,
        task: Task,
        source: BatchSource,
        settings: Recipe,
        folder: Path,
        evaluation_source: BatchSource | None = None,
        progress: ProgressCallback | None = None,
        *,
        report: Callable[[Row], object] | None = None,
        ranks: Ranks | None = None,
        rebuild: Callable[[], Task] | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.device = self.ranks.device
        self.settings, self.train = settings, settings.train
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.source, self.evaluation_source = source, evaluation_source
        self._progress, self._report, self._rebuild = progress, report, rebuild
        self.task = task.to(self.device)
        self._frozen = checkpoints.frozen_fingerprint(task)
        self._check_parallel()
        if self.train.compile:
            for module in self.task.heavy_modules():
                module.compile()
        self._module = parallelize(self.task, settings.parallel.kind, self.ranks)
        self.parameters = checkpoints.trained_parameters(self.task)
        if not self.parameters:
            raise InputError("no parameter of the task is trained; unfreeze one, or add adapters")
        self.optimizers = build_optimizers(self.parameters, settings.optimizer)
        self._rates = [(group, group["lr"]) for o in self.optimizers.all for group in o.param_groups]
        self._factor = learning_rate_factor(settings.schedule, self.train.steps)
        self.average = WeightAverage(self._weights(), self.train.ema) if self.train.ema else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.train.precision == "float16")
        self._generator = torch.Generator(self.device)
        self.step = 0
        self._best: tuple[float, int] | None = None
        self._stale_evaluations = 0
        self._seconds = 0.0
        self._interval = _Interval()
        # What asked to stop, of which the last in _STOPS counts; a signal's handler does no more than add to it.
        self._asked: list[str | None] = [None]
        self._stop: str | None = None
        self._cancelled: CancelledError | None = None

    def _check_parallel(self) -> None:
        if self.ranks.world_size == 1 or self.settings.parallel.kind == "ddp":
            return
        if self.train.compile:
            raise InputError(
                "parallel.kind is fsdp, whose hooks torch.compile would run around; leave train.compile out"
            )
        if self.train.precision == "float16":
            raise InputError("parallel.kind is fsdp, which does not scale losses for float16; use bfloat16, or ddp")
        if self.settings.optimizer.kind == "shampoo":
            raise InputError("parallel.kind is fsdp, and Shampoo needs whole gradients; use ddp, or another optimizer")

    def run(self, resume: bool = False) -> TrainingResult:
        """Trains to the last step, or until SIGINT or SIGTERM asks to stop, and saves.

        With ``resume`` it goes on from the last checkpoint in the folder, if there is one. Raises InputError where
        there is one without ``resume``, TrainingError where the loss or a gradient is not finite, CancelledError
        where a callback asked to stop (there is a checkpoint then), OutputError.
        """
        self._begin(resume)
        log = None
        if self.ranks.is_first:
            log = RunLog(self.folder, self.train, self.step, list(self.task.measures(1.0)), self._report)
        row: dict[str, float] = {}
        try:
            with self._signals():
                row = self._steps(log)
        finally:
            if log is not None:
                log.close()
        if self._stop is None or self._stop == "patience":
            self._publish()
        best = self._best[1] if self._best else None
        return TrainingResult(self.step, row.get("loss"), row.get("evaluation_loss"), best, self._stop, self._skipped)

    def _steps(self, log: RunLog | None) -> dict[str, float]:
        """All steps that are left; returns the last row of the log."""
        steps = self.train.steps
        progress = Progress(self._progress, "training", max(0, steps - self.step), "steps")
        batches = _Endless(self.source)
        row: dict[str, float] = {}
        self.task.train()
        begun = time.monotonic() - self._seconds
        while self.step < steps and self._stop is None:
            self._interval.add(*self._update(batches))
            self._seconds = time.monotonic() - begun
            evaluation = self._evaluate_if_due()
            if evaluation or self.step % self.train.log_every == 0 or self.step == steps:
                row = {"step": self.step, **self._interval.row(self.task.unit, self._seconds)}
                if self.settings.data.get("skip_bad"):
                    row["skipped"] = self._skipped
                row |= evaluation
                self._interval = _Interval()
                if log is not None:
                    log.write(row)
            self._advance(progress)
            # One rank that stops stops all. What is asked after this is seen in the next step.
            self._stop = _STOPS[int(self.ranks.max([max(map(_STOPS.index, self._asked))])[0])]
            if self.step % self.train.checkpoint_every == 0 or self.step == steps or self._stop:
                self._save_checkpoint(log)
        if self._stop == "cancelled":
            raise self._cancelled or CancelledError(f"training: cancelled after {self.step} of {steps} steps")
        return row

    @property
    def _skipped(self) -> int:
        """Damaged records that this rank left out."""
        return getattr(self.source, "skipped", 0)

    def _advance(self, progress: Progress) -> None:
        try:
            progress.advance(1)
        except CancelledError as error:
            self._cancelled = error
            self._asked.append("cancelled")

    # One update

    def _update(self, batches: _Endless) -> tuple[dict[str, float], int]:
        """One step: the loss of ``accumulate`` micro-batches of every rank, and one update of the weights.

        Returns what the log says of it and the number of the task's units.
        """
        micro_batches = [next(batches) for _ in range(self.train.accumulate)]
        # Counted before they go to the device: reading from it would wait for it.
        weight, units = self._counted(micro_batches, batches.epochs)
        if weight == 0:
            raise TrainingError(f"step {self.step + 1}: nothing in its batches is predicted; check the data's masks")
        micro_batches = [self._on_device(batch) for batch in micro_batches]
        for group, rate in self._rates:
            group["lr"] = rate * self._factor(self.step)
        measured = [self._backward(batch, i, self.ranks.world_size / weight) for i, batch in enumerate(micro_batches)]
        for optimizer in self.optimizers.all:
            self.scaler.unscale_(optimizer)
        norm = self._gradient_norm()
        losses, norm_value = self._read(measured, norm, weight)
        self._check_finite(losses["loss"], norm_value, micro_batches)
        if self.train.clip is not None and norm_value > self.train.clip:
            gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, self.train.clip / norm_value)
        for optimizer in self.optimizers.all:
            self.scaler.step(optimizer)
        self.scaler.update()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.average is not None:
            self.average.update()
        self.step += 1
        return {**losses, "learning_rate": self._rates[0][0]["lr"], "gradient_norm": norm_value}, int(units)

    def _counted(self, micro_batches: list[Batch], epochs: int) -> tuple[float, float]:
        """The weight and the units of the step over all ranks. Raises TrainingError where the ranks fell apart."""
        weight, units = (float(sum(map(count, micro_batches))) for count in (self.task.weight, self.task.units))
        weight, units, total, squares = self.ranks.sum([weight, units, epochs, epochs**2])
        if squares * self.ranks.world_size != total**2:  # the mean of squares is the square of the mean only if equal
            raise TrainingError(
                f"step {self.step + 1}: rank {self.ranks.rank} has come to the end of {epochs} epochs, others to that "
                "of more or fewer: their shards have unequal numbers of batches. Give every rank as many"
            )
        return weight, units

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _losses(self, batch: Batch, kind: int, step: int, index: int) -> Losses:
        """The task's loss, its generator seeded with the seed of the first example: one more for each that follows.

        Examples count from the first of the step, over micro-batches and ranks, however the step is divided into them.
        """
        data = self.settings.evaluation_data if kind == _EVALUATION else self.settings.data
        size = (data or {}).get("batch_size", len(next(iter(batch.values()))))
        first = (index * self.ranks.world_size + self.ranks.rank) * size
        self._generator.manual_seed(_seed(self.settings.seed, kind, step) + first)
        dtype = _DTYPES.get(self.train.precision)
        precision = torch.autocast(self.device.type, dtype=dtype) if dtype is not None else nullcontext()
        with precision:
            losses: Losses = self._module(batch, self._generator)
        return losses

    def _backward(self, batch: Batch, index: int, scale: float) -> Losses:
        """Adds the gradients of one micro-batch; returns its losses without their graphs."""
        set_gradient_sync(self._module, index == self.train.accumulate - 1)
        losses = self._losses(batch, _TRAINING, self.step, index)
        self.scaler.scale(losses.total * scale).backward()
        return Losses(losses.total.detach(), {name: part.detach() for name, part in losses.parts.items()})

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return whole(torch.nn.utils.get_total_norm(gradients))

    def _read(self, measured: list[Losses], norm: torch.Tensor, weight: float) -> tuple[dict[str, float], float]:
        """The step's mean loss, its parts, and the norm, read from the device at once: reading waits for it."""
        names = list(measured[0].parts)
        rows = [torch.stack([m.total, *(m.parts[name] for name in names)]).float() for m in measured]
        *sums, norm_value = torch.cat([torch.stack(rows).sum(0), norm.float().reshape(1)]).tolist()
        means = [value / weight for value in self.ranks.sum(sums)]
        return dict(zip(["loss", *names], means, strict=True)), norm_value

    def _check_finite(self, loss: float, norm: float, micro_batches: list[Batch]) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        if math.isfinite(loss) and self.scaler.is_enabled() and self.scaler.get_scale() > _SMALLEST_LOSS_SCALE:
            return  # the scale of the loss is too large: the update is left out and the scale halved
        for parameter in self.parameters.values():
            parameter.grad = None

        def replay(index: int) -> torch.Tensor:
            return self._losses(micro_batches[index], _TRAINING, self.step, index).total

        with torch.compiler.set_stance("force_eager"):  # compiled modules call no hooks of modules within them
            found = explain_not_finite(self.task, micro_batches, replay)
        where = "; ".join(dict.fromkeys(text for text in self.ranks.gather(found) if text))
        what = "the gradient" if math.isfinite(loss) else f"the loss is {loss}, which"
        raise TrainingError(
            f"step {self.step + 1}: {what} is not finite: {where or 'it was finite when it was computed again'}; "
            f"{self._kept()}. Lower the learning rate, clip gradients, or look at the data"
        )

    def _kept(self) -> str:
        last = checkpoints.saved_steps(self.checkpoints)
        return f"the checkpoint of step {last[-1]} is kept" if last else "there is no checkpoint yet"

    # Evaluation

    def _evaluate_if_due(self) -> dict[str, float]:
        every = self.train.evaluate_every
        if self.evaluation_source is None or every is None:
            return {}
        if self.step % every and self.step != self.train.steps:
            return {}
        result = self._evaluate(self.evaluation_source)
        loss = result["evaluation_loss"]
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {self.step}: the evaluation's loss is {loss}, which is not finite; {self._kept()}. Lower the "
                "learning rate, clip gradients, or look at the evaluation's data"
            )
        if self._best is None or loss < self._best[0]:
            self._best, self._stale_evaluations = (loss, self.step), 0
            self._save_best()
        else:
            self._stale_evaluations += 1
            if self.train.patience is not None and self._stale_evaluations >= self.train.patience:
                self._asked.append("patience")
        return result

    @torch.no_grad()
    def _evaluate(self, source: BatchSource) -> dict[str, float]:
        """The mean loss over an epoch of ``source`` with the averaged weights; the same batches and noise each time."""
        start = source.state_dict()
        sums: list[float] = []
        weight = 0
        names: list[str] = []
        self.task.eval()
        averaged = self.average.applied() if self.average is not None else nullcontext()
        devices = [self.device] if self.device.type == "cuda" else []
        with averaged, torch.random.fork_rng(devices):
            for i, batch in enumerate(source):
                if i == self.train.evaluation_batches:
                    break
                weight += self.task.weight(batch)
                losses = self._losses(self._on_device(batch), _EVALUATION, 0, i)
                names = list(losses.parts)
                values = torch.stack([losses.total, *losses.parts.values()]).double().tolist()
                sums = [a + b for a, b in zip(sums or [0.0] * len(values), values, strict=True)]
            reshard(self._module)
        self.task.train()
        source.load_state_dict(start)
        *sums, total = self.ranks.sum([*sums, float(weight)])
        if total == 0:
            raise InputError("the evaluation data holds nothing that is predicted; check its files and masks")
        means = [value / total for value in sums]
        result = dict(zip(["loss", *names], means, strict=True)) | self.task.measures(means[0])
        return {f"evaluation_{name}": value for name, value in result.items()}

    # Saving

    def _save_checkpoint(self, log: RunLog | None) -> None:
        """Writes the checkpoint of this step and removes old ones. All ranks have to call it."""
        if log is not None:
            log.sync()
        optimizer, optimizer_values = self.optimizers.state()
        tensors: dict[str, Mapping[str, torch.Tensor]] = {"weights": self._weights(), "optimizer": optimizer}
        if self.average is not None:
            tensors["average"] = self.average.weights
        random_tensors, random_values = checkpoints.random_state()
        everyone = self.ranks.gather((random_values, random_tensors))
        for rank, (_, generators) in enumerate(everyone):
            tensors[f"random-{rank}"] = generators
        state = {
            "step": self.step,
            "seconds": self._seconds,
            "world_size": self.ranks.world_size,
            "recipe": json.loads(self.settings.model_dump_json()),
            "fingerprint": self.source.fingerprint,
            "frozen": self._frozen,
            # The same on every rank: a place in the order that all ranks go over together.
            "data": self.source.state_dict(),
            "random": [values for values, _ in everyone],
            "optimizer": optimizer_values,
            "average_updates": self.average.updates if self.average is not None else 0,
            "scaler": self.scaler.state_dict(),
            "interval": [self._interval.steps, self._interval.sums],
            "best": self._best,
            "stale_evaluations": self._stale_evaluations,
        }
        folder = checkpoints.checkpoint_folder(self.checkpoints, self.step)
        checkpoints.write_checkpoint(folder, tensors, state, self.ranks.is_first)
        if self.ranks.is_first:
            checkpoints.prune(self.checkpoints, self.train.keep)
        if log is not None:
            log.plot()
        self.ranks.barrier()

    def _weights(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **checkpoints.saved_buffers(self.task)}

    def _published_weights(self) -> dict[str, torch.Tensor]:
        """Those that are published: the average where there is one."""
        return self._weights() | (self.average.weights if self.average is not None else {})

    def _save_best(self) -> None:
        state = {"step": self.step, "best": self._best}
        folder = self.checkpoints / "best"
        checkpoints.write_checkpoint(folder, {"weights": self._published_weights()}, state, self.ranks.is_first)

    def _publish(self) -> None:
        """Writes the model into ``model/``, and the one with the best evaluation into ``best/``, from checkpoints."""
        if self.ranks.is_first:
            task = self.task
            if self.ranks.world_size > 1 and self.settings.parallel.kind == "fsdp":
                assert self._rebuild is not None, "a sharded task is saved through another, whole on this rank"
                task = self._rebuild()
            last, best = checkpoints.checkpoint_folder(self.checkpoints, self.step), self.checkpoints / "best"
            weights = checkpoints.read_tensors(last, "weights")
            average = checkpoints.read_tensors(last, "average") if self.average is not None else {}
            self._save_model(task, weights | average, "model")
            if self._best is not None:
                self._save_model(task, checkpoints.read_tensors(best, "weights"), "best")
            checkpoints.load_weights(task, weights, last)
        self.ranks.barrier()

    def _save_model(self, task: Task, weights: Mapping[str, torch.Tensor], name: str) -> None:
        checkpoints.load_weights(task, weights, self.folder / name)
        task.eval()
        with replaced_folder(self.folder / name) as partial:
            task.save(partial)

    # Going on

    def _begin(self, resume: bool) -> None:
        steps = checkpoints.saved_steps(self.checkpoints)
        # Not with the recipe's seed itself: all ranks would drop the same activations.
        seed_everything(_seed(self.settings.seed, _RANK, self.ranks.rank))
        if steps and not resume:
            raise InputError(
                f"{self.folder}: holds a run with checkpoints, the last of step {steps[-1]}; go on with --resume, or "
                "train into another folder"
            )
        self._check_evaluation_data()
        if self.ranks.is_first:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"{self.folder}: cannot take a run ({error.strerror}); name a folder that can be written"
                ) from error
            for left in self.checkpoints.glob(".*"):  # what a killed run left half written or half removed
                shutil.rmtree(left, ignore_errors=True)
        if steps:
            folder = checkpoints.checkpoint_folder(self.checkpoints, steps[-1])
            with checkpoints.refused_state(folder):
                self._load_checkpoint(folder)

    def _check_evaluation_data(self) -> None:
        """Makes a batch of it before the first step: what cannot be evaluated on must not cost steps."""
        source = self.evaluation_source
        if source is None or self.train.evaluate_every is None:
            return
        start = source.state_dict()
        batch = next(iter(source), None)
        if batch is not None:
            self.task.weight(batch)
        source.load_state_dict(start)

    def _load_checkpoint(self, folder: Path) -> None:
        state = checkpoints.read_state(folder, _STATE)
        check_same_recipe(state["recipe"], state["world_size"], self.settings, self.ranks.world_size, folder)
        if state["frozen"] != self._frozen:
            raise CheckpointError(
                f"{folder}: was trained with other weights in the part of the model that is not trained; put the "
                "files that the recipe names back, or train into another folder"
            )
        if state["fingerprint"] != self.source.fingerprint:
            raise CheckpointError(
                f"{folder}: was trained on other data (fingerprint {state['fingerprint']}, now "
                f"{self.source.fingerprint}); put the files back, or train into another folder"
            )
        checkpoints.load_weights(self.task, checkpoints.read_tensors(folder, "weights"), folder)
        self.optimizers.load_state(checkpoints.read_tensors(folder, "optimizer"), state["optimizer"])
        if self.average is not None:
            self.average.load(checkpoints.read_tensors(folder, "average"), state["average_updates"])
        self.scaler.load_state_dict(state["scaler"])
        self.source.load_state_dict(state["data"])
        if self.ranks.rank < state["world_size"]:
            tensors = checkpoints.read_tensors(folder, f"random-{self.ranks.rank}")
            checkpoints.set_random_state(tensors, state["random"][self.ranks.rank])
        self.step, self._seconds = state["step"], state["seconds"]
        self._interval = _Interval(*state["interval"])
        # Where its folder was moved away, or other ranks evaluate other examples, the next evaluation is the best.
        comparable = state["world_size"] == self.ranks.world_size
        if state["best"] and comparable and (self.checkpoints / "best").is_dir():
            self._best = tuple(state["best"])
        self._stale_evaluations = state["stale_evaluations"] if comparable else 0

    # Being asked to stop

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM end the run after its step; a second one ends it as it would have at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, _: object) -> None:
            self._asked.append(signal.Signals(number).name)
            for each, handler in earlier.items():
                signal.signal(each, handler)

        for number in earlier:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)


def seed_everything(seed: int) -> None:
    """Seeds the generators of torch, NumPy and Python, which initialize weights and drop activations."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _seed(seed: int, *what_for: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=what_for).generate_state(1, np.uint64)[0] >> 1)


class _Endless:
    """The batches of ``source``, epoch after epoch. Raises InputError where it has none."""

    def __init__(self, source: BatchSource) -> None:
        self.epochs = 0
        self._source = source
        self._iterator = iter(source)

    def __next__(self) -> Batch:
        for _ in range(2):  # a cursor may stand at the end of its epoch
            batch = next(self._iterator, None)
            if batch is not None:
                return batch
            self.epochs += 1
            self._iterator = iter(self._source)
        batch = next(self._iterator, None)
        if batch is None:
            raise InputError("the training data holds no batch; check its files, or take a smaller batch size")
        return batch


class _Interval:
    """The steps since the last row of the log, of which a run that goes on has some from before."""

    def __init__(self, steps: int = 0, sums: Mapping[str, float] | None = None) -> None:
        self.steps, self.sums = steps, dict(sums or {})
        self._learning_rate = 0.0
        self._units = 0
        self._begun = time.monotonic()

    def add(self, row: Mapping[str, float], units: int) -> None:
        self.steps += 1
        for name, value in row.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self._learning_rate = row["learning_rate"]
        self._units += units

    def row(self, unit: str, seconds: float) -> dict[str, float]:
        """Means of losses and norms, the last learning rate, units a second."""
        result = {name: value / self.steps for name, value in self.sums.items()}
        result["learning_rate"] = self._learning_rate
        result[f"{unit}_per_second"] = self._units / max(1e-9, time.monotonic() - self._begun)
        result["seconds"] = seconds
        return result
