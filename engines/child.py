"""Builds run in a child process: compilers crash."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

# What a child process exits with when it has said why on stderr.
REFUSED = 2
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_PR_SET_PDEATHSIG = 1


def run_child(module: str, request: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs ``intaglio.engines.<module>`` with the request as JSON on its stdin."""
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", f"intaglio.engines.{module}"]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)


def refuse(error: Exception, graph: str) -> int:
    """In the child: says why nothing is built, in one line; what it exits with."""
    if isinstance(error, OSError):
        advice = "free space, or choose another disk" if error.errno in _FULL else "check the path"
        what = f"{error.filename or graph}: {error.strerror or error}, while {graph} was built; {advice}"
    else:
        what = str(error)
    sys.stderr.write(" ".join(what.split()) + "\n")
    return REFUSED


def fail(error: Exception) -> int:
    """In the child: its own mistake, with the place of it; the last line says what it was."""
    traceback.print_exc()
    sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}\n")
    return 1


def end_with_parent() -> None:
    """In the child: what builds for nobody ends. Linux only; elsewhere it builds on to the end."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """The end of a child process that failed, for a message."""
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"{how} while building: {last[0]}"
