"""Gives back the memory of a file that a parser mapped and has read."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_MADV_DONTNEED = 4


def release_pages(file: Path) -> int:
    """Drops the pages that this process mapped of ``file``; bytes of the mappings. Linux only, elsewhere 0.

    They are read again from the file when somebody looks. Mappings that may be written to are left alone: what was
    written there would be lost.
    """
    if sys.platform != "linux":
        return 0
    libc, released = ctypes.CDLL(None, use_errno=True), 0
    path = os.path.realpath(file)
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        # Address range, permissions, offset, device, inode, path.
        fields = line.split(None, 5)
        if len(fields) < 6 or fields[5] != path or "w" in fields[1]:
            continue
        first, end = (int(address, 16) for address in fields[0].split("-"))
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED) == 0:
            released += end - first
    return released
