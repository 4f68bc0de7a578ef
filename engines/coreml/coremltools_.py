"""coremltools, which is an extra."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from intaglio.errors import RuntimeMissingError


def import_coremltools() -> Any:
    """The module. Raises RuntimeMissingError saying how to install it."""
    try:
        # It warns of every version of torch and scikit-learn that it was not tried with; neither is used here.
        logging.getLogger("coremltools").setLevel(logging.ERROR)
        return importlib.import_module("coremltools")
    except ImportError as error:
        raise RuntimeMissingError(
            f"coremltools cannot be imported ({error}). Install intaglio with its extra `coreml`: "
            "from a checkout, pip install '.[coreml]'"
        ) from error
