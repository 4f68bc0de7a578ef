"""What the machine can do, measured by loops of our CPU library: what a benchmark's rows are compared with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from intaglio.errors import EngineError
from intaglio.kernels.cpu.library import library_path, load_library

# Multiplications and additions that a core with two ports starts in a cycle: a loop that reaches less than
# VALID_SHARE of them was disturbed, or the core is another one, and says little of what a kernel could reach.
OPERATIONS_PER_CYCLE = {
    "vpdpbusd_zmm": 2 * 64 * 2,
    "vpdpbusd_ymm": 2 * 32 * 2,
    # One unit, which takes sixteen cycles for 16 x 16 x 64, and for 16 x 16 x 32 halves.
    "amx_int8": 16 * 64 * 2,
    "amx_bfloat16": 16 * 32 * 2,
    "float32_fma_zmm": 2 * 16 * 2,
    "float32_fma_ymm": 2 * 8 * 2,
    "sdot": 2 * 16 * 2,
    "smmla": 2 * 32 * 2,
    "float32_fma_neon": 2 * 4 * 2,
}
VALID_SHARE = 0.85
# What the products of each accuracy are made of, the fastest first. AMX has a column of its own: most machines lack it.
INT8_LOOPS = ("vpdpbusd_zmm", "vpdpbusd_ymm", "smmla", "sdot")
AMX_LOOPS = ("amx_int8", "amx_bfloat16")
FLOAT32_LOOPS = ("float32_fma_zmm", "float32_fma_ymm", "float32_fma_neon")
_ISA = "INTAGLIO_CPU_ISA"
# Short enough to fit between two turns of what else runs on a machine; the best of several counts.
_SECONDS, _TRIES = 0.004, 8


@cache
def _library() -> Any:
    try:
        library = load_library()
        library.intaglio_ceiling.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_double]
        library.intaglio_clock.argtypes = [ctypes.c_int, ctypes.c_double]
        library.intaglio_read_bandwidth.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for name in ("intaglio_ceiling", "intaglio_clock", "intaglio_read_bandwidth"):
            getattr(library, name).restype = ctypes.c_double
    except AttributeError as error:
        raise EngineError(
            f"{library_path()}: is damaged or of another version ({error}); install it with "
            "`pip install --force-reinstall intaglio`"
        ) from error
    return library


@contextmanager
def forced_instruction_set(name: str) -> Iterator[None]:
    """Kernels made within use this set."""
    before = os.environ.get(_ISA)
    os.environ[_ISA] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ISA]
        else:
            os.environ[_ISA] = before


def share_of_ports(loop: str, operations_per_second: float, clock: float, threads: int) -> float:
    """Of what two ports at ``clock`` cycles a second could start on ``threads`` cores, the part that was reached."""
    return operations_per_second / (OPERATIONS_PER_CYCLE[loop] * clock * threads)


def is_valid(share: float) -> bool:
    """Whether a ceiling that reached this share of the ports counts as one."""
    return share >= VALID_SHARE


class Ceilings:
    """The best that loops and clock have reached so far, in turns with what they are compared with."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.clock = 0.0
        self.loops: dict[str, float] = {name: 0.0 for name in OPERATIONS_PER_CYCLE if self._loop(name)}

    def measure(self, names: Iterable[str] | None = None) -> None:
        """Runs the loops of these names (all that the machine has) and counts the clock, once more.

        A loop that something disturbed is run again a few times: the ceiling is what the machine can do.
        """
        for _ in range(_TRIES):
            self.clock = max(self.clock, _library().intaglio_clock(self.threads, _SECONDS))
        for name in names or self.loops:
            for _ in range(_TRIES):
                speed = self._loop(name)
                self.loops[name] = max(self.loops[name], speed)
                if is_valid(share_of_ports(name, speed, self.clock, self.threads)):
                    break

    def include(self, other: Ceilings) -> None:
        """Takes what another one has reached."""
        self.clock = max(self.clock, other.clock)
        for name, speed in other.loops.items():
            self.loops[name] = max(self.loops.get(name, 0.0), speed)

    def _loop(self, name: str) -> float:
        return float(_library().intaglio_ceiling(name.encode(), self.threads, _SECONDS))

    def first_of(self, names: Sequence[str]) -> str | None:
        """The first loop of these that the machine has."""
        return next((name for name in names if name in self.loops), None)

    def describe(self) -> dict[str, Any]:
        """For ``ceilings`` of a benchmark: GOP/s of each loop, its share of two ports at the clock, whether it counts.

        A loop that the machine or the build lacks is null.
        """
        found: dict[str, Any] = {"clock_ghz": round(self.clock / 1e9, 3)}
        for name in OPERATIONS_PER_CYCLE:
            if name not in self.loops:
                found[f"{name}_gops"] = None
                continue
            share = share_of_ports(name, self.loops[name], self.clock, self.threads)
            found[f"{name}_gops"] = round(self.loops[name] / 1e9, 1)
            found[f"{name}_share_of_ports"] = round(share, 3)
            found[f"{name}_valid"] = is_valid(share)
        return found


def read_bandwidth_of(buffers: Sequence[np.ndarray], threads: int) -> float:
    """Bytes a second at which ``threads`` threads read all buffers, which are contiguous, once."""
    count = len(buffers)
    addresses = (ctypes.c_void_p * count)(*[buffer.ctypes.data for buffer in buffers])
    sizes = (ctypes.c_size_t * count)(*[buffer.nbytes for buffer in buffers])
    return float(_library().intaglio_read_bandwidth(addresses, sizes, count, threads))
