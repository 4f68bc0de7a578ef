"""How far TensorRT's builder is, told to the parent process."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from intaglio.engines.child import say_progress
from intaglio.engines.memory import own_bytes

_SECONDS = 0.25


def progress_monitor(trt: Any, name: str, *, says_steps: bool = True) -> Any:
    """TensorRT's monitor of a build: it tells the steps of the outermost phase.

    The names of phases go to stderr: of a crash, they are what is left.
    """

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self._outer = ""

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            sys.stderr.write(f"phase {phase}\n")
            sys.stderr.flush()
            self._steps[phase] = steps
            if not parent:
                self._outer = phase

        def step_complete(self, phase: str, step: int) -> bool:
            if says_steps and phase == self._outer:
                say_progress(f"build {name}", step + 1, self._steps[phase], "steps")
            return True

        def phase_finish(self, phase: str) -> None:
            self._steps.pop(phase, None)

    return Monitor()


def can_watch_memory() -> bool:
    """Whether :func:`memory_watched` knows anything here."""
    return own_bytes() > 0


@contextlib.contextmanager
def memory_watched(name: str, weight_bytes: int) -> Iterator[None]:
    """Tells how many bytes of weights a build has taken in, by the memory that it has taken meanwhile.

    TensorRT for RTX does all but a hundredth of its work in one step, in which it copies weight by weight.
    """
    start, total, done = own_bytes(), max(weight_bytes, 1), threading.Event()

    def watch() -> None:
        while not done.wait(_SECONDS):
            taken = min(max(own_bytes() - start, 0), total - 1)
            say_progress(f"build {name}", taken, total, "bytes")

    watcher = threading.Thread(target=watch, daemon=True)
    say_progress(f"build {name}", 0, total, "bytes")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    say_progress(f"build {name}", total, total, "bytes")
