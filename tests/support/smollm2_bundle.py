"""The real model that tests share, exported and compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from measure import Measured


@dataclass(frozen=True)
class SmolLM2:
    """The exported and compiled SmolLM2, and what the command line took to make it."""

    path: Path
    export: Measured
    compile: Measured
