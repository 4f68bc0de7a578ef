"""Memory that is not zero by chance: what torch allocates uninitialized holds NaN, or 77."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def poison(patch: pytest.MonkeyPatch) -> None:
    """Makes ``torch.empty`` fill what it returns."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    patch.setattr(torch, "empty", poisoned)
