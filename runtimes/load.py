"""``load``: the pipeline of a bundle."""

from __future__ import annotations

from pathlib import Path

from intaglio.engines.engine import open_engine
from intaglio.runtimes.text_generation import TextGenerationPipeline


def load(bundle: str | Path, target: str = "cpu", *, threads: int = 0) -> TextGenerationPipeline:
    """Opens the engine that ``compile`` built for ``target``, as a pipeline of the bundle's kind.

    Raises BundleError, EngineError (which names the command that builds the engine), RuntimeMissingError.
    """
    return TextGenerationPipeline(open_engine(bundle, target), threads=threads)
