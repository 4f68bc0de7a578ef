"""Small sources, tasks and recipes for tests of the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from intaglio.errors import CheckpointError
from intaglio.trainer.data.source import Batch
from intaglio.trainer.recipe import Recipe
from intaglio.trainer.tasks.task import Losses, Task, example_noise

WIDTH = 8


class ListSource:
    """``examples`` in batches, in an order drawn anew for each epoch; n ranks share n batches of that order."""

    def __init__(self, examples: Batch, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.examples, self.batch_size = examples, batch_size
        self.rank, self.world_size = rank, world_size
        self.epoch = self.position = 0

    @property
    def fingerprint(self) -> str:
        return str(float(next(iter(self.examples.values())).double().nansum()))

    def __iter__(self) -> Iterator[Batch]:
        count = len(next(iter(self.examples.values())))
        order = torch.from_numpy(np.random.default_rng(self.epoch).permutation(count))
        while self.position + self.batch_size * self.world_size <= count:
            begin = self.position + self.rank * self.batch_size
            self.position += self.batch_size * self.world_size
            chosen = order[begin : begin + self.batch_size]
            yield {name: tensor[chosen] for name, tensor in self.examples.items()}
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError("other data")
        self.epoch, self.position = state["epoch"], state["position"]

    def shard(self, rank: int, world_size: int) -> ListSource:
        return ListSource(self.examples, self.batch_size, rank, world_size)

    def close(self) -> None: ...


class Block(nn.Module):
    """A linear layer, a norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Regression(Task):
    """Squared error of a small residual network, on noisy inputs, weighted by the examples' own weights."""

    def __init__(self, noise: float = 0.1, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)
        self.noise = noise
        for block in self.blocks:
            block.dropout.p = dropout

    def weight(self, batch: Batch) -> int:
        return int(batch["weight"].sum()) if "weight" in batch else len(batch["x"])

    def units(self, batch: Batch) -> int:
        return len(batch["x"])

    def heavy_modules(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        x = batch["x"]
        x = x + self.noise * example_noise(generator, *x.shape)
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        errors = functional.mse_loss(self.head(hidden)[:, 0].float(), batch["y"], reduction="none")
        if "weight" in batch:
            errors = errors * batch["weight"]
        total = errors.sum()
        return Losses(total, {"half": total / 2})

    def save(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "model.pt")


def regression_examples(count: int = 64, seed: int = 0) -> Batch:
    """Inputs [count, 4], targets [count] that can be learned, and integer weights 1 to 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = torch.sin(x.sum(1)) + 0.5 * x[:, 0]
    weight = torch.randint(1, 4, (count,), generator=generator).float()
    return {"x": x, "y": y, "weight": weight}


def recipe(train: dict[str, Any], **tables: Any) -> Recipe:
    """A recipe of defaults, with ``train`` and other tables given; no plot."""
    content: dict[str, Any] = {"seed": 3, "task": {"kind": "test"}, "data": {}}
    return Recipe.model_validate(content | tables | {"train": {"plot": False, **train}})
