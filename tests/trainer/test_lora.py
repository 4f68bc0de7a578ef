"""Adapters in training: what is frozen, what is saved, and that peft's files and ours are the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from gguf_models import TinyGGUF
from safetensors.torch import load_file, save_file
from tiny_models import GGUF_MODELS, TINY_MODELS
from torch import nn

import intaglio
from intaglio.errors import ConfigError, InputError, WeightsError
from intaglio.exporters.architecture import find_architecture, model_tensors
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.runtimes.parity import compare
from intaglio.trainer.loading import FrozenQuantizedLinear, load_tensors
from intaglio.trainer.lora import (
    LoraSettings,
    add_lora,
    load_lora,
    lora_parameters,
    merge_and_unload,
    merge_lora,
    save_lora,
    set_strengths,
    unmerge_lora,
)
from intaglio.trainer.train import train as train_recipe

TINY = {tiny.name: tiny for tiny in TINY_MODELS}
SETTINGS = LoraSettings(rank=4, alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))
PATTERN = np.arange(16) * 35 % 97
ROW = torch.from_numpy(np.tile(PATTERN, 2)[None])
RECIPE = """
task = { kind = "causal-lm" }
model = { path = "base" }
data = { format = "tokens", files = ["ids.bin"], dtype = "uint16", length = 24, batch_size = 4 }
optimizer = { lr = 0.03 }
lora = { rank = 4, alpha = 8, target_modules = "all-linear" }

