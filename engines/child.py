"""Builds run in a child process: compilers crash."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from intaglio.progress import ProgressCallback, ProgressEvent, tell

# What a child process exits with when it has said why on stderr.
REFUSED = 2


def run_child(
    module: str, request: Mapping[str, Any], progress: ProgressCallback | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``intaglio.engines.<module>`` with the request as JSON on its stdin.

    Lines that it writes with :func:`say_progress` are told to ``progress``; a build that is cancelled is ended. Raises
    CancelledError.
    """
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", f"intaglio.engines.{module}"]
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


def say_progress(task: str, done: int, total: int, unit: str) -> None:
    """In the child: a line for the parent's callback."""
    sys.stdout.write(json.dumps({"progress": [task, done, total, unit]}) + "\n")
    sys.stdout.flush()


def _told(line: str, progress: ProgressCallback) -> bool:
    if not line.startswith('{"progress"'):
        return False
    tell(progress, ProgressEvent(*json.loads(line)["progress"]))
    return True


def how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """The end of a child process that failed, for a message."""
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"{how} while building: {last[0]}"
