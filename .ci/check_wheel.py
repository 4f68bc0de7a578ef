"""Checks that the wheel that `make` built holds exactly the modules and data of the tree, and the compiled library."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What modules read that is no module.
DATA = ("engines/coreml/*.txt", "engines/coreml/swift/*")


def main() -> int:
    rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    # A room that was forgotten in pyproject.toml would be missing from both sides of the comparison.
    mapped = {ROOT / folder for folder in rooms.values()}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", *DATA],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    expected = {"intaglio/py.typed"}
    unmapped = []
    for name in listed:
        path = ROOT / name
        if not path.is_file() or Path(name).parts[0] in ("tests", "tools", ".ci", "benchmarks", "recipes"):
            continue
        room = next((folder for folder in mapped if folder in path.parents), None)
        if room is None:
            unmapped.append(name)
            continue
        package = next(package for package, folder in rooms.items() if ROOT / folder == room)
        expected.add(f"{package}/{path.relative_to(room).as_posix()}")
    (wheel,) = (ROOT / "build" / "wheel").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {name for name in names if name.startswith("intaglio/")}
    libraries = {name for name in found if name.endswith((".so", ".dylib", ".dll"))}
    problems = [
        *(f"in no room of pyproject.toml: {name}" for name in unmapped),
        *(f"missing from the wheel: {name}" for name in sorted(expected - found)),
        *(f"in the wheel but not in the tree: {name}" for name in sorted(found - libraries - expected)),
    ]
    if len(libraries) != 1:
        problems.append(f"expected one compiled library, found {sorted(libraries)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"wheel: {len(expected)} files of the tree and {len(libraries)} library")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
