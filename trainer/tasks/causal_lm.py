"""Language modelling: each token is predicted from those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from intaglio.errors import InputError
from intaglio.trainer.data.packing import IGNORED
from intaglio.trainer.data.source import Batch
from intaglio.trainer.models.causal_lm import build_causal_lm
from intaglio.trainer.recipe import checked
from intaglio.trainer.saving import copy_tokenizer, save_quantized
from intaglio.trainer.tasks.task import Losses, Task

Dtype = Literal["float32", "bfloat16", "float16"]
# Logits of more values are made piece by piece, forward and backward: 256 MiB in float32.
_MAX_LOGITS = 1 << 26


class CausalLMSettings(BaseModel):
    """``[task]`` of ``kind = "causal-lm"``. dtype: what dense weights are saved as; they are trained in float32."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    dtype: Dtype = "float32"


class CausalLM(Task):
    """Cross-entropy of ``labels`` [batch, length] given ``input_ids`` [batch, length], in float32.

    ``labels[:, i]`` is the token after ``input_ids[:, i]``, or -100 where nothing is predicted. ``position_ids`` and
    ``attention_mask`` of the batch go to the model as they are.
    """

    unit = "tokens"

    def __init__(self, model: nn.Module, tokenizer: Path | None = None, dtype: Dtype = "float32") -> None:
        super().__init__()
        self.model: Any = model
        self._tokenizer, self._dtype = tokenizer, dtype

    def heavy_modules(self) -> list[nn.Module]:
        return [self.model.get_decoder()]

    def weight(self, batch: Batch) -> int:
        """The number of predicted tokens. Raises InputError for a token id that the vocabulary has not."""
        for name in ("input_ids", "labels"):
            ids = batch[name]
            size = self.model.config.vocab_size
            wrong = (ids >= size) | (ids < 0) if name == "input_ids" else (ids >= size) | ((ids < 0) & (ids != IGNORED))
            if bool(wrong.any()):
                raise InputError(
                    f"the data has the token id {int(ids[wrong][0])} in {name}; the model's vocabulary has {size}: "
                    "train on data of its own tokenizer"
                )
        return int((batch["labels"] != IGNORED).sum())

    def units(self, batch: Batch) -> int:
        return batch["input_ids"].numel()

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        given = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        hidden = self.model.get_decoder()(input_ids=batch["input_ids"], use_cache=False, **given).last_hidden_state
        hidden, labels = hidden.flatten(0, 1), batch["labels"].flatten()
        rows = max(1, _MAX_LOGITS // self.model.config.vocab_size)
        if len(hidden) <= rows:
            return Losses(self._cross_entropy(hidden, labels), {})
        pieces = [
            checkpoint(self._cross_entropy, hidden[i : i + rows], labels[i : i + rows], use_reentrant=False)
            for i in range(0, len(hidden), rows)
        ]
        return Losses(torch.stack(pieces).sum(), {})

    def _cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    def measures(self, loss: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(loss, 700.0))}

    def save(self, folder: Path) -> None:
        save_quantized(self.model, folder, getattr(torch, self._dtype))
        if self._tokenizer is not None:
            copy_tokenizer(self._tokenizer, folder)


def build_task(task: Mapping[str, Any], model: Mapping[str, Any], *, root: Path, tokenizer: Path | None) -> CausalLM:
    """The task of a recipe's ``[task]`` and ``[model]``. Raises ConfigError, CheckpointError."""
    settings = checked(CausalLMSettings, task, "task", "task.")
    return CausalLM(build_causal_lm(model, root), tokenizer, settings.dtype)
