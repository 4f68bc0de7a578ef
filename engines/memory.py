"""Memory of this process, now and at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from intaglio.engines.target import is_on_gpu


@dataclass(frozen=True)
class _Groups:
    """Where a version of Linux's control groups says what memory a group may have, and what it has."""

    root: Path
    limit: str
    used: str
    cached: str


# By the controllers that /proc/self/cgroup names them with: version 2 names none.
_GROUPS = {
    "": _Groups(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    "memory": _Groups(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def rss_bytes() -> int:
    """The resident set of this process, in bytes; 0 where the system does not say. Linux only."""
    return _status_bytes("VmRSS")


def own_bytes() -> int:
    """What of the resident set is no page of a file, in bytes; 0 where the system does not say. Linux only."""
    return _status_bytes("RssAnon")


def _status_bytes(name: str) -> int:
    try:
        match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
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
    # Not getrusage: on Linux its figure also covers the process that this one was forked from.
    if told := _status_bytes("VmHWM"):
        return told
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss() -> None:
    """Starts the measurement of :func:`peak_rss_bytes` anew. Linux only; elsewhere it does nothing."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def free_bytes() -> int | None:
    """What this process and those it starts can still take, swap included; None where the system does not say.

    Linux only. Limits of control groups, as containers have them, count; what a file's pages take can be had back.
    """
    try:
        text = Path("/proc/meminfo").read_text("utf-8")
    except OSError:
        return None
    found = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", text)}
    if "MemAvailable" not in found:
        return None
    return min([found["MemAvailable"] + found.get("SwapFree", 0), *_left_by_groups()])


def _left_by_groups() -> list[int]:
    """What each control group of this process leaves it."""
    left = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in _GROUPS:
                continue
            kind = _GROUPS[controllers]
            folder = kind.root / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(kind.root) and (group / kind.limit).is_file():
                    left.append(_left(group, kind))
    return left


def _left(group: Path, kind: _Groups) -> int:
    limit = (group / kind.limit).read_text("utf-8").strip()
    if limit == "max":
        return sys.maxsize
    cached = re.search(rf"^{kind.cached} (\d+)$", (group / "memory.stat").read_text("utf-8"), re.MULTILINE)
    used = int((group / kind.used).read_text("utf-8")) - (int(cached[1]) if cached else 0)
    return max(int(limit) - used, 0)


def return_freed_memory() -> None:
    """Gives what was freed back to the system, which the C library keeps for later. glibc only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
