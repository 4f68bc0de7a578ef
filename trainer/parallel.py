"""The ranks of a run: processes that torchrun started, each with a share of the batches, or one alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from intaglio.trainer.tasks.task import Task

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process among ``world_size``, and the device that it computes on."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The sums of each of ``values`` over the ranks."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        if self.world_size > 1:
            distributed.barrier()


def parallelize(task: Task, kind: str, ranks: Ranks) -> nn.Module:
    """What is called in place of ``task``, whose gradients are then means over the ranks.

    ``ddp`` wraps it; ``fsdp`` shards the parameters of ``task`` itself, block by block.
    """
    if ranks.world_size == 1:
        return task
    if kind == "ddp":
        return DistributedDataParallel(task, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)
    from torch.distributed.fsdp import fully_shard

    for module in task.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(task)
    return task


def set_gradient_sync(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass takes the mean of the gradients over the ranks; only the last of a step has to."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = wanted
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
