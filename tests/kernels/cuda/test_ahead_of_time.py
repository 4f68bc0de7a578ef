"""The kernels compiled for each architecture, with no GPU: what they take of a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_kernels import all_variants, compiled, plugin_variants, tile_of, variants, written_tables

from intaglio.errors import CompileError
from intaglio.kernels.cuda.ahead_of_time import ARCHITECTURES, PORTABLE_SHARED_BYTES, compile_kernel
from intaglio.kernels.cuda.variants import attention_variant

# Bytes of shared memory that a block may have.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def rows_of_docs() -> dict[str, list[str]]:
    """The cells of each kernel in the tables of the docs."""
    rows = [line.strip("| ").split(" | ") for line in written_tables().splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows if name not in ("kernel", "---")}


def cell_of(name: str, sm: int) -> str:
    row = rows_of_docs()[name]
    return row[1 + ARCHITECTURES.index(sm)] if len(row) > 2 else row[1]


def check(figures: dict[str, Any], sm: int) -> None:
    name = figures["kernel"]
    assert figures["stack"] == 0, f"{name} spills registers"
    assert figures["tensor_ops"] > 0, f"{name} has no matrix instruction"
    limit = PORTABLE_SHARED_BYTES if name.startswith("plugin") else SHARED_BYTES[sm]
    assert figures["shared"] <= limit, name
    assert figures["target"] == (f"sm_{sm}a" if sm >= 90 else f"sm_{sm}")
    # Registers differ between versions of the compiler; shared memory follows from the tile.
    assert cell_of(name, sm).split(" / ")[1] == f"{figures['shared']:,}", f"{name}: the docs say another"


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_kernels_fit(sm: int) -> None:
    """On each architecture what differs between them most; `--write-docs` of cuda_kernels.py compiles all."""
    names = ["ternary, many rows, bf16", "attention, D 128, bf16", "gradient of keys, D 128, bf16, causal"]
    if sm == 90:
        names = [name for name, _ in variants(sm)]
    kernels = compiled(sm, names)
    assert [each["kernel"] for each in kernels] == names
    for figures in kernels:
        check(figures, sm)


def test_plugins_fit() -> None:
    names = [name for name, _ in plugin_variants()]
    kernels = compiled(80, names)
    assert [each["kernel"] for each in kernels] == names
    for figures in kernels:
        check(figures, 80)


def test_the_docs_have_each_kernel_and_its_tile() -> None:
    rows = rows_of_docs()
    assert list(rows) == [name for name, _ in all_variants(80)]
    for sm in ARCHITECTURES:
        for name, variant in all_variants(sm):
            first, *others = rows[name][0].split("; on ")
            told = {int(on): tile for each in others for on, tile in _by_architecture(each)}
            assert told.get(sm, first) == tile_of(variant), f"{name} on sm_{sm}"
    assert "spilled" not in written_tables()


def _by_architecture(text: str) -> list[tuple[str, str]]:
    words = text.split(" ")
    ends = next(i for i, word in enumerate(words) if i % 2 and word != "and")
    return [(on, " ".join(words[ends:])) for on in words[:ends:2]]


def test_an_interpreted_kernel_is_not_compiled() -> None:
    with pytest.raises(CompileError, match="TRITON_INTERPRET=1 says"):
        compile_kernel(attention_variant(64, "fp16", 80), 80)
