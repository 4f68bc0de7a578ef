"""A tiny FLUX.2-klein of random weights, exported with taps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klein import make_checkpoint
from klein_sizes import TINY

import intaglio

STAGES = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")


def write_klein(folder: Path) -> Path:
    """``folder/checkpoint`` and ``folder/bundle``, whose path is returned."""
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY)
    return export_klein(folder)


def export_klein(folder: Path, *, taps: bool = True, dtype: str = "float32", stages: Sequence[str] = STAGES) -> Path:
    """The bundle of ``folder/checkpoint``, compiled for the CPU."""
    intaglio.export(
        folder / "checkpoint", folder / "bundle", taps=taps, dtype=dtype, hidden_states=TINY.layers, stages=stages
    )
    intaglio.compile(folder / "bundle")
    return folder / "bundle"
