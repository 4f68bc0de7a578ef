"""coremltools, which is an extra."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from intaglio.errors import RuntimeMissingError

# It looks for each of these when it is imported; torch alone takes seconds and 200 MB.
_FRAMEWORKS = ("torch", "torchvision", "torchaudio", "torchao", "tensorflow", "sklearn", "xgboost", "transformers")


def import_coremltools() -> Any:
    """The module. Raises RuntimeMissingError saying how to install it."""
    try:
        # It warns of every version that it was not tried with, and of the parts that only a Mac has.
        logging.getLogger("coremltools").setLevel(logging.ERROR)
        with _without_frameworks():
            return importlib.import_module("coremltools")
    except ImportError as error:
        raise RuntimeMissingError(
            f"coremltools cannot be imported ({error}). Install intaglio with its extra `coreml`: "
            "from a checkout, pip install '.[coreml]'"
        ) from error


@contextlib.contextmanager
def _without_frameworks() -> Iterator[None]:
    """While coremltools is imported: it does not find frameworks that are not loaded yet, and converts none of them."""
    hidden = [name for name in _FRAMEWORKS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
