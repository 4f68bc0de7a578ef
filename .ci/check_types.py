"""Runs mypy on the installed wheel, from another folder, and checks that it looked at every module of the tree."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("src/intaglio", "scripts", "exporters", "kernels", "engines", "runtimes", "trainer")


def main() -> int:
    modules = sum(len(list((ROOT / room).rglob("*.py"))) for room in ROOMS)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "-p",
            "intaglio",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, end="")
    match = re.search(r"no issues found in (\d+) source files", done.stdout)
    if done.returncode or match is None:
        return 1
    if int(match[1]) != modules:
        print(f"mypy checked {match[1]} files, the tree has {modules}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
