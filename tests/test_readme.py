"""The documents claim what is there, and no more."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from intaglio.exporters.architecture import all_architectures
from intaglio.exporters.checkpoints.gguf_blocks import BLOCK_TYPES, DENSE_TYPES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *map(str, (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in link:
            assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}"


def test_the_support_table_names_every_architecture_and_no_other() -> None:
    built = {name for architecture in all_architectures() for name in architecture.class_names}
    rows = [line for line in README.splitlines() if line.startswith(("| language models", "| picture models"))]
    assert len(rows) == 2
    assert set(re.findall(r"`([A-Z]\w+)`", " ".join(rows))) == built


def test_the_ops_for_core_ml_are_counted() -> None:
    listed = (ROOT / "engines" / "coreml" / "supported_ops.txt").read_text("utf-8").split()
    counts = Counter(name.rpartition("::")[0] for name in listed)
    page = (ROOT / "docs" / "coreml.md").read_text("utf-8")
    assert f"{counts['']} types of ONNX, {counts['com.microsoft']} of com.microsoft and {counts['intaglio']} of" in page
    assert f"{counts['']} op types of ONNX and {counts['com.microsoft']} of com.microsoft]" in README


def test_the_support_table_names_every_gguf_type_and_no_other() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| GGUF"))
    named = set(re.findall(r"\b(?:[BFTQ]\w*\d(?:_\w+)?)\b", row.partition("|")[2])) - {"GGUF"}
    assert named == {*DENSE_TYPES, *BLOCK_TYPES}
