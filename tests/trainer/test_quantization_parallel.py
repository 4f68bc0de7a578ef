"""Quantized layers whose dense weights lie in shards: what is published is packed from whole ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from ranks import on_ranks
from training_parts import ListSource, recipe

from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.kernels.grouped_quant import GroupedQuantRows
from intaglio.kernels.quantize import Quantization, quantize
from intaglio.trainer.checkpoint import read_tensors
from intaglio.trainer.loop import Trainer
from intaglio.trainer.parallel import Ranks
from intaglio.trainer.quantization import QuantizationRule, quantize_linears
from intaglio.trainer.tasks.causal_lm import CausalLM

TERNARY = Quantization("ternary", 32)


def build() -> CausalLM:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    task = CausalLM(transformers.LlamaForCausalLM(config))
    quantize_linears(task, [QuantizationRule("*.mlp.*", TERNARY)])
    return task


def train(ranks: Ranks, folder: Path) -> None:
    ids = torch.randint(0, 64, (32, 9), generator=torch.Generator().manual_seed(1))
    source = ListSource({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, 4, ranks.rank, ranks.world_size)
    settings = recipe({"steps": 3, "ema": 0.5}, parallel={"kind": "fsdp"}, optimizer={"lr": 0.01})
    Trainer(build(), source, settings, folder, ranks=ranks, rebuild=build).run()


def test_sharded_weights_are_published_packed(tmp_path: Path) -> None:
    """Codes and scales are those of the averaged weights, gathered in the last checkpoint."""
    on_ranks(2, train, tmp_path)
    average = read_tensors(tmp_path / "checkpoints" / "step-00000003", "average")
    start = build().state_dict()
    tensors = open_checkpoint(tmp_path / "model").tensors
    packed = [name for name, tensor in tensors.items() if tensor.layout is not None]
    assert len(packed) == 6
    for name in packed:
        weight, rows = average[f"model.{name}"], tensors[name].read()
        assert not torch.equal(weight, start[f"model.{name}"])
        expected = quantize(weight.numpy(), TERNARY)
        assert isinstance(rows, GroupedQuantRows)
        assert np.array_equal(rows.codes, expected.codes)
        assert np.array_equal(rows.scales, expected.scales)
