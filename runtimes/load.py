"""``load``: the pipeline of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from intaglio.engines.engine import open_engine
from intaglio.errors import InputError
from intaglio.runtimes.text_generation import TextGenerationPipeline
from intaglio.runtimes.text_to_image import TextToImagePipeline


def load(
    bundle: str | Path,
    target: str = "cpu",
    *,
    threads: int = 0,
    compute_units: str | None = None,
    memory_budget: int | None = None,
    keep_loaded: bool = True,
    lora: Mapping[str, float] | None = None,
) -> TextGenerationPipeline | TextToImagePipeline:
    """Opens the engine that ``compile`` built for ``target``, as a pipeline of the bundle's kind.

    ``threads``, ``compute_units``, ``memory_budget`` (bytes) and ``keep_loaded`` are those of a
    :class:`TextToImagePipeline`. ``lora`` are adapters by file with their strengths, for engines of the target
    ``tensorrt`` that were compiled with ``--refit``; ``set_strengths`` of the pipeline changes them. Raises
    BundleError, EngineError (which names the command that builds the engine), RuntimeMissingError, InputError for an
    option that the pipeline does not have, CheckpointError for what is no adapter.
    """
    engine = open_engine(bundle, target)
    if engine.bundle.kind == "text-to-image":
        return TextToImagePipeline(
            engine,
            threads=threads,
            compute_units=compute_units,
            memory_budget=memory_budget,
            keep_loaded=keep_loaded,
            lora=lora,
        )
    if memory_budget is not None or not keep_loaded:
        raise InputError(f"{bundle}: writes text; memory_budget and keep_loaded are for pictures")
    return TextGenerationPipeline(engine, threads=threads, compute_units=compute_units, lora=lora)
