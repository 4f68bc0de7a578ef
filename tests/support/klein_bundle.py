"""A tiny FLUX.2-klein of random weights, exported with taps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klein import make_checkpoint
from klein_sizes import TINY

import intaglio

STAGES = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")


def write_klein(folder: Path, **options: Any) -> Path:
    """``folder/checkpoint`` and ``folder/bundle``, whose path is returned."""
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY)
    return export_klein(folder, **options)


def export_klein(folder: Path, *, taps: bool = True, stages: Sequence[str] | None = STAGES, **options: Any) -> Path:
    """The bundle of ``folder/checkpoint``, compiled for the CPU; the ``options`` are those of an export."""
    if stages is None or "text_encoder" in stages:
        options["hidden_states"] = TINY.layers
    intaglio.export(folder / "checkpoint", folder / "bundle", taps=taps, stages=stages, **options)
    intaglio.compile(folder / "bundle")
    return folder / "bundle"
