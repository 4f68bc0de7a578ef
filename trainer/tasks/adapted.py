"""Adapters in place of the weights: another task, of which only a LoRA is trained and saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from intaglio.errors import ConfigError
from intaglio.trainer.data.source import Batch
from intaglio.trainer.lora import LoraSettings, add_lora, save_lora
from intaglio.trainer.tasks.task import Losses, Task

# Where tasks hold the model that adapters go on.
_MODELS = ("model", "transformer")


class AdaptedTask(Task):
    """The loss of ``task``, whose model gets an adapter. All the rest is frozen; what is saved is the adapter alone.

    Raises ConfigError for a task whose model takes none, InputError for modules that the model does not have.
    """

    def __init__(self, task: Task, settings: LoraSettings) -> None:
        super().__init__()
        found = [name for name in _MODELS if isinstance(getattr(task, name, None), nn.Module)]
        if not found:
            raise ConfigError(f"lora: {type(task).__name__} has no model that adapters go on; leave the section out")
        self.task = task.requires_grad_(False)
        self.unit = task.unit
        add_lora(self.adapted, settings)
        task.freeze_unused()

    @property
    def adapted(self) -> nn.Module:
        """The model that has the adapter."""
        return next(model for name in _MODELS if isinstance(model := getattr(self.task, name, None), nn.Module))

    def heavy_modules(self) -> list[nn.Module]:
        return self.task.heavy_modules()

    def weight(self, batch: Batch) -> int:
        return self.task.weight(batch)

    def units(self, batch: Batch) -> int:
        return self.task.units(batch)

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        losses: Losses = self.task(batch, generator)
        return losses

    def measures(self, loss: float) -> dict[str, float]:
        return self.task.measures(loss)

    def save(self, folder: Path) -> None:
        """Writes the adapter as peft does."""
        save_lora(self.adapted, folder)
