"""The ranks of a run: processes that torchrun started, each with a share of the batches, or one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from intaglio.errors import InputError

_CPU = torch.device("cpu")
ParallelKind = Literal["ddp", "fsdp"]


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

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each of ``values`` over the ranks."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each of ``values`` over the ranks."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor, operation)
        result: list[float] = tensor.tolist()
        return result

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


@contextmanager
def started_ranks(device: str) -> Iterator[Ranks]:
    """The ranks of this run, as torchrun's environment tells; ``device`` is auto, cpu or cuda.

    Raises InputError where there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, but torch finds no such device; use auto or cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(device=torch.device(device))
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; start torchrun "
                f"with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
    # Gloo beside NCCL: what is gathered for checkpoints lies in ordinary memory.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(distributed.get_rank(), world_size, torch.device(device, local_rank) if device == "cuda" else _CPU)
    finally:
        distributed.destroy_process_group()


def parallelize(task: nn.Module, kind: ParallelKind, ranks: Ranks) -> nn.Module:
    """What is called in place of ``task``, whose gradients are then means over the ranks.

    ``ddp`` wraps it; ``fsdp`` shards the parameters of ``task`` itself, each block of a list of blocks on its own.
    Running statistics of batch norms become those of the batches of all ranks; what is normed by is a rank's own.
    """
    if ranks.world_size == 1:
        return task
    for module in task.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            _share_statistics(module)
    if kind == "ddp":
        # Every rank has built the same from the same files and seed, and buffers stay the same. Those of packed weights
        # are large, and NCCL has no type for some.
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(task, device_ids=devices, broadcast_buffers=False, init_sync=False)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for block in dict.fromkeys(_blocks(task)):
        if any(parameter.requires_grad for parameter in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(task, mesh=mesh)
    return task


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, but not what lists within them hold: a parameter is sharded once."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _blocks(child)


def _share_statistics(norm: _BatchNorm) -> None:
    """Has ``norm`` learn the mean and the variance of the batches of all ranks together."""
    earlier: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any) -> None:
        if norm.training:
            assert norm.running_mean is not None and norm.running_var is not None
            earlier[:] = norm.running_mean.clone(), norm.running_var.clone()

    @torch.no_grad()
    def share(_module: nn.Module, inputs: Any, _output: Any) -> None:
        if not norm.training:
            return
        values = inputs[0].detach().transpose(0, 1).flatten(1).double()
        sums = torch.stack([torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.square().sum(1)])
        distributed.all_reduce(sums)
        count, total, squares = sums
        mean = total / count
        variance = (squares - count * mean.square()).clamp(min=0) / (count - 1)
        assert norm.num_batches_tracked is not None
        share_of_new = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        for buffer, before, new in zip((norm.running_mean, norm.running_var), earlier, (mean, variance), strict=True):
            assert buffer is not None
            buffer.copy_(before.lerp(new.to(before.dtype), share_of_new))

    norm.register_forward_pre_hook(keep)
    norm.register_forward_hook(share)


def reshard(module: nn.Module) -> None:
    """Drops the whole weights that a forward pass without a backward pass left of a sharded ``module``.

    The next pass gathers them anew; until then it would not see that its shards changed.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def set_gradient_sync(module: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass takes the mean of the gradients over the ranks; only the last of a step has to."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = wanted
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
