"""An exponential moving average of the weights that are trained, and of statistics of what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from intaglio.trainer.sharding import like, local


class WeightAverage:
    """The average of ``weights``, by name, in their own dtype and, where they are sharded, their own shards.

    Weights are parameters and buffers. A batch norm's running statistics, and what else is floating-point, are averaged
    as parameters are: as they stand they belong to the last weights. Counters are left out.

    Its decay rises with the updates, ``min(decay, (1 + n) / (10 + n))``, so that the first weights are soon forgotten.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._current = {name: weight for name, weight in weights.items() if weight.is_floating_point()}
        self.weights = {name: weight.detach().clone() for name, weight in self._current.items()}
        self._averages = [local(weight) for weight in self.weights.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = [local(weight.detach()) for weight in self._current.values()]
        torch._foreach_lerp_(self._averages, current, 1.0 - decay)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        """Puts back what a checkpoint holds of :attr:`weights` and :attr:`updates`."""
        for name, average in self.weights.items():
            average.copy_(like(weights[name], average))
        self.updates = updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the average as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, current in zip(self._averages, self._current.values(), strict=True):
            weight = local(current.detach())
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
