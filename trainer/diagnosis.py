"""Where a loss or a gradient stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from intaglio.trainer.checkpoint import trained_parameters
from intaglio.trainer.data.source import Batch
from intaglio.trainer.sharding import local


def explain_not_finite(
    task: nn.Module, micro_batches: Sequence[Batch], replay: Callable[[int], torch.Tensor]
) -> str | None:
    """The first parameter, input, module or gradient of the step that is not finite, in words; None if all are.

    ``replay(i)`` computes the loss of micro-batch i once more. All micro-batches are, whatever is found: the ranks of
    a sharded model have to compute the same number of times.
    """
    found: list[str] = []
    for name, parameter in task.named_parameters():
        if not _finite(local(parameter.detach())):
            found.append(f"the parameter {name} was not finite before the step")
            break
    for index, batch in enumerate(micro_batches):
        where = f"micro-batch {index + 1} of {len(micro_batches)}"
        found += [f"{where}: {name} of the data" for name, tensor in batch.items() if not _finite(tensor)]
        module = _first_module(task, loss := _Replayed(replay, index))
        if module is not None:
            found.append(f"{where}: the output of {module}")
        elif loss.value is not None and not _finite(loss.value):
            found.append(f"{where}: the loss")
        if loss.value is not None:
            loss.value.backward()
        if (gradient := _last_gradient(task)) is not None and module is None:
            found.append(f"{where}: the gradient of {gradient}")
        for parameter in task.parameters():
            parameter.grad = None
    return found[0] if found else None


class _Replayed:
    def __init__(self, replay: Callable[[int], torch.Tensor], index: int) -> None:
        self._replay, self._index = replay, index
        self.value: torch.Tensor | None = None

    def __call__(self) -> None:
        self.value = self._replay(self._index)


def _first_module(task: nn.Module, replay: Callable[[], None]) -> str | None:
    """The innermost module whose output is the first that is not finite."""
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not names and not _finite(output):
                names.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in task.named_modules() if name]
    try:
        replay()
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else None


def _last_gradient(task: nn.Module) -> str | None:
    """The last parameter whose gradient is not finite: the nearest to the loss, where it came about first."""
    names = [n for n, p in trained_parameters(task).items() if p.grad is not None and not _finite(local(p.grad))]
    return names[-1] if names else None


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(local(value)).all())
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(item) for item in value)
    return True
