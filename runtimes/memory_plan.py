"""How much memory a picture takes, stage by stage, and how to make it within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.engines.engine import Engine
from intaglio.runtimes.picture_request import PictureRequest


@dataclass(frozen=True)
class MemoryPlan:
    """How a call runs: whether stages stay loaded, how many rows of a batch run at once (None: all), and whether the
    decoder works in bands.
    """

    keep_loaded: bool = True
    rows: int | None = None
    tiled: bool = False


def make_plan(engine: Engine, request: PictureRequest, budget: int | None, *, keep_loaded: bool) -> MemoryPlan:
    return MemoryPlan(keep_loaded=keep_loaded, tiled=bool(request.tiled))
