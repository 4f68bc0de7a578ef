"""Builds run in a child process: compilers crash."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from intaglio.engines.report import StageReport, bits_per_weight
from intaglio.errors import CompileError
from intaglio.progress import ProgressCallback, ProgressEvent, tell

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity

# What a child process exits with when it has said why on stderr.
REFUSED = 2
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_PR_SET_PDEATHSIG = 1
# Of a child that crashed, for the error.
_LAST_LINES = 3
_CRASHES = (4, 6, 7, 8, 11)  # what processes end of that do what they may not
_KILLED = 9  # SIGKILL, which Windows does not name


def build_in_child(
    module: str,
    request: Mapping[str, Any],
    identity: Identity,
    *,
    name: str,
    compiler: str,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Has ``intaglio.engines.<module>`` build what the request asks for: its last line of JSON is most of the report.

    ``name`` is what the graph is called in messages and ``compiler`` what builds. Raises CompileError with the child's
    own message or, of a crash, the last that it said; CancelledError.
    """
    started = time.monotonic()
    done = run_child(module, request, progress)
    if done.returncode == REFUSED and done.stderr.strip():
        raise CompileError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise CompileError(f"{name}: {compiler} {how_it_ended(done)}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return StageReport(
        **result,
        accuracy=identity.accuracy,
        bits_per_weight=bits_per_weight(result["weight_bytes"], result["weight_count"]),
        seconds=round(time.monotonic() - started, 3),
    )


def run_child(
    module: str, request: Mapping[str, Any], progress: ProgressCallback | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``intaglio.engines.<module>`` with the request as JSON on its stdin.

    Lines that it writes with :func:`say_progress` are told to ``progress``; a build that is cancelled is ended. Raises
    CancelledError.
    """
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", f"intaglio.engines.{module}", str(os.getpid())]
    if progress is None:
        return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                _ask(child.stdin, json.dumps(request))
                for line in child.stdout:
                    if not _told(line, progress):
                        lines.append(line)
            except BaseException:
                child.kill()
                raise
        said.seek(0)
        return subprocess.CompletedProcess(command, child.returncode, "".join(lines), said.read())


def _ask(stdin: Any, request: str) -> None:
    try:
        stdin.write(request)
        stdin.close()
    except BrokenPipeError:  # it ended before it read: what it left says why
        pass


def say_progress(task: str, done: int, total: int, unit: str, note: str = "") -> None:
    """In the child: a line for the parent's callback."""
    sys.stdout.write(json.dumps({"progress": [task, done, total, unit, note]}) + "\n")
    sys.stdout.flush()


def _told(line: str, progress: ProgressCallback) -> bool:
    if not line.startswith('{"progress"'):
        return False
    tell(progress, ProgressEvent(*json.loads(line)["progress"]))
    return True


def refuse(error: Exception, graph: str) -> int:
    """In the child: says why nothing is built, in one line; what it exits with."""
    if isinstance(error, OSError):
        advice = "free space, or choose another disk" if error.errno in _FULL else "check the path"
        if error.errno == errno.EFBIG:
            advice = "the system or a limit (ulimit -f) allows no files of this size"
        at = f"{error.filename}: " if error.filename else ""
        what = f"{at}{error.strerror or error}, while {graph} was built; {advice}"
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
        # It may have ended before: what a child imports takes a second.
        if len(sys.argv) > 1 and sys.argv[1] != str(os.getppid()):
            sys.exit(1)


def how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """The end of a child process that failed, for a message: how, and the last that it said."""
    crashed = done.returncode < 0
    # What failed in Python has its message in the last line.
    said = "; ".join(done.stderr.strip().splitlines()[-(_LAST_LINES if crashed else 1) :]) or "no message"
    how = f"was ended by signal {-done.returncode}" if crashed else "failed"
    ended = f"{how} while building: {said}"
    if crashed and -done.returncode in _CRASHES:
        ended += ". That is a mistake of the compiler's own: update it, or compile for another target"
    if done.returncode == -_KILLED:
        ended += (
            ". Systems end in this way what takes more memory than there is: end other programs, or build on a machine "
            "with more of it"
        )
    return ended
