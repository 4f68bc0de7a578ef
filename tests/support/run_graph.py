"""One run of a portable graph in a runtime of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from intaglio.engines.references import Feeds, OnnxruntimeReference, TractReference


def run_onnxruntime(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """All outputs in onnxruntime."""
    return OnnxruntimeReference(graph).run(feeds)


def run_tract(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """All outputs in tract."""
    return TractReference(graph).run(feeds)
