"""Runs mypy on the installed wheel, from another folder, and checks that it looked at every module of the tree."""

from __future__ import annotations

import importlib.util
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
    # mypy counts folders of other files, such as the Swift package's, as packages without a module of their own.
    checked = int(match[1]) - _folders_without_modules()
    if checked != modules:
        print(f"mypy checked {checked} files, the tree has {modules}", file=sys.stderr)
        return 1
    return 0


def _folders_without_modules() -> int:
    spec = importlib.util.find_spec("intaglio")
    assert spec is not None and spec.submodule_search_locations, "the wheel is installed"
    installed = Path(spec.submodule_search_locations[0])
    folders = [path for path in installed.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    return sum(not (folder / "__init__.py").exists() for folder in folders)


if __name__ == "__main__":
    sys.exit(main())
