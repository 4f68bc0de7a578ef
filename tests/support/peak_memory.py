"""The memory that a block of code allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Peak:
    """``nbytes`` is known when the block ends."""

    nbytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Counts the most bytes that Python and NumPy hold at once within the block, beyond those before it."""
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
