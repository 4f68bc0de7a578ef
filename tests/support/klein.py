"""``tools/make_checkpoint.py`` as a module: FLUX.2-klein checkpoints of random weights in each spelling."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    make_checkpoint = importlib.import_module("make_checkpoint")

__all__ = ["make_checkpoint"]
