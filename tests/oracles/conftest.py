"""Bundles and options that several comparisons share."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure import intaglio
from smollm2_bundle import SmolLM2


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    path = tmp_path_factory.mktemp("bundles") / "smollm2"
    exported = intaglio("export", smollm2_gguf, path)
    assert exported.returncode == 0, exported.stderr
    compiled = intaglio("compile", path, "--json")
    assert compiled.returncode == 0, compiled.stderr
    return SmolLM2(path, exported, compiled)


@pytest.fixture
def write_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--write-goldens"))
