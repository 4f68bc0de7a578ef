"""From a recipe to a model: text to a language model that transformers loads, adapters, quantized layers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import peft
import pytest
import tiny_painter
import torch
from safetensors.numpy import load_file
from training_data import texts, write_jsonl, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import intaglio
from intaglio.errors import CheckpointError, ConfigError, DataError, InputError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.trainer.checkpoint import saved_steps
from intaglio.trainer.logs import read_log
from intaglio.trainer.recipe import Recipe
from intaglio.trainer.tasks.flow_matching import build_task as build_flow_matching
from intaglio.trainer.train import check_lengths, train

RECIPE = """
seed = 4
tokenizer = "tokenizer"

[task]
kind = "causal-lm"

[model]
architecture = "llama"
vocab_size = 400
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
tie_word_embeddings = false

[data]
format = "jsonl"
files = ["train.jsonl"]
batch_size = 4
examples = { kind = "text", length = 24 }

[evaluation_data]
format = "jsonl"
files = ["held-out.jsonl"]
batch_size = 4
shuffle = false
examples = { kind = "text", length = 24 }

[optimizer]
lr = 0.01

[train]
steps = 12
ema = 0.5
log_every = 2
checkpoint_every = 5
evaluate_every = 6
plot = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_tokenizer(folder / "tokenizer")
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in texts(200)])
    write_jsonl(folder / "held-out.jsonl", [{"text": text} for text in texts(30, seed=1)])
    (folder / "lm.toml").write_text(RECIPE)
    return folder


def test_a_language_model_from_text(folder: Path, tmp_path: Path) -> None:
    """Losses fall on held-out text, and the saved model has the loss that the log says."""
    rows = []
    result = intaglio.train(folder / "lm.toml", tmp_path, report=rows.append)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert rows == [pytest.approx(row) for row in read_log(tmp_path / "log.csv")]
    evaluations = [row["evaluation_loss"] for row in rows if "evaluation_loss" in row]
    assert evaluations[1] < evaluations[0] < np.log(400) + 0.1
    assert rows[-1]["evaluation_perplexity"] == pytest.approx(np.exp(result.evaluation_loss))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = [i for line in (folder / "held-out.jsonl").read_text().splitlines() for i in _document(tokenizer, line)]
    count = (len(ids) - 1) // 24 // 4 * 4
    windows = torch.tensor([ids[24 * i : 24 * i + 25] for i in range(count)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert float(loss) == pytest.approx(result.evaluation_loss, rel=1e-5)


def _document(tokenizer: AutoTokenizer, line: str) -> list[int]:
    return [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False), tokenizer.eos_token_id]


def test_resumed_runs_end_with_the_same_file(folder: Path, tmp_path: Path) -> None:
    def stop(event: object) -> bool:
        return event.done < 7  # type: ignore[attr-defined]

    train(folder / "lm.toml", tmp_path / "whole")
    with pytest.raises(intaglio.IntaglioError):
        train(folder / "lm.toml", tmp_path / "cut", progress=stop)
    train(folder / "lm.toml", tmp_path / "cut", resume=True)
    for name in ("model", "best"):
        whole, cut = ((tmp_path / run / name / "model.safetensors").read_bytes() for run in ("whole", "cut"))
        assert whole == cut


def test_quantized_layers_are_published_packed_and_take_adapters(folder: Path, tmp_path: Path) -> None:
    """Ternary layers from the first step; then an adapter on what was published, alone in its folder, as peft reads."""
    (folder / "ternary.toml").write_text(
        RECIPE + '[[quantization]]\nmodules = "*.mlp.*"\nformat = "ternary"\ngroup_size = 32\n'
    )
    train(folder / "ternary.toml", tmp_path / "ternary", overrides=["train.steps=3"])
    packed = open_checkpoint(tmp_path / "ternary" / "model").tensors
    quantized = [name for name, tensor in packed.items() if tensor.layout is not None]
    assert len(quantized) == 6 and all(".mlp." in name for name in quantized)

    lora = RECIPE[: RECIPE.index("[model]")] + RECIPE[RECIPE.index("[data]") :]
    lora += f'[model]\npath = "{tmp_path / "ternary" / "model"}"\n'
    lora += '[lora]\nrank = 2\nalpha = 4\ntarget_modules = ["q_proj", "down_proj"]\n'
    (folder / "lora.toml").write_text(lora)
    train(folder / "lora.toml", tmp_path / "lora", overrides=["train.steps=4"])
    saved = load_file(tmp_path / "lora" / "model" / "adapter_model.safetensors")
    assert len(saved) == 8 and all(np.abs(tensor).max() > 0 for tensor in saved.values())
    state = load_file(tmp_path / "lora" / "checkpoints" / "step-00000004" / "weights.safetensors")
    assert len(state) == 8
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "lora" / "model")).r == 2


