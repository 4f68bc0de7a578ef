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


def example_noise(generator: torch.Generator, count: int, size: int) -> torch.Tensor:
    """Standard normal numbers, float32 ``[count, size]``; row i from the seed of ``generator`` and i alone.

    ``generator`` is seeded anew: a second call gives the same numbers.
    """
    seed = generator.initial_seed()
    rows = [torch.randn(size, generator=generator.manual_seed(seed + i), device=generator.device) for i in range(count)]
    generator.manual_seed(seed)
    return torch.stack(rows)


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
        """The summed loss. Noise comes from ``generator``, which the loop seeds anew for every batch.

        Drawn by :func:`example_noise`, it does not depend on how a step's examples are divided among ranks.
        """
        raise NotImplementedError

    def heavy_modules(self) -> list[nn.Module]:
        """The modules that ``train.compile`` compiles: those that are called, and whose work is worth it."""
        raise NotImplementedError

    def freeze_unused(self) -> None:
        """Freezes parameters that the loss does not depend on; called again when adapters were added."""

    def measures(self, loss: float) -> dict[str, float]:
        """What an evaluation whose mean loss is ``loss`` says beside it, such as the perplexity."""
        return {}

    def save(self, folder: Path) -> None:
        """Writes the models into ``folder`` as they are published (safetensors and ``config.json``)."""
        raise NotImplementedError
