"""Targets lean on what belongs to no target, and never on one another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from intaglio import engines
from intaglio.engines.target import TARGETS

FOLDER = Path(engines.__file__).parent
# Patterns of what belongs to a target, or to those that share a runtime.
FAMILIES = {
    "cpu": ("cpu.py", "cpu_*.py"),
    "coreml": ("coreml/**/*.py",),
    "nvidia": ("nvidia/**/*.py", "tensorrt.py", "tensorrt_rtx.py", "cuda.py"),
}


def files_of(family: str) -> list[Path]:
    return [path for pattern in FAMILIES[family] for path in FOLDER.glob(pattern)]


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def modules_of(files: list[Path]) -> set[str]:
    parts = [path.relative_to(FOLDER).with_suffix("").parts for path in files]
    return {".".join(("intaglio", "engines", *(part for part in each if part != "__init__"))) for each in parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_targets_imports_another(family: str) -> None:
    files = files_of(family)
    assert len(files) > 3
    others = modules_of([path for other in FAMILIES if other != family for path in files_of(other)])
    found = {(file.name, name) for file in files for name in imported(file) & others}
    assert not found, found


def test_no_target_imports_another() -> None:
    modules = {target: f"intaglio.engines.{target.replace('-', '_')}" for target in TARGETS}
    for target, module in modules.items():
        file = FOLDER / f"{module.rsplit('.', 1)[1]}.py"
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        assert not imported(file) & (set(modules.values()) - {module}), target