def test_bad_recipes_are_refused(folder: Path, tmp_path: Path) -> None:
    def build(*overrides: str) -> None:
        train(folder / "lm.toml", tmp_path / "x", overrides=overrides)

    with pytest.raises(ConfigError, match=r"task\.kind is 'casual-lm'; expected one of causal-lm, flow-matching"):
        build("task.kind=casual-lm")
    with pytest.raises(ConfigError, match=r"task\.dtipe is unknown; did you mean dtype\?"):
        build("task.dtipe=float16")
    with pytest.raises(ConfigError, match=r"nowhere: there is no such folder; expected one with tokenizer\.json"):
        build("tokenizer=nowhere")
    with pytest.raises(ConfigError, match=r"\[lora\]: lora\.rank is missing"):
        build('lora={alpha=2, target_modules="all-linear"}', 'model={path="m"}')
    with pytest.raises(InputError, match=r"token id .* in input_ids; the model's vocabulary has 64"):
        build("model.vocab_size=64")
    with pytest.raises(ConfigError, match=r"lm\.toml: seed is 1234.*; expected a number less than"):
        build("seed=123456789012345678901234567890")
    with pytest.raises(ConfigError, match=r"optimizer\.betas\.0 is 1\.0; expected a number less than 1"):
        build("optimizer.betas=[1.0, 2.0]")
    with pytest.raises(ConfigError, match=r"optimizer\.lr is inf; expected a finite number"):
        build("optimizer.lr=inf")
    with pytest.raises(ConfigError, match=r"nesterov is set without a momentum"):
        build("optimizer.kind=sgd", "optimizer.nesterov=true")
    with pytest.raises(ConfigError, match=r"hidden size \(32\) is not a multiple of the number of attention heads"):
        build("model.num_attention_heads=3")
    with pytest.raises(ConfigError, match=r"'hidden_size' expected int, got str.*mend them"):
        build("model.hidden_size=wide")
    with pytest.raises(ConfigError, match=r"num_attention_heads is 2, no multiple of num_key_value_heads, 3"):
        build("model.num_key_value_heads=3")
    with pytest.raises(
        ConfigError, match=r"\[evaluation_data\]: evaluation_data\.format is 'jsn'; expected one of 'jsonl'"
    ):
        build("evaluation_data.format=jsn")
    with pytest.raises(
        ConfigError, match=r"evaluation_data\.examples\.length is 65; .* max_position_embeddings, which is 64"
    ):
        build("evaluation_data.examples.length=65")
    with pytest.raises(ConfigError, match=r"^data\.length is 65; expected at most the model's max_position_embeddings"):
        build('data={format="tokens", files=["t.bin"], dtype="uint16", length=65, batch_size=1}')
    assert not (tmp_path / "x" / "model").exists()


def test_captions_are_no_longer_than_their_encoder_reads(folder: Path, tmp_path: Path) -> None:
    tokenizer = tiny_painter.write_tokenizer(tmp_path / "words")
    task = build_flow_matching(tiny_painter.TASK, tiny_painter.MODEL, root=tmp_path, tokenizer=tokenizer)
    data = {"format": "image-folder", "folder": "x", "batch_size": 1}
    for length in (64, 65):
        examples = {"size": 32, "caption": "text", "caption_length": length}
        table = {"data": {**data, "examples": examples}, "task": tiny_painter.TASK, "train": {"steps": 1}}
        refused = pytest.raises(ConfigError, match=r"data\.examples\.caption_length is 65; .*which is 64")
        with refused if length > 64 else nullcontext():
            check_lengths(Recipe.model_validate(table), task)


def test_a_model_without_tokenizer_json_says_what_it_has(folder: Path, tmp_path: Path) -> None:
    train(folder / "lm.toml", tmp_path / "run", overrides=["train.steps=1"])
    model = tmp_path / "run" / "model"
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    recipe = RECIPE.replace('tokenizer = "tokenizer"', "")
    recipe = recipe[: recipe.index("[model]")] + f'[model]\npath = "{model}"\n' + recipe[recipe.index("[data]") :]
    (folder / "older.toml").write_text(recipe)
    with pytest.raises(
        ConfigError, match=r"model: has tokenizer\.model, and no tokenizer\.json.*Let transformers write one"
    ):
        train(folder / "older.toml", tmp_path / "x")
    np.zeros(1000, "<u2").tofile(folder / "t.bin")  # tokens need none
    table = 'data={format="tokens", files=["t.bin"], dtype="uint16", length=8, batch_size=1}'
    changes = [table, table.replace("data", "evaluation_data", 1), "train.steps=1"]
    assert train(folder / "older.toml", tmp_path / "y", overrides=changes).step == 1


def test_a_folder_whose_config_is_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    train(folder / "lm.toml", tmp_path / "run", overrides=["train.steps=1"])
    model = tmp_path / "run" / "model"
    config = json.loads((model / "config.json").read_text())
    setting = f'model={{path="{model}"}}'
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*get its files again"):
        train(folder / "lm.toml", tmp_path / "x", overrides=[setting])
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        train(folder / "lm.toml", tmp_path / "x", overrides=[setting])


def test_evaluation_data_without_a_batch_is_found_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    rows: list[object] = []
    with pytest.raises(DataError, match=r"empty\.jsonl: an epoch has no batch"):
        train(folder / "lm.toml", tmp_path, overrides=['evaluation_data.files=["empty.jsonl"]'], report=rows.append)
    assert not rows and not list((tmp_path).rglob("*.safetensors"))


def test_a_run_that_met_a_damaged_record_goes_on_without_it(folder: Path, tmp_path: Path) -> None:
    """--skip-bad may be given on resuming; the count is in the log and the result."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "bad.jsonl").write_text("\n".join([*lines[:100], '{"text": ', *lines[100:]]) + "\n")
    changes = ['data.files=["bad.jsonl"]', "data.shuffle=false", "train.steps=80", "train.log_every=1"]
    with pytest.raises(DataError, match=r"bad\.jsonl, line 101: .*--skip-bad"):
        train(folder / "lm.toml", tmp_path, overrides=changes)
    steps = saved_steps(tmp_path / "checkpoints")
    assert steps
    rows: list[dict[str, float]] = []
    changes += ["data.skip_bad=true", f"train.steps={steps[-1] + 20}"]
    result = train(folder / "lm.toml", tmp_path, resume=True, overrides=changes, report=rows.append)  # type: ignore[arg-type]
    assert rows[0]["step"] == steps[-1] + 1
    assert result.skipped == rows[-1]["skipped"] == read_log(tmp_path / "log.csv")[-1]["skipped"] >= 1
