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
MISSING = (
    "coremltools cannot be imported ({reason}). Install intaglio with its extra `coreml`: "
    "from a checkout, pip install '.[coreml]'"
)


def import_coremltools(*, alone: bool = False) -> Any:
    """The module. Raises RuntimeMissingError saying how to install it.

    ``alone`` says that the process is our own: coremltools then finds no frameworks that are not loaded yet, which it
    could convert no models of afterwards, and is silent. It warns of every version that it was not tried with.
    """
    try:
        if not alone:
            return importlib.import_module("coremltools")
        logging.getLogger("coremltools").setLevel(logging.ERROR)
        with _without_frameworks():
            return importlib.import_module("coremltools")
    except ImportError as error:
        raise RuntimeMissingError(MISSING.format(reason=error)) from error


@contextlib.contextmanager
def _without_frameworks() -> Iterator[None]:
    hidden = [name for name in _FRAMEWORKS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
