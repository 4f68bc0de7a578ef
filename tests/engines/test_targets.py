"""Targets lean on what belongs to no target, and never on one another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from intaglio import engines
from intaglio.engines.target import TARGETS

FOLDER = Path(engines.__file__).parent


def files_of(target: str) -> list[Path]:
    return [*FOLDER.glob(f"{target}.py"), *FOLDER.glob(f"{target}_*.py"), *(FOLDER / target).rglob("*.py")]


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_imports_another(target: str) -> None:
    files = files_of(target)
    assert len(files) > 3
    others = {path.relative_to(FOLDER).with_suffix("").parts for o in TARGETS if o != target for path in files_of(o)}
    modules = {".".join(("intaglio", "engines", *parts)) for parts in others} | {
        f"intaglio.engines.{other}" for other in TARGETS if other != target
    }
    found = {(file.name, name) for file in files for name in imported(file) & modules}
    assert not found, found
