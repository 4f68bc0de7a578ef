"""Intaglio takes trained models to machines: export, compile, run.

>>> import intaglio
>>> intaglio.export("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")  # doctest: +SKIP
>>> intaglio.compile("smollm2", target="cpu")  # doctest: +SKIP
>>> intaglio.load("smollm2")("Once upon a time").text  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intaglio.engines.compile import compile_bundle as compile  # noqa: A004 - the verb's name
    from intaglio.exporters.checkpoints import open_checkpoint
    from intaglio.exporters.convert import convert
    from intaglio.exporters.export import export
    from intaglio.runtimes.bench import bench
    from intaglio.runtimes.load import load
    from intaglio.runtimes.parity import parity

__all__ = ["bench", "compile", "convert", "export", "load", "open_checkpoint", "parity"]

# Loaded when first used: exporting needs no runtime, and running no exporter.
_WHERE = {
    "bench": ("intaglio.runtimes.bench", "bench"),
    "compile": ("intaglio.engines.compile", "compile_bundle"),
    "convert": ("intaglio.exporters.convert", "convert"),
    "export": ("intaglio.exporters.export", "export"),
    "load": ("intaglio.runtimes.load", "load"),
    "parity": ("intaglio.runtimes.parity", "parity"),
    "open_checkpoint": ("intaglio.exporters.checkpoints", "open_checkpoint"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'intaglio' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
