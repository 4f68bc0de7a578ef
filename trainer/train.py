"""``intaglio train``: from a recipe to a trained model."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intaglio.errors import ConfigError, InputError
from intaglio.progress import ProgressCallback
from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.logs import Row
from intaglio.trainer.loop import Trainer, TrainingResult
from intaglio.trainer.parallel import Ranks
from intaglio.trainer.recipe import Recipe, read_recipe
from intaglio.trainer.tasks.task import Task

# What `task.kind` may say: the modules in tasks/, each with a function build_task.
TASKS = {"causal-lm": "causal_lm", "flow-matching": "flow_matching", "autoencoder": "autoencoder"}


def train(
    recipe: str | Path,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    report: Callable[[Row], object] | None = None,
) -> TrainingResult:
    """Trains what ``recipe`` says into ``output`` (``runs/`` and the recipe's name): checkpoints, log, model.

    Paths in the recipe are relative to its folder. ``overrides`` are ``table.key=VALUE``; ``report`` gets every row of
    the log. Raises the errors of ``Trainer.run``, and ConfigError for what the recipe says.
    """
    path = Path(recipe)
    settings = read_recipe(path, overrides)
    folder = Path(output) if output is not None else Path("runs") / path.stem
    root = path.parent
    device = _device(settings.train.device)
    seed_everything(settings.seed)
    task = build_task(settings, root)
    source, evaluation_source = build_sources(settings, root)
    trainer = Trainer(
        task, source, settings, folder, evaluation_source, progress, report=report, ranks=Ranks(device=device)
    )
    return trainer.run(resume)


def seed_everything(seed: int) -> None:
    """Seeds the generators of torch, NumPy and Python, which initialize weights and drop activations."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def build_task(settings: Recipe, root: Path) -> Task:
    """The task of a recipe, quantized and with adapters where it says so."""
    kind = settings.task.get("kind")
    if kind not in TASKS:
        raise ConfigError(f"task.kind is {kind!r}; expected one of {', '.join(TASKS)}")
    module = importlib.import_module(f"intaglio.trainer.tasks.{TASKS[kind]}")
    task: Task = module.build_task(settings.task, settings.model, root=root, tokenizer=tokenizer_folder(settings, root))
    if settings.quantization:
        from intaglio.trainer.quantization import quantize_linears

        quantize_linears(task, settings.quantization)
    return task


def tokenizer_folder(settings: Recipe, root: Path) -> Path | None:
    """The folder of the recipe's tokenizer: the one it names, else the model's own, if it has one."""
    if settings.tokenizer is not None:
        folder = root / settings.tokenizer
        if not (folder / "tokenizer.json").is_file():
            raise InputError(f"{folder}: has no tokenizer.json; tokenizer names a folder with one")
        return folder
    path = settings.model.get("path")
    return root / path if isinstance(path, str) and (root / path / "tokenizer.json").is_file() else None


def build_sources(settings: Recipe, root: Path) -> tuple[Any, Any]:
    """The batches to train on, and those to evaluate on, if the recipe has any."""
    from intaglio.trainer.data.settings import build_source

    folder = tokenizer_folder(settings, root)
    tokenizer = Tokenizer(folder) if folder is not None else None
    source = build_source(settings.data, root=root, seed=settings.seed, tokenizer=tokenizer)
    if settings.evaluation_data is None:
        return source, None
    return source, build_source(settings.evaluation_data, root=root, seed=settings.seed, tokenizer=tokenizer)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, but torch finds no such device; use auto or cpu")
    return torch.device(name)
