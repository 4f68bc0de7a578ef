"""coremltools, which is an extra."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from intaglio.errors import RuntimeMissingError

# What it imports where it is installed, to convert models of these. None of them is used here, and with torch the
# import takes five seconds and 300 MB.
_FRONTENDS = ("executorch", "sklearn", "tensorflow", "torch", "transformers", "xgboost")


def import_coremltools() -> Any:
    """The module. Raises RuntimeMissingError saying how to install it."""
    try:
        # It warns of every version that it was not tried with, and of the parts that only a Mac has.
        logging.getLogger("coremltools").setLevel(logging.ERROR)
        with _without_frontends():
            return importlib.import_module("coremltools")
    except ImportError as error:
        raise RuntimeMissingError(
            f"coremltools cannot be imported ({error}). Install intaglio with its extra `coreml`: "
            "from a checkout, pip install '.[coreml]'"
        ) from error


@contextlib.contextmanager
def _without_frontends() -> Iterator[None]:
    """While it is imported: those that nobody has imported yet are as good as not installed."""
    hidden = [name for name in _FRONTENDS if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
