"""Recipes: TOML files that say what is trained, on what, and how."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from intaglio.errors import ConfigError, InputError
from intaglio.trainer.optimizers import OptimizerSettings
from intaglio.trainer.parallel import ParallelKind
from intaglio.trainer.schedules import ScheduleSettings

Settings = TypeVar("Settings")


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

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.schedule.warmup > self.train.steps:
            raise ValueError(
                f"schedule.warmup is {self.schedule.warmup}; expected at most train.steps, which is {self.train.steps}"
            )
        if self.lora is None:
            return self
        if self.quantization:
            raise ValueError(
                "[lora] beside [[quantization]]: the adapter is saved, and the quantized model that it belongs to is "
                "not. Train that first without [lora], then name its folder as model.path without [[quantization]]"
            )
        if fresh := self._fresh_models():
            raise ValueError(
                f"[lora] on fresh weights: the adapter is saved, and {fresh[0]}, which it belongs to, is not. Give "
                f"{fresh[0]}.path, the folder of a saved model, or leave [lora] out"
            )
        return self

    def _fresh_models(self) -> list[str]:
        """The tables of models that do not come from a folder."""
        several = self.task.get("kind") == "flow-matching"
        tables = {f"model.{name}": table for name, table in self.model.items()} if several else {"model": self.model}
        return [name for name, table in tables.items() if not (isinstance(table, Mapping) and "path" in table)]


# What may change between a checkpoint and the run that goes on from it: the length, and what leaves weights alone.
CHANGEABLE = (
    "train.steps",
    # The examples of a step stay as many, which is checked beside.
    "train.accumulate",
    "data.batch_size",
    "train.device",
    "train.compile",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep",
    "train.evaluate_every",
    "train.patience",
    "train.tensorboard",
    "train.plot",
    "parallel",
    "data.workers",
    "evaluation_data.workers",
    # A run that met a damaged record goes on without it.
    "data.skip_bad",
    "evaluation_data.skip_bad",
)
# By the kind of an error of pydantic.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table"),
    "finite_number": "a finite number",
    "string_type": "text",
}
# What the best evaluation so far was made on. A run that had none may get one.
_EVALUATION = ("evaluation_data", "train.evaluation_batches")


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


def checked(kind: type[Settings], content: Any, source: str, prefix: str = "") -> Settings:
    """``content`` as ``kind``: settings, or a union of them that is told by a key.

    Raises ConfigError naming ``source``, and each key with what was found and expected, for an unknown one the nearest.
    """
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_messages(kind, error, prefix))}") from error


def _messages(kind: Any, error: ValidationError, prefix: str) -> list[str]:
    # What is found, and what is expected by each kind that it might be of.
    found: dict[str, list[str]] = {}
    for entry in error.errors():
        is_unknown = entry["type"] == "extra_forbidden"
        place, models = _place(kind, entry["loc"][:-1] if is_unknown else entry["loc"])
        if is_unknown:
            place.append(str(entry["loc"][-1]))
        key = f"{prefix}{'.'.join(place)}".rstrip(".")
        context = entry.get("ctx", {})
        match entry["type"]:
            case "missing":
                found[f"{key} is missing"] = []
            case "extra_forbidden":
                found[f"{key} is unknown; {_hint(place[-1], models)}"] = []
            case "value_error":
                found[f"{key}: {context['error']}" if key else str(context["error"])] = []
            case "union_tag_not_found" | "union_tag_invalid":
                name = context["discriminator"].strip("'")
                key = prefix + ".".join([*place, name])
                tags = [tag for model in models for tag in get_args(model.model_fields[name].annotation)]
                begin = f"{key} is {context['tag']!r}" if "tag" in context else f"{key} is missing"
                found[begin] = [f"one of {', '.join(map(repr, tags))}"]
            case "too_short" if len(entry["input"]) >= context["min_length"]:
                pass  # what it holds is wrong, and said
            case _:
                # The whole table has no name of its own.
                begin = f"{key or 'it'} is {_shown(entry['input'])}"
                found.setdefault(begin, []).append(_expected(entry["type"], context, entry["msg"]))
    return [f"{begin}; expected {' or '.join(dict.fromkeys(of))}" if of else begin for begin, of in found.items()]


def _place(kind: Any, location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """A place in ``kind`` as a recipe spells it, without branches of unions, and the settings that lie there."""
    place: list[str] = []
    models, annotation = _models_in(kind), kind
    for part in location:
        if len(models) > 1:
            models = [m for m in models if any(part in get_args(field.annotation) for field in m.model_fields.values())]
        elif isinstance(part, int):
            place.append(str(part))
        elif models and part in models[0].model_fields:
            place.append(part)
            annotation = models[0].model_fields[part].annotation
            models = _models_in(annotation)
        elif get_origin(annotation) is dict and part != "[key]":
            place.append(part)
    return place, models


def _hint(name: str, models: Sequence[type[BaseModel]]) -> str:
    known = [field for model in models for field in model.model_fields]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _expected(kind: str, limits: Mapping[str, Any], message: str) -> str:
    """What pydantic's error of ``kind`` expects, in the words of a recipe."""
    match kind:
        case "greater_than":
            return f"a number greater than {limits['gt']}"
        case "greater_than_equal":
            return f"a number of at least {limits['ge']}"
        case "less_than":
            return f"a number less than {limits['lt']}"
        case "less_than_equal":
            return f"a number of at most {limits['le']}"
        case "too_short":
            return f"at least {limits['min_length']} of them"
        case "too_long":
            return f"at most {limits['max_length']} of them"
        case "literal_error":
            return str(limits["expected"])
    message = message.removeprefix("Input should be ")
    return _EXPECTED.get(kind, f"{message[:1].lower()}{message[1:]}")


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

    Batch size, accumulation and number of ranks may change where a step still has as many examples, and evaluations may
    be added to a run without any.
    """
    ours = _flat(json.loads(recipe.model_dump_json()))
    theirs = _flat(saved)
    free = CHANGEABLE if saved.get("evaluation_data") is not None else (*CHANGEABLE, *_EVALUATION)
    for key in sorted(ours.keys() | theirs.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in free):
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
