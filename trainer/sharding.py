"""Tensors that lie in shards on several ranks (DTensor), and those that do not, by one set of functions."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of ``tensor``, on every rank. All ranks have to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``tensor``, whole on every rank, on the device of ``model`` and, where that is sharded, sharded as it is."""
    tensor = tensor.to(model.device)
    if isinstance(model, DTensor) and tensor.shape == model.shape:
        return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
    return tensor
