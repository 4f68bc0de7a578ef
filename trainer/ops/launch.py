"""What starting a Triton kernel on torch's tensors needs to know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from intaglio.kernels.cuda.ahead_of_time import require_triton

__all__ = ["TYPE_NAMES", "architecture", "blocks", "on_its_device", "require_triton"]

TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def architecture(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and multiprocessors of a GPU; of anything else, those of a middling one."""
    if device.type != "cuda":
        return 80, 64
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor, torch.cuda.get_device_properties(device).multi_processor_count


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher that runs on the GPU of its first tensor: Triton would take the current one, and its stream."""

    @functools.wraps(launch)
    def launched(first: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        with torch.cuda.device_of(first):
            return launch(first, *rest, **settings)

    return launched


def blocks(size: int, block: int) -> int:
    """How many blocks hold ``size`` elements."""
    return -(-size // block)
