"""Recipes: what is read, what is refused and how the message names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from intaglio.errors import ConfigError, InputError
from intaglio.trainer.data.settings import parse_settings
from intaglio.trainer.lora import LoraSettings
from intaglio.trainer.quantization import QuantizationSettings
from intaglio.trainer.recipe import Recipe, check_same_recipe, checked, read_recipe
from intaglio.trainer.train import build_task

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MINIMAL = '[task]\nkind = "causal-lm"\n[data]\nbatch_size = 4\n[train]\nsteps = 10\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "r.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    recipe = read_recipe(path)
    assert (recipe.train.steps, recipe.train.clip, recipe.optimizer.kind, recipe.schedule.kind) == (
        10,
        1.0,
        "adamw",
        "cosine",
    )
    changed = read_recipe(
        path, ["train.steps=25", "optimizer.kind=lion", 'data.name="x"', "model.path = a/b", "seed=4"]
    )
    assert (changed.train.steps, changed.optimizer.kind, changed.seed) == (25, "lion", 4)
    assert changed.data == {"batch_size": 4, "name": "x"} and changed.model == {"path": "a/b"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("stepz = 3", r"train\.stepz is unknown; did you mean steps\?"),
        ("clip = -1.0", r"train\.clip is -1\.0; expected a number greater than 0"),
        ('precision = "half"', r"train\.precision is 'half'; expected 'float32', 'bfloat16' or 'float16'"),
        ("plot = 3", r"train\.plot is 3; expected true or false"),
        ("log_every = 1.5", r"train\.log_every is 1\.5; expected a whole number"),
        ("[schedule]\nwarmup = 11", r"schedule\.warmup is 11; expected at most train\.steps, which is 10"),
        ("[optimiser]", r"optimiser is unknown; did you mean optimizer\?"),
        ("[[optimizer.groups]]\nmatch = ['a']\nlr_facter = 2", r"lr_facter is unknown; did you mean lr_factor\?"),
        ("[[optimizer.groups]]\nlr_factor = 2", r"optimizer\.groups\.0\.match is missing"),
        ("[optimizer]\nbetas = [0.9]", r"optimizer\.betas\.1 is missing"),
        ("[optimizer]\ngroups = [3]", r"optimizer\.groups\.0 is 3; expected a table"),
        ("[schedule]\nzzz = 1", r"schedule\.zzz is unknown; known are kind, warmup, final, decay"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe(written(tmp_path, MINIMAL + extra + "\n"))
    assert str(caught.value).startswith(str(tmp_path / "r.toml"))


def test_an_adapter_whose_base_would_not_be_saved(tmp_path: Path) -> None:
    """The rules are about [lora] only, and of a picture model about each of its parts."""
    lora = 'lora = { rank = 1, alpha = 1, target_modules = "all-linear" }\n'
    quantization = '[[quantization]]\nmodules = "*"\nformat = "ternary"\ngroup_size = 32\n'
    fresh, saved = '[model]\narchitecture = "llama"\n', '[model]\npath = "m"\n'
    for extra in (fresh + quantization, saved + quantization):
        assert read_recipe(written(tmp_path, MINIMAL + extra)).quantization
    assert read_recipe(written(tmp_path, lora + MINIMAL + saved)).lora
    with pytest.raises(ConfigError, match=r"r\.toml: \[lora\] beside \[\[quantization\]\]: .*Train that first"):
        read_recipe(written(tmp_path, lora + MINIMAL + saved + quantization))
    for model in ("", fresh):
        with pytest.raises(ConfigError, match=r"\[lora\] on fresh weights: .*Give model\.path"):
            read_recipe(written(tmp_path, lora + MINIMAL + model))
    painter = MINIMAL.replace("causal-lm", "flow-matching") + '[model.transformer]\npath = "a"\n[model.text_encoder]\n'
    with pytest.raises(ConfigError, match=r"Give model\.text_encoder\.path"):
        read_recipe(written(tmp_path, lora + painter))
    assert read_recipe(written(tmp_path, lora + painter + 'path = "b"\n')).lora


def test_evaluations_of_a_run_stay_comparable(tmp_path: Path) -> None:
    """The best so far is that of the same data. A run without evaluations may get them."""
    evaluation = '[evaluation_data]\nformat = "jsonl"\nworkers = 0\n'
    plain, evaluated = read_recipe(written(tmp_path, MINIMAL)), read_recipe(written(tmp_path, MINIMAL + evaluation))
    path = written(tmp_path, MINIMAL + evaluation)

    def resume(saved: Recipe, now: Recipe) -> None:
        check_same_recipe(json.loads(saved.model_dump_json()), 1, now, 1, tmp_path)

    resume(plain, evaluated)
    resume(plain, read_recipe(path, ["train.evaluation_batches=3"]))
    resume(evaluated, read_recipe(path, ["evaluation_data.workers=2", "train.evaluate_every=5", "train.steps=20"]))
    with pytest.raises(ConfigError, match=r"with train\.evaluation_batches = None, the recipe says 3; set it back"):
        resume(evaluated, read_recipe(path, ["train.evaluation_batches=3"]))
    with pytest.raises(ConfigError, match=r"with evaluation_data\.format = 'jsonl', the recipe says 'csv'"):
        resume(evaluated, read_recipe(path, ["evaluation_data.format=csv"]))
    with pytest.raises(ConfigError, match=r"with evaluation_data\.format = 'jsonl', the recipe says None"):
        resume(evaluated, plain)


def test_files_and_overrides_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_recipe(written(tmp_path, "[train"))
    path = written(tmp_path, MINIMAL)
    for text in ("train.steps", "=3", "train..steps=3"):
        with pytest.raises(InputError, match=r"expected TABLE\.KEY=VALUE"):
            read_recipe(path, [text])
    with pytest.raises(InputError, match="steps is no table"):
        read_recipe(path, ["train.steps.x=3"])
    with pytest.raises(ConfigError, match=r"train\.stps is unknown"):
        read_recipe(path, ["train.stps=3"])


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_ready_recipes_are_recipes(path: Path) -> None:
    """Every table holds what its reader takes, and language models of them can be built."""
    recipe = read_recipe(path)
    parse_settings(recipe.data)
    if recipe.evaluation_data is not None:
        parse_settings(recipe.evaluation_data)
    for table in recipe.quantization:
        checked(QuantizationSettings, table, str(path))
    if recipe.lora is not None:
        checked(LoraSettings, recipe.lora, str(path))
    if recipe.task["kind"] == "causal-lm" and "path" not in recipe.model:
        task = build_task(recipe.model_copy(update={"tokenizer": None}), path.parent)
        assert 5e6 < sum(parameter.numel() for parameter in task.parameters()) < 20e6
