"""Intaglio takes trained models to machines: export, compile, run.

>>> import intaglio
>>> intaglio.export("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")  # doctest: +SKIP
>>> intaglio.compile("smollm2", target="cpu")  # doctest: +SKIP
>>> intaglio.load("smollm2")("Once upon a time").text  # doctest: +SKIP

A picture pipeline paints:

>>> intaglio.load("klein")("a tiny bonsai tree", seed=42).images[0].save("bonsai.png")  # doctest: +SKIP

An ONNX file that others wrote needs no export:

>>> intaglio.compile("model.onnx")  # doctest: +SKIP
>>> intaglio.load("model.onnx").run({"x": x})  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intaglio.engines.report import Report
    from intaglio.errors import IntaglioError
    from intaglio.exporters.checkpoints import open_checkpoint
    from intaglio.exporters.convert import convert
    from intaglio.exporters.export import export
    from intaglio.progress import ProgressCallback
    from intaglio.runtimes.bench import bench
    from intaglio.runtimes.parity import parity
    from intaglio.trainer.train import train

__all__ = ["IntaglioError", "bench", "compile", "convert", "export", "load", "open_checkpoint", "parity", "train"]

# Loaded when first used: exporting needs no runtime, and running no exporter.
_WHERE = {
    "bench": ("intaglio.runtimes.bench", "bench"),
    "IntaglioError": ("intaglio.errors", "IntaglioError"),
    "convert": ("intaglio.exporters.convert", "convert"),
    "export": ("intaglio.exporters.export", "export"),
    "parity": ("intaglio.runtimes.parity", "parity"),
    "train": ("intaglio.trainer.train", "train"),
    "open_checkpoint": ("intaglio.exporters.checkpoints", "open_checkpoint"),
}


def compile(  # noqa: A001 - the verb's name
    source: str | Path,
    target: str = "cpu",
    *,
    output: str | Path | None = None,
    accuracy: str = "exact",
    shapes: str | Sequence[str] | None = None,
    dtype: str | None = None,
    deployment_target: str | None = None,
    weights: str | None = None,
    sm: str | None = None,
    provider: str | None = None,
    refit: bool = False,
    progress: ProgressCallback | None = None,
) -> Report:
    """Compiles a bundle (``engines.compile.compile_bundle``) or an ONNX file (``engines.compile_model.compile_model``).

    ``dtype``, ``deployment_target`` and ``weights`` are options of the target ``coreml``: see its ``Options``;
    ``dtype`` and ``sm`` of ``tensorrt-rtx``; ``dtype`` and ``refit`` of ``tensorrt`` (LoRA may exchange weights of
    its engines); ``dtype`` and ``provider`` of ``cuda``.
    Raises InputError where ``output`` is given for a bundle, whose engines lie in it; else the errors of those two.
    """
    from intaglio.engines.model_engine import is_model
    from intaglio.errors import InputError

    given = {
        "dtype": dtype,
        "deployment_target": deployment_target,
        "weights": weights,
        "sm": sm,
        "provider": provider,
        "refit": "yes" if refit else None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if is_model(Path(source)):
        from intaglio.engines.compile_model import compile_model

        return compile_model(
            source, target, output=output, accuracy=accuracy, shapes=shapes, options=options, progress=progress
        )
    from intaglio.engines.compile import compile_bundle

    if output is not None:
        raise InputError(f"{source}: an output folder is for ONNX files; the engines of a bundle lie in the bundle")
    finish: Any = None
    if target == "coreml":
        from intaglio.runtimes.coreml_swift import finish_coreml

        finish = finish_coreml
    return compile_bundle(
        source, target, accuracy=accuracy, shapes=shapes, options=options, finish=finish, progress=progress
    )


def load(
    source: str | Path,
    target: str = "cpu",
    *,
    threads: int = 0,
    compute_units: str | None = None,
    memory_budget: int | None = None,
    keep_loaded: bool = True,
    lora: Mapping[str, float] | None = None,
) -> Any:
    """Opens what ``compile`` built: a bundle as its pipeline, an ONNX file or its engine's folder as an ``OnnxModel``.

    ``threads`` is of the target ``cpu``, ``compute_units`` of ``coreml``: ``all``, ``cpu``, ``cpu+gpu`` or ``cpu+ne``.
    ``memory_budget`` is what the process may come to while it paints, in bytes; without ``keep_loaded`` a picture's
    stages leave memory after their last use in each call. ``lora`` are adapters by file with their strengths, of the
    target ``tensorrt``. See ``runtimes.load.load`` and
    ``engines.model_engine.load_model`` for the errors.
    """
    from intaglio.engines.model_engine import find_model_engine, load_model
    from intaglio.engines.target import session_options
    from intaglio.errors import InputError

    path = Path(source)
    if find_model_engine(path, target) is not None:
        if memory_budget is not None or not keep_loaded:
            raise InputError(f"{source}: is an ONNX model; memory_budget and keep_loaded are for picture bundles")
        if lora:
            raise InputError(f"{source}: is an ONNX model; lora is for bundles")
        return load_model(path, target, **session_options(target, threads=threads, compute_units=compute_units))
    from intaglio.runtimes.load import load as load_bundle

    return load_bundle(
        path,
        target,
        threads=threads,
        compute_units=compute_units,
        memory_budget=memory_budget,
        keep_loaded=keep_loaded,
        lora=lora,
    )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("intaglio")
    if name not in _WHERE:
        raise AttributeError(f"module 'intaglio' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