[train]
steps = 12
plot = false
device = "cpu"
"""
IDS = torch.from_numpy(np.random.default_rng(4).integers(0, 97, (2, 11)))


@pytest.fixture(params=["llama-gqa", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> transformers.PreTrainedModel:
    return TINY[request.param].build(tmp_path / "model")


def fill(model: nn.Module, seed: int, name: str | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in lora_parameters(model, name).values():
        parameter.data.normal_(std=0.5 * parameter.shape[-1] ** -0.5, generator=generator)


def logits(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(IDS).logits.numpy()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return compare("logits", found, expected).relative_l2


def train(model: nn.Module, steps: int = 6) -> tuple[torch.optim.Optimizer, list[float]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return optimizer, losses


def test_only_the_adapter_is_trained(model: transformers.PreTrainedModel) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = logits(model)
    torch.manual_seed(1)
    names = add_lora(model, SETTINGS)
    assert len(names) == 9 and "model.layers.0.self_attn.q_proj" in names
    np.testing.assert_array_equal(logits(model), plain)  # B is zero
    parameters = lora_parameters(model)
    for name, parameter in parameters.items():
        if "lora_B" in name:
            assert not parameter.any()
        else:  # uniform within 1 / sqrt(in), as nn.Linear's own weight
            bound = parameter.shape[1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound
    optimizer, losses = train(model)
    assert losses[-1] < losses[0] - 0.1
    assert {id(p) for p in optimizer.state} == {id(p) for p in parameters.values()}
    for name, parameter in model.named_parameters():
        if name not in parameters:
            assert parameter.grad is None
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])


def test_dropout_and_rank_stabilized_scale() -> None:
    layer = nn.Sequential(nn.Linear(16, 16))
    add_lora(layer, LoraSettings(rank=4, alpha=6, target_modules=("0",), dropout=0.5, use_rslora=True))
    fill(layer, 1)
    x = torch.randn(3, 16)
    assert not torch.equal(layer.train()(x), layer(x))
    down, up = lora_parameters(layer).values()
    expected = layer[0].get_base_layer()(x) + 6 / 4**0.5 * (x @ down.T @ up.T)
    torch.testing.assert_close(layer.eval()(x), expected)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_loads_ours(model: transformers.PreTrainedModel, tmp_path: Path, use_rslora: bool) -> None:
    plain = copy.deepcopy(model)
    add_lora(model, SETTINGS.model_copy(update={"use_rslora": use_rslora}))
    fill(model, 2)
    save_lora(model, tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "a").eval()
    np.testing.assert_array_equal(logits(theirs), logits(model))
    assert relative(logits(plain), logits(model)) > 0.1
    # And what peft writes of it is what we wrote.
    theirs.save_pretrained(tmp_path / "b")
    ours, again = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in "ab")
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)


def test_we_load_pefts(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", rank_pattern={r"layers\.1\..*": 2}, alpha_pattern={"q_proj": 9}
    )
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    fill(theirs, 3)
    theirs.save_pretrained(tmp_path / "a")
    names = load_lora(model, tmp_path / "a")
    assert len(names) == 21
    assert relative(logits(model), logits(theirs)) <= 1e-6
    save_lora(model, tmp_path / "b")  # and with patterns of its own it is read again
    again = peft.PeftModel.from_pretrained(copy.deepcopy(theirs.unload()), tmp_path / "b").eval()
    assert relative(logits(again), logits(model)) <= 1e-6
    _, losses = train(model)
    assert losses[-1] < losses[0]


def test_other_spellings(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    add_lora(model, SETTINGS)
    fill(model, 2)
    expected = logits(model)
    kohya, dotted = {}, {}
    for name, parameter in lora_parameters(model).items():
        stem, part, _, _ = name.rsplit(".", 3)
        new = {"lora_A": "lora_down", "lora_B": "lora_up"}[part]
        kohya[f"lora_te_{stem.replace('.', '_')}.{new}.weight"] = parameter.detach()
        kohya[f"lora_te_{stem.replace('.', '_')}.alpha"] = torch.tensor(6.0)
        dotted[f"text_encoder.{stem}.{part}.weight"] = parameter.detach()
    said = {f"text_encoder.{key}": value for key, value in (("r", 4), ("lora_alpha", 6))}
    save_file(kohya, tmp_path / "kohya.safetensors")
    save_file(dotted, tmp_path / "dotted.safetensors", {"lora_adapter_metadata": json.dumps(said)})
    for file in ("kohya", "dotted"):
        loaded = copy.deepcopy(plain)
        load_lora(loaded, tmp_path / f"{file}.safetensors", strength=1.0)
        np.testing.assert_array_equal(logits(loaded), expected)


def test_merged_is_unmerged(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    """Bound: 1e-5. Measured: about 1e-6."""
    plain = logits(model)
    add_lora(model, SETTINGS)
    fill(model, 2)
    beside = logits(model)
    merge_lora(model)
    assert relative(logits(model), beside) <= 1e-5
    with pytest.raises(InputError, match="adapters are merged into the weights"):
        set_strengths(model, {"default": 0.5})
    unmerge_lora(model)
    assert relative(logits(model), beside) <= 1e-5
    set_strengths(model, {})
    assert relative(logits(model), plain) <= 1e-5
    set_strengths(model, {"default": 1.0})
    merge_and_unload(model)
    model.save_pretrained(tmp_path / "merged")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert relative(logits(saved), beside) <= 1e-5


def test_strengths_of_several(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    """The exported engine adds the same."""
    other = LoraSettings(rank=2, alpha=2, target_modules=r".*\.(q_proj|up_proj)", use_rslora=True)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i, settings in enumerate((SETTINGS, other)):
        adapted = copy.deepcopy(model)
        add_lora(adapted, settings)
        fill(adapted, i)
        save_lora(adapted, tmp_path / str(i))
    load_lora(model, tmp_path / "0", "a")
    load_lora(model, tmp_path / "1", "b", 0.25)
    assert {name.split(".")[-2] for name in lora_parameters(model)} == {"a", "b"}
    assert all(("lora_" in name and ".b." in name) == p.requires_grad for name, p in model.named_parameters())
    expected = copy.deepcopy(model)
    for strengths in ({"a": 1.0, "b": 0.25}, {"a": -0.5, "b": 2.0}):
        set_strengths(model, strengths)
        with torch.no_grad():
            for name, parameter in expected.named_parameters():
                stem = name.removesuffix(".base_layer.weight")
                if stem == name:
                    continue
                parameter.copy_(weights[f"{stem}.weight"])
                for adapter, strength in strengths.items():
                    pair = [p for n, p in lora_parameters(model, adapter).items() if n.startswith(f"{stem}.")]
                    if pair:
                        scale = 6 / 4 if adapter == "a" else 2 / 2**0.5
                        parameter += strength * scale * (pair[1] @ pair[0])
        set_strengths(expected, {})
        assert relative(logits(model), logits(expected)) <= 1e-5
    lora = [(tmp_path / "0", -0.5), (tmp_path / "1", 2.0)]
    intaglio.export(tmp_path / "model", tmp_path / "bundle", lora=lora)
    intaglio.compile(tmp_path / "bundle")
    assert relative(engine_logits(tmp_path / "bundle"), logits(model)) <= 1e-4
    with pytest.raises(InputError, match="the model has no adapter 'c'; it has a, b"):
        set_strengths(model, {"c": 1})


def engine_logits(bundle: Path) -> np.ndarray:
    ids = IDS.numpy()
    positions = np.repeat(np.arange(ids.shape[1])[None], len(ids), axis=0)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    return intaglio.load(bundle).engine.load("score").run(feeds)["logits"]


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_quantized_base(tmp_path: Path, storage: str) -> None:
    """Codes stay codes while the adapter learns, and the engine says what the model says."""
    tiny = TinyGGUF(GGUF_MODELS["llama-biases"], gguf.GGMLQuantizationType[storage])
    dense = tiny.build(tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source" / "model.gguf")
    architecture, keys = find_architecture(checkpoint)
    model = transformers.AutoModelForCausalLM.from_config(dense.config).eval()
    load_tensors(model, model_tensors(checkpoint, architecture, architecture.read_config(keys)), "model.gguf")
    assert relative(logits(model), logits(dense)) <= 1e-6
    names = add_lora(model, SETTINGS)
    base = model.get_submodule(names[0]).get_base_layer()
    assert isinstance(base, FrozenQuantizedLinear)
    assert not [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    codes = base.codes.clone()
    _, losses = train(model)
    assert losses[-1] < losses[0] - 0.05
    assert torch.equal(base.codes, codes)
    with pytest.raises(InputError, match=rf"{names[0]}: is a FrozenQuantizedLinear, which an adapter cannot be merged"):
        merge_lora(model)
    save_lora(model, tmp_path / "a")
    intaglio.export(tmp_path / "source" / "model.gguf", tmp_path / "bundle", lora=[tmp_path / "a"])
    intaglio.compile(tmp_path / "bundle")
    assert relative(engine_logits(tmp_path / "bundle"), logits(model)) <= 1e-4
    assert relative(logits(dense), logits(model)) > 1e-3


def test_a_recipe_trains_and_saves_an_adapter(tmp_path: Path) -> None:
    """By the loop, from a published folder; peft finds that it learned."""
    TINY["llama-gqa"].build(tmp_path / "base")
    np.tile(PATTERN, 60).astype("<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "tune.toml").write_text(RECIPE)
    result = train_recipe(tmp_path / "tune.toml", tmp_path / "run")
    assert result.loss is not None and result.loss < 3.5
    folder = tmp_path / "run" / "model"
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    before = float(plain(ROW, labels=ROW).loss)
    assert before > 5
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    assert float(theirs(ROW, labels=ROW).loss) < before - 1
    content = (tmp_path / "tune.toml").read_text().replace("rank = 4", "rank = 0")
    (tmp_path / "tune.toml").write_text(content)
    with pytest.raises(ConfigError, match=r"\[lora\]: lora\.rank is 0; expected a number of at least 1"):
        train_recipe(tmp_path / "tune.toml", tmp_path / "other")


def test_a_rank_beyond_a_side_of_a_layer_is_refused() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6))

    assert add_lora(layers(), LoraSettings(rank=6, alpha=6, target_modules=("0", "1"))) == ["0", "1"]
    message = r"lora\.rank is 7, and the weight of 1 is \[6, 8\]; expected at most its smaller side, 6"
    with pytest.raises(ConfigError, match=message):
        add_lora(layers(), LoraSettings(rank=7, alpha=6, target_modules=("0", "1")))


def test_bad_input(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target_modules: .*fc9"):
        add_lora(model, SETTINGS.model_copy(update={"target_modules": ("fc9",)}))
    with pytest.raises(InputError, match=r"target_modules: missing \).*expected ends of module names"):
        add_lora(model, SETTINGS.model_copy(update={"target_modules": "(("}))
    add_lora(model, SETTINGS)
    with pytest.raises(InputError, match="has an adapter 'default' already"):
        add_lora(model, SETTINGS)
    with pytest.raises(InputError, match="no adapter 'other' to save"):
        save_lora(model, tmp_path / "a", "other")
    save_lora(model, tmp_path / "a")
    small = TINY["llama-mha-sharded"].build(tmp_path / "small")
    with pytest.raises(WeightsError, match=r"v_proj\.lora_A\.weight adds \[16, 48\] to model.* is \[48, 48\]|q_proj"):
        load_lora(small, tmp_path / "a")
    with pytest.raises(WeightsError, match="is unknown to the model, which has 0, 1"):
        load_lora(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "a")
