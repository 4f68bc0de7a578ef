"""A tiny FLUX.2-klein of random weights, exported with taps."""

from __future__ import annotations

from pathlib import Path

from klein import make_checkpoint
from klein_sizes import TINY

import intaglio


def write_klein(folder: Path, *, seed: int = 0, taps: bool = True, compiled: bool = True) -> Path:
    """``folder/checkpoint`` and ``folder/bundle``, whose path is returned."""
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY, seed)
    return export_klein(folder, taps=taps, compiled=compiled)


def export_klein(folder: Path, *, taps: bool = True, compiled: bool = True) -> Path:
    """The bundle of ``folder/checkpoint``."""
    intaglio.export(folder / "checkpoint", folder / "bundle", taps=taps, hidden_states=TINY.layers)
    if compiled:
        intaglio.compile(folder / "bundle")
    return folder / "bundle"
