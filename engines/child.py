"""Builds run in a child process: compilers crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# What a child process exits with when it has said why on stderr.
REFUSED = 2


def run_child(module: str, request: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs ``intaglio.engines.<module>`` with the request as JSON on its stdin."""
    # -P: without it, modules in the working folder would stand in for the standard library's.
    command = [sys.executable, "-P", "-m", f"intaglio.engines.{module}"]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)


def how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """The end of a child process that failed, for a message."""
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"{how} while building: {last[0]}"
