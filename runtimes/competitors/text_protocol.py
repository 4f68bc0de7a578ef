"""What ``bench`` asks of a competitor that writes text: prefill of a prompt, and greedy tokens after it, timed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np


class Generation(Protocol):
    """One generation: ``step`` runs what is waiting and gives logits ``[1, vocabulary]``, ``put`` adds a token."""

    def step(self) -> np.ndarray: ...

    def put(self, tokens_B: np.ndarray, /) -> None: ...


def time_generation(generation: Generation, new_tokens: int) -> tuple[float, list[float]]:
    """Seconds of prefill and of each of ``new_tokens`` greedy tokens after it."""
    seconds = []
    for _ in range(new_tokens + 1):
        started = time.perf_counter()
        logits_BV = generation.step()
        seconds.append(time.perf_counter() - started)
        generation.put(logits_BV.argmax(axis=-1))
    return seconds[0], seconds[1:]


def answer_generations(start: Callable[[list[int]], Generation]) -> int:
    """Answers every line on stdin, ``{"prompt": ids, "new_tokens": count}``, with ``{"prefill", "steps"}``."""
    for line in sys.stdin:
        asked = json.loads(line)
        prefill, steps = time_generation(start(asked["prompt"]), asked["new_tokens"])
        sys.stdout.write(json.dumps({"prefill": prefill, "steps": steps}) + "\n")
        sys.stdout.flush()
    return 0
