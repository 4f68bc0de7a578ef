"""LoRA on SmolLM2-135M, whose weights are Q4_1, learning the spelling of the First Folio."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from fetched import fetched

import intaglio
from intaglio.exporters.architecture import find_architecture, model_tensors
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.tokenizer import tokenizer_from_gguf
from intaglio.runtimes.parity import compare
from intaglio.trainer.loading import load_tensors
from intaglio.trainer.lora import LoraSettings, add_lora, load_lora, lora_parameters, merge_lora, save_lora

WINDOW, BATCH, STEPS = 128, 1, 24
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

pytestmark = pytest.mark.full_size


def windows(gguf: Path, name: str) -> torch.Tensor:
    """``[windows, WINDOW]`` token ids of a play."""
    files = tokenizer_from_gguf(open_checkpoint(gguf).metadata, str(gguf))
    ids = tokenizers.Tokenizer.from_str(files.tokenizer_json).encode(fetched(name).read_text("ascii")).ids
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def batches(plays: torch.Tensor) -> Iterator[torch.Tensor]:
    order = torch.randperm(len(plays), generator=torch.Generator().manual_seed(1))
    yield from plays[order[: STEPS * BATCH]].split(BATCH)


def loss_on(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(np.mean([float(model(part, labels=part).loss) for part in ids.split(BATCH)]))


def logits(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(ids).logits.numpy()


def test_lora_on_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Bounds: those of the text, peft's and the merged model's logits 1e-5, the exact engine's 1e-4."""
    checkpoint = open_checkpoint(smollm2_gguf)
    architecture, keys = find_architecture(checkpoint)
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    model = transformers.AutoModelForCausalLM.from_config(dense.config).eval()
    load_tensors(model, model_tensors(checkpoint, architecture, architecture.read_config(keys)), smollm2_gguf.name)
    held_out = windows(smollm2_gguf, "folio-hamlet")[20:24]
    check = held_out[:1]
    assert compare("base", logits(model, check), logits(dense, check)).relative_l2 <= 1e-5

    torch.manual_seed(7)
    adapted = add_lora(model, LoraSettings(rank=8, alpha=16, target_modules=LINEARS))
    assert len(adapted) == 210
    parameters = list(lora_parameters(model).values())
    share = sum(p.numel() for p in parameters) / sum(p.numel() for p in dense.parameters())
    before = loss_on(model, held_out)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    plays = torch.cat([windows(smollm2_gguf, f"folio-{name}") for name in ("othello", "lear")])
    for ids in batches(plays):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    after = loss_on(model, held_out)
    assert len(optimizer.state) == len(parameters) == 420
    save_lora(model, tmp_path / "folio")
    expected = logits(model, check)

    theirs = peft.PeftModel.from_pretrained(dense, tmp_path / "folio").eval()
    errors = {"peft": compare("peft", logits(theirs, check), expected).relative_l2}
    theirs.save_pretrained(tmp_path / "theirs")
    dense = theirs.unload()
    load_lora(dense, tmp_path / "theirs")
    errors["ours of peft's"] = compare("loaded", logits(dense, check), expected).relative_l2
    merge_lora(dense)
    errors["merged"] = compare("merged", logits(dense, check), expected).relative_l2

    intaglio.export(smollm2_gguf, tmp_path / "bundle", lora=[tmp_path / "folio"], stages=["score"])
    feeds = {"input_ids": check.numpy(), "attention_mask": np.ones(check.shape, np.int64)}
    feeds["position_ids"] = np.arange(WINDOW)[None]
    for accuracy in ("exact", "fast"):
        intaglio.compile(tmp_path / "bundle", accuracy=accuracy)
        found = intaglio.load(tmp_path / "bundle").engine.load("score").run(feeds)["logits"]
        errors[accuracy] = compare(accuracy, found, expected).relative_l2
    size = (tmp_path / "folio" / "adapter_model.safetensors").stat().st_size
    print(f"held-out loss {before:.4f} -> {after:.4f}, {100 * share:.2f} % of the weights, {size} bytes, {errors}")
    assert after < before - 0.1
    assert share < 0.02
    assert max(errors["peft"], errors["ours of peft's"], errors["merged"]) <= 1e-5
    assert errors["exact"] <= 1e-4
    assert errors["fast"] <= 0.1
