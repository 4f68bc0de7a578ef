"""The language model's loss against transformers' own, and what it is saved as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from intaglio.errors import CheckpointError, ConfigError, InputError
from intaglio.trainer.tasks import causal_lm
from intaglio.trainer.tasks.causal_lm import build_task

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_task(architecture: str, **values: object) -> causal_lm.CausalLM:
    torch.manual_seed(0)
    model = {"architecture": architecture, **TINY, **values}
    if architecture == "qwen3":
        model["head_dim"] = 8
    return build_task({"kind": "causal-lm"}, model, root=Path(), tokenizer=None)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, :5] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_logits", [1 << 26, 96 * 7])
def test_loss_equals_that_of_transformers(
    architecture: str, max_logits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Summed over labels, in one piece and in pieces of 7 tokens; gradients too."""
    monkeypatch.setattr(causal_lm, "_MAX_LOGITS", max_logits)
    task = tiny_task(architecture)
    task.save(tmp_path)
    data = batch()
    assert task.weight(data) == 43 and task.units(data) == 48
    task(data, torch.Generator()).total.backward()
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    # transformers shifts labels itself: one more in front makes them ours
    shifted = torch.cat([torch.full((3, 1), -100), data["labels"]], 1)
    ids = torch.cat([data["input_ids"], torch.zeros(3, 1, dtype=torch.long)], 1)
    loss = oracle(input_ids=ids, labels=shifted).loss * 43
    loss.backward()
    torch.testing.assert_close(task(data, torch.Generator()).total, loss, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(task.model.named_parameters(), oracle.parameters(), strict=True):
        assert torch.linalg.norm(ours.grad - theirs.grad) <= 1e-4 * torch.linalg.norm(theirs.grad), name


def test_what_train_compile_compiles_is_called() -> None:
    task, called = tiny_task("llama"), []
    for module in task.heavy_modules():
        module.register_forward_hook(lambda module, _inputs, _output: called.append(module))
    task(batch(), torch.Generator())
    assert called == task.heavy_modules() == [task.model.model]


def test_packed_documents_do_not_see_each_other() -> None:
    """Two documents in one window, told apart by their positions, have the loss that they have alone."""
    task = tiny_task("llama")
    data = batch()
    ids, labels = data["input_ids"][:1], data["labels"][:1].clone()
    labels[0, 5] = -100
    positions = torch.tensor([[*range(6), *range(10)]])
    packed = task({"input_ids": ids, "labels": labels, "position_ids": positions}, torch.Generator()).total
    alone = [
        task({"input_ids": ids[:, part], "labels": labels[:, part]}, torch.Generator()).total
        for part in (slice(0, 6), slice(6, 16))
    ]
    torch.testing.assert_close(packed, alone[0] + alone[1], rtol=1e-5, atol=0)


def test_an_id_beyond_the_vocabulary_is_named() -> None:
    data = batch()
    data["input_ids"][2, 3] = 96
    with pytest.raises(InputError, match=r"token id 96 in input_ids.*vocabulary has 96"):
        tiny_task("llama").weight(data)
    data = batch()
    data["labels"][0, 0] = -7
    with pytest.raises(InputError, match="token id -7 in labels"):
        tiny_task("llama").weight(data)


def test_bad_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hiden_size is unknown; did you mean hidden_size"):
        tiny_task("llama", hiden_size=3)
    with pytest.raises(ConfigError, match="expected one of llama"):
        tiny_task("gpt2")
    with pytest.raises(ConfigError, match="cannot be built"):
        tiny_task("llama", num_attention_heads=0)
    with pytest.raises(ConfigError, match="either path"):
        build_task({"kind": "causal-lm"}, {}, root=tmp_path, tokenizer=None)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        build_task({"kind": "causal-lm"}, {"path": "nowhere"}, root=tmp_path, tokenizer=None)
