"""The two sides of a comparison: an engine, or a portable graph in a runtime of others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from intaglio.engines.engine import Engine, open_engine
from intaglio.engines.references import REFERENCES, check_reference, open_reference
from intaglio.exporters.bundle import Bundle, Dim, read_bundle


class Run(Protocol):
    """A loaded stage. Outputs come one by one, so that a caller who drops them holds no more than one twice."""

    def __call__(self, feeds: Mapping[str, np.ndarray], outputs: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The chosen ``outputs`` in their order. Raises InputError, EngineError."""


@dataclass(frozen=True)
class Side:
    """One implementation of a bundle: an ``engine``, or the reference called ``name``."""

    name: str
    path: Path
    bundle: Bundle
    dims: Mapping[str, Dim]
    engine: Engine | None = None

    def graph(self, stage: str) -> Path:
        """The file of the portable graph."""
        return self.path / self.bundle.stages[stage].file

    def load(self, stage: str) -> Run:
        """The stage, ready to run. Raises EngineError, RuntimeMissingError."""
        if self.engine is None:
            reference = open_reference(self.name, self.graph(stage))
            return lambda feeds, outputs: _one_by_one(reference.run(feeds, outputs), outputs)
        session = self.engine.load(stage)
        return lambda feeds, outputs: _one_by_one(session.run(feeds, outputs, resident=outputs), outputs)


def _one_by_one(values: dict[str, Any], names: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        value = values.pop(name)
        yield name, value if isinstance(value, np.ndarray) else value.numpy()


def engine_side(bundle: str | Path, target: str) -> Side:
    """The engine of a bundle. Raises EngineError, BundleError."""
    engine = open_engine(bundle, target)
    return Side(target, engine.bundle_path, engine.bundle, engine.dims, engine)


def reference_side(bundle: str | Path, name: str) -> Side:
    """A bundle in one of ``REFERENCES``. Raises InputError, BundleError."""
    check_reference(name)
    described = read_bundle(Path(bundle))
    return Side(name, Path(bundle), described, described.dims)


__all__ = ["REFERENCES", "Run", "Side", "engine_side", "reference_side"]
