"""Progress: one callback for everything that takes long, which can also cancel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from intaglio.errors import CancelledError


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` units of ``task``; units are bytes for weights, tokens for text, stages for builds."""

    task: str
    done: int
    total: int
    unit: str


# Returns False (or NumPy's) to cancel; anything else goes on.
ProgressCallback = Callable[[ProgressEvent], object]


class Progress:
    """Counts one task and tells the callback. Raises CancelledError when the callback returns False."""

    def __init__(self, callback: ProgressCallback | None, task: str, total: int, unit: str) -> None:
        self._callback = callback
        self._task, self._total, self._unit = task, total, unit
        self._done = 0
        self.advance(0)

    def advance(self, units: int) -> None:
        """``units`` more are done."""
        self._done += units
        if self._callback is None:
            return
        answer = self._callback(ProgressEvent(self._task, self._done, self._total, self._unit))
        if isinstance(answer, bool | np.bool_) and not answer:  # 0 and None go on
            raise CancelledError(f"{self._task}: cancelled after {self._done} of {self._total} {self._unit}")
