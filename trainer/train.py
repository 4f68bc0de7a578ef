"""``intaglio train``: from a recipe to a trained model."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.errors import ConfigError, InputError
from intaglio.progress import ProgressCallback
from intaglio.trainer.logs import Row
from intaglio.trainer.loop import Trainer, TrainingResult, seed_everything
from intaglio.trainer.parallel import Ranks, started_ranks
from intaglio.trainer.recipe import Recipe, checked, read_recipe
from intaglio.trainer.tasks.task import Task

if TYPE_CHECKING:
    from intaglio.trainer.data.loader import Loader

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

    def build() -> Task:
        seed_everything(settings.seed)
        return build_task(settings, root)

    with started_ranks(settings.train.device) as ranks, contextlib.ExitStack() as stack:
        task = build()
        source, evaluation_source = build_sources(settings, root, ranks)
        for each in (source, evaluation_source):
            if each is not None:
                stack.callback(each.close)
        first = ranks.is_first
        trainer = Trainer(
            task,
            source,
            settings,
            folder,
            evaluation_source,
            progress if first else None,
            report=report if first else None,
            ranks=ranks,
            rebuild=build,
        )
        return trainer.run(resume)


def build_task(settings: Recipe, root: Path) -> Task:
    """The task of a recipe, quantized and with adapters where it says so."""
    kind = settings.task.get("kind")
    if kind not in TASKS:
        raise ConfigError(f"task.kind is {kind!r}; expected one of {', '.join(TASKS)}")
    module = importlib.import_module(f"intaglio.trainer.tasks.{TASKS[kind]}")
    task: Task = module.build_task(settings.task, settings.model, root=root, tokenizer=tokenizer_folder(settings, root))
    if settings.quantization:
        from intaglio.trainer.quantization import QuantizationSettings, quantize_linears

        tables = [
            checked(QuantizationSettings, table, "quantization", "quantization.") for table in settings.quantization
        ]
        quantize_linears(task, [table.rule for table in tables])
    if settings.lora is not None:
        from intaglio.trainer.lora import LoraSettings
        from intaglio.trainer.tasks.adapted import AdaptedTask

        task = AdaptedTask(task, checked(LoraSettings, settings.lora, "lora", "lora."))
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


def build_sources(settings: Recipe, root: Path, ranks: Ranks) -> tuple[Loader, Loader | None]:
    """This rank's batches to train on, and those to evaluate on, if the recipe has any."""
    from intaglio.trainer.data.settings import build_source, parse_settings
    from intaglio.trainer.data.text import open_tokenizer

    folder = tokenizer_folder(settings, root)
    tokenizer = open_tokenizer(folder) if folder is not None else None

    def build(table: dict[str, Any], name: str) -> Loader:
        source = build_source(parse_settings(table, name), seed=settings.seed, root=root, tokenizer=tokenizer)
        return source.shard(ranks.rank, ranks.world_size) if ranks.world_size > 1 else source

    evaluation = settings.evaluation_data
    return build(settings.data, "data"), None if evaluation is None else build(evaluation, "evaluation_data")
