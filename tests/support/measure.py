"""Runs a command and measures its peak memory: ``python measure.py COMMAND…`` prints JSON on the last line.

The kernel counts the parent's memory into a child's peak until the child has started its own program, so the command
is started from this small process rather than from the tests, which have torch loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str
    peak_rss_mib: float


def intaglio(*arguments: object, env: dict[str, str] | None = None) -> Measured:
    """Runs the installed command line."""
    command = [str(Path(sys.executable).parent / "intaglio"), *map(str, arguments)]
    done = subprocess.run(
        [sys.executable, __file__, *command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **(env or {})},
    )
    return Measured(**json.loads(done.stdout))


def main() -> None:
    """Runs ``sys.argv[1:]``."""
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout, stderr = process.communicate()
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    result = {"returncode": process.returncode, "stdout": stdout, "stderr": stderr, "peak_rss_mib": peak}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
