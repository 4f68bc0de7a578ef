"""What processes that were killed left behind."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

_A_DAY = 24 * 60 * 60


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Removes folders in ``folder`` whose names begin with ``prefix`` and that nothing has changed for a day."""
    for left in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _A_DAY:
                shutil.rmtree(left, ignore_errors=True)
