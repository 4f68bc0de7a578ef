"""How far TensorRT's builder is, told to the parent process."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from intaglio.engines.child import say_progress
from intaglio.engines.memory import own_bytes
from intaglio.engines.nvidia.limits import BuildSize

_SECONDS = 0.25
_PARTS = 1000


def progress_monitor(
    trt: Any, name: str, *, says_steps: bool = True, after_step: Callable[[], object] = lambda: None
) -> Any:
    """TensorRT's monitor of a build: it tells the steps of the outermost phase, and calls ``after_step`` after any.

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
            after_step()
            return True

        def phase_finish(self, phase: str) -> None:
            self._steps.pop(phase, None)

    return Monitor()


def can_watch_memory() -> bool:
    """Whether :func:`memory_watched` knows anything here."""
    return own_bytes() > 0


@contextlib.contextmanager
def memory_watched(name: str, size: BuildSize) -> Iterator[None]:
    """Tells how far a build is, by the memory that it has taken: in parts of a thousand.

    TensorRT for RTX does all but a hundredth of its work in one step of the monitor's.
    """
    start, done = own_bytes(), threading.Event()

    def say(part: int) -> None:
        say_progress(f"build {name}", part, _PARTS, "thousandths")

    def watch() -> None:
        so_far = 0
        while not done.wait(_SECONDS):
            so_far = max(so_far, min(int(_PARTS * size.fraction(own_bytes() - start)), _PARTS - 1))
            say(so_far)

    watcher = threading.Thread(target=watch, daemon=True)
    say(0)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    say(_PARTS)
