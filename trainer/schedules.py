"""Learning rates over the steps of a run, as factors of each group's own rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]


class ScheduleSettings(BaseModel):
    """``[schedule]`` of a recipe: ``final`` the factor at the end, ``decay`` the share of steps in which wsd falls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: ScheduleKind = "cosine"
    warmup: int = Field(default=0, ge=0)
    final: float = Field(default=0.0, ge=0.0, le=1.0)
    decay: float = Field(default=0.2, gt=0.0, le=1.0)


def learning_rate_factor(settings: ScheduleSettings, steps: int) -> Callable[[int], float]:
    """The factor of the update after ``n`` updates, of ``steps`` in all.

    It rises linearly over ``warmup`` updates (the first takes 1 / warmup), then falls to ``final``, which the update
    after the last would take. ``wsd`` (warmup, stable, decay) stays at 1 until its last ``decay`` of the steps.
    """
    warmup = settings.warmup

    def factor(n: int) -> float:
        if n < warmup:
            return (n + 1) / warmup
        begin = warmup
        if settings.kind == "wsd":
            begin = max(warmup, steps - math.ceil(settings.decay * steps))
        share = min(1.0, max(0.0, (n - begin) / max(1, steps - begin)))
        if settings.kind == "constant":
            return 1.0
        if settings.kind == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return 1.0 - (1.0 - settings.final) * share

    return factor
