"""Memory of this process, now and at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from pathlib import Path

from intaglio.engines.target import is_on_gpu


def rss_bytes() -> int:
    """The resident set of this process, in bytes; 0 where the system does not say. Linux only."""
    try:
        match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def used_bytes(target: str) -> int:
    """What engines of ``target`` are counted in: memory of the GPU that this process holds, or its resident set.

    Of engines that onnxruntime holds on a GPU nothing is known: 0.
    """
    if not is_on_gpu(target):
        return rss_bytes()
    device = sys.modules.get("intaglio.engines.nvidia.device")
    return 0 if device is None else device.used_bytes()


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far, in bytes; 0 where the system does not say."""
    try:
        # Not getrusage: on Linux its figure also covers the process that this one was forked from.
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
        if match:
            return int(match[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> None:
    """Starts the measurement of :func:`peak_rss_bytes` anew. Linux only; elsewhere it does nothing."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def return_freed_memory() -> None:
    """Gives what was freed back to the system, which the C library keeps for later. glibc only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
