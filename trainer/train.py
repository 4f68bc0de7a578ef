"""``intaglio train``: from a recipe to a trained model."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.errors import ConfigError
from intaglio.progress import ProgressCallback
from intaglio.trainer.logs import Row
from intaglio.trainer.loop import Trainer, TrainingResult, seed_everything
from intaglio.trainer.parallel import Ranks, started_ranks
from intaglio.trainer.recipe import Recipe, checked, read_recipe
from intaglio.trainer.tasks.task import Task

if TYPE_CHECKING:
    from intaglio.trainer.data.loader import Loader
    from intaglio.trainer.data.settings import DataSettings

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
        check_lengths(settings, task)
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
    rules, lora = None, None
    # Read before the model, which may be large.
    if settings.quantization:
        from intaglio.trainer.quantization import QuantizationSettings, quantize_linears

        tables = enumerate(settings.quantization)
        rules = [checked(QuantizationSettings, t, "[[quantization]]", f"quantization.{i}.").rule for i, t in tables]
    if settings.lora is not None:
        from intaglio.trainer.lora import LoraSettings
        from intaglio.trainer.tasks.adapted import AdaptedTask

        lora = checked(LoraSettings, settings.lora, "[lora]", "lora.")
    module = importlib.import_module(f"intaglio.trainer.tasks.{TASKS[kind]}")
    task: Task = module.build_task(settings.task, settings.model, root=root, tokenizer=tokenizer_folder(settings, root))
    if rules is not None:
        quantize_linears(task, rules)
    return task if lora is None else AdaptedTask(task, lora)


def check_lengths(settings: Recipe, task: Task) -> None:
    """Raises ConfigError where examples have more tokens than the model that reads them has positions for."""
    from intaglio.trainer.data.settings import token_length

    module = getattr(task, "task", task)  # what has an adapter
    readers = (getattr(getattr(module, name, None), "config", None) for name in ("model", "text_encoder"))
    limit = next((config.max_position_embeddings for config in readers if config is not None), None)
    for name, table in _data_tables(settings).items():
        found = token_length(table)
        if limit is not None and found is not None and found[1] > limit:
            key, length = found
            raise ConfigError(
                f"{name}.{key} is {length}; expected at most the model's max_position_embeddings, which is {limit}"
            )


def _data_tables(settings: Recipe) -> dict[str, DataSettings]:
    from intaglio.trainer.data.settings import parse_settings

    tables = {"data": settings.data, "evaluation_data": settings.evaluation_data}
    return {name: parse_settings(table, name) for name, table in tables.items() if table is not None}


def tokenizer_folder(settings: Recipe, root: Path) -> Path | None:
    """The folder of the recipe's tokenizer: the one it names, else the model's own, if it has one.

    Raises ConfigError where the one that it names has no ``tokenizer.json``.
    """
    from intaglio.trainer.data.text import check_tokenizer

    if settings.tokenizer is not None:
        check_tokenizer(root / settings.tokenizer)
        return root / settings.tokenizer
    path = settings.model.get("path")
    return root / path if isinstance(path, str) and (root / path / "tokenizer.json").is_file() else None


def build_sources(settings: Recipe, root: Path, ranks: Ranks) -> tuple[Loader, Loader | None]:
    """This rank's batches to train on, and those to evaluate on, if the recipe has any."""
    from intaglio.trainer.data.settings import build_source, needs_tokenizer
    from intaglio.trainer.data.text import open_tokenizer

    tables = _data_tables(settings)
    folder = tokenizer_folder(settings, root)
    path = settings.model.get("path")
    if folder is None and isinstance(path, str) and any(map(needs_tokenizer, tables.values())):
        folder = root / path  # opening it says what it has instead
    tokenizer = open_tokenizer(folder) if folder is not None else None

    def build(table: DataSettings) -> Loader:
        source = build_source(table, seed=settings.seed, root=root, tokenizer=tokenizer)
        return source.shard(ranks.rank, ranks.world_size) if ranks.world_size > 1 else source

    evaluation = tables.get("evaluation_data")
    return build(tables["data"]), None if evaluation is None else build(evaluation)
