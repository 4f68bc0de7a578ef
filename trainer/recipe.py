"""Recipes: TOML files that say what is trained, on what, and how."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from intaglio.errors import ConfigError, InputError
from intaglio.trainer.optimizers import OptimizerSettings
from intaglio.trainer.parallel import ParallelKind
from intaglio.trainer.schedules import ScheduleSettings

Settings = TypeVar("Settings", bound=BaseModel)


class TrainSettings(BaseModel):
    """``[train]``: the loop. Steps are updates of the weights; ``accumulate`` batches are summed for each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(ge=1)
    accumulate: int = Field(default=1, ge=1)
    clip: float | None = Field(default=1.0, gt=0.0)
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    ema: float | None = Field(default=None, gt=0.0, lt=1.0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # The models go through torch.compile: minutes before the first step, then fewer seconds a step.
    compile: bool = False
    log_every: int = Field(default=10, ge=1)
    checkpoint_every: int = Field(default=500, ge=1)
    keep: int = Field(default=2, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    evaluation_batches: int | None = Field(default=None, ge=1)
    # Evaluations without a better loss after which the run ends.
    patience: int | None = Field(default=None, ge=1)
    tensorboard: bool = False
    plot: bool = True


class ParallelSettings(BaseModel):
    """``[parallel]``: how ranks that torchrun started share the work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: ParallelKind = "ddp"


class Recipe(BaseModel):
    """A whole recipe. What ``task``, ``model``, data, quantization and LoRA hold is checked by those who build them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, lt=1 << 63)
    # A folder with tokenizer.json, for data that is text.
    tokenizer: str | None = None
    task: dict[str, Any]
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any]
    evaluation_data: dict[str, Any] | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    train: TrainSettings
    quantization: list[dict[str, Any]] = Field(default_factory=list)
    lora: dict[str, Any] | None = None
    parallel: ParallelSettings = ParallelSettings()


# What may change between a checkpoint and the run that goes on from it: the length, and what leaves weights alone.
CHANGEABLE = (
    "train.steps",
    # The examples of a step stay as many, which is checked beside.
    "train.accumulate",
    "data.batch_size",
    "train.device",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep",
    "train.evaluate_every",
    "train.evaluation_batches",
    "train.patience",
    "train.tensorboard",
    "train.plot",
    "evaluation_data",
    "parallel",
    "data.workers",
    # A run that met a damaged record goes on without it.
    "data.skip_bad",
)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``path``, with ``table.key=VALUE`` of ``overrides`` set (TOML values, or else text).

    Raises ConfigError naming file and key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file; name a recipe (recipes/*.toml are ready ones)") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error}); mend it") from error
    for text in overrides:
        _override(content, text)
    return checked(Recipe, content, str(path))


def checked(model: type[Settings], content: Any, source: str, prefix: str = "") -> Settings:
    """``content`` as ``model``. Raises ConfigError naming ``source`` and the key, for an unknown one the nearest."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        messages = [_message(model, entry, prefix) for entry in error.errors()]
        raise ConfigError(f"{source}: {'; '.join(messages)}") from error


def _message(model: type[BaseModel], entry: Any, prefix: str) -> str:
    key = prefix + ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "missing":
        return f"{key} is missing"
    if entry["type"] != "extra_forbidden":
        return f"{key}: {entry['msg'][:1].lower()}{entry['msg'][1:]}, found {_shown(entry['input'])}"
    known = _fields_at(model, entry["loc"][:-1])
    near = difflib.get_close_matches(str(entry["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"{key} is unknown; {hint}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The names of the fields of the settings that lie at ``location`` in ``model``."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:  # the tag of a union
            continue
        current = next(iter(_models_in(field.annotation)), None)
    return list(getattr(current, "model_fields", {}))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"--set {text!r}: expected TABLE.KEY=VALUE, such as train.steps=100")
    table: Any = content
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {text!r}: {part} is no table in the recipe")
    try:
        table[path[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[path[-1]] = value.strip()


def check_same_recipe(
    saved: Mapping[str, Any], saved_world_size: int, recipe: Recipe, world_size: int, source: Path
) -> None:
    """Raises ConfigError naming the first key in which ``recipe`` may not differ from the checkpoint's, but does.

    Batch size, accumulation and number of ranks may change where a step still has as many examples.
    """
    ours = _flat(json.loads(recipe.model_dump_json()))
    theirs = _flat(saved)
    for key in sorted(ours.keys() | theirs.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE):
            continue
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"{source}: was written with {key} = {theirs.get(key)!r}, the recipe says {ours.get(key)!r}; set it "
                "back, or train into another folder"
            )
    before = (saved["data"].get("batch_size", 1), saved["train"]["accumulate"], saved_world_size)
    now = (recipe.data.get("batch_size", 1), recipe.train.accumulate, world_size)
    if math.prod(before) != math.prod(now):
        raise ConfigError(
            f"{source}: a step had {_product(before)} examples (data.batch_size x train.accumulate x ranks), now "
            f"{_product(now)}; set one of them so that there are {math.prod(before)} again"
        )


def _product(factors: Sequence[int]) -> str:
    return f"{math.prod(factors)} = {' x '.join(map(str, factors))}"


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(content, Mapping):
        items: Any = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    else:
        return {prefix: content}
    return {
        name: value
        for key, item in items
        for name, value in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }
