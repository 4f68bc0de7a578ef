"""Learning rates against torch's own schedules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from intaglio.trainer.schedules import ScheduleSettings, learning_rate_factor

WARMUP, STEPS, FINAL = 7, 40, 0.1


def oracle(kind: str) -> list[float]:
    """The factors of torch's schedulers, one after another as SequentialLR has them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    warmup = lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
    rest = STEPS - WARMUP
    parts: list[Any] = [warmup]
    if kind == "constant":
        parts.append(lr_scheduler.ConstantLR(optimizer, 1.0))
    elif kind == "linear":
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, FINAL, total_iters=rest))
    elif kind == "cosine":
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=rest, eta_min=FINAL))
    else:
        parts.append(lr_scheduler.ConstantLR(optimizer, 1.0))
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, FINAL, total_iters=10))
    milestones = [WARMUP] if len(parts) == 2 else [WARMUP, STEPS - 10]
    schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones)
    factors = []
    for _ in range(STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
    return factors


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_factors_equal_those_of_torch(kind: Any) -> None:
    settings = ScheduleSettings(kind=kind, warmup=WARMUP, final=FINAL, decay=0.25)
    factor = learning_rate_factor(settings, STEPS)
    assert [factor(n) for n in range(STEPS)] == pytest.approx(oracle(kind), abs=1e-9)
    assert factor(STEPS) == factor(STEPS + 5) == (1.0 if kind == "constant" else pytest.approx(FINAL))


def test_warmup_longer_than_the_run_only_rises() -> None:
    factor = learning_rate_factor(ScheduleSettings(warmup=100), 10)
    assert [factor(n) for n in range(10)] == [(n + 1) / 100 for n in range(10)]
