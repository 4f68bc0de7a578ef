"""The one protocol between models and the loop: a loss over a batch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from intaglio.trainer.data.source import Batch


class Losses(NamedTuple):
    """``total`` is what is minimized, summed over the units of a batch; ``parts`` are shares of it for the log."""

    total: torch.Tensor
    parts: dict[str, torch.Tensor]


class Task(nn.Module):
    """Models with a loss. The loop divides the sums of a step by its ``weight``, over micro-batches and ranks."""

    # What the speed is counted in.
    unit = "examples"

    def weight(self, batch: Batch) -> int:
        """The number of units that the loss of ``batch`` is a sum over: tokens that are predicted, pictures."""
        return len(next(iter(batch.values())))

    def units(self, batch: Batch) -> int:
        """How many of :attr:`unit` the batch holds."""
        return self.weight(batch)

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        """The summed loss. All that is random comes from ``generator``, which the loop seeds anew for every batch."""
        raise NotImplementedError

    def heavy_modules(self) -> list[nn.Module]:
        """The modules that ``train.compile`` compiles: those that are called, and whose work is worth it."""
        raise NotImplementedError

    def measures(self, loss: float) -> dict[str, float]:
        """What an evaluation whose mean loss is ``loss`` says beside it, such as the perplexity."""
        return {}

    def save(self, folder: Path) -> None:
        """Writes the models into ``folder`` as they are published (safetensors and ``config.json``)."""
        raise NotImplementedError
