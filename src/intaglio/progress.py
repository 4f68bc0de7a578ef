"""Progress: one callback for everything that takes long, which can also cancel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from intaglio.errors import CancelledError


@dataclass(frozen=True)
class ProgressEvent:
    """``done`` of ``total`` units of ``task``; units are bytes for weights, tokens for text, stages for builds.

    ``note`` is something to be told at once, such as the memory that the task will take.
    """

    task: str
    done: int
    total: int
    unit: str
    note: str = ""


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
        if self._callback is not None:
            tell(self._callback, ProgressEvent(self._task, self._done, self._total, self._unit))


def tell(callback: ProgressCallback, event: ProgressEvent) -> None:
    """Calls back. Raises CancelledError where the answer is False."""
    answer = callback(event)
    if isinstance(answer, bool | np.bool_) and not answer:  # 0 and None go on
        raise CancelledError(f"{event.task}: cancelled after {event.done} of {event.total} {event.unit}")
