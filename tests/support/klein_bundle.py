"""A tiny FLUX.2-klein of random weights, exported with taps."""

from __future__ import annotations

from pathlib import Path

from klein import make_checkpoint
from klein_sizes import TINY

import intaglio


def write_klein(folder: Path) -> Path:
    """``folder/checkpoint`` and ``folder/bundle``, whose path is returned."""
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY)
    return export_klein(folder)


def export_klein(folder: Path, *, taps: bool = True, dtype: str = "float32") -> Path:
    """The bundle of ``folder/checkpoint``, compiled for the CPU."""
    intaglio.export(folder / "checkpoint", folder / "bundle", taps=taps, dtype=dtype, hidden_states=TINY.layers)
    intaglio.compile(folder / "bundle")
    return folder / "bundle"
