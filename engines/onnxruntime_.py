"""onnxruntime, which is an extra: the CPU and the CUDA package own the same module."""

from __future__ import annotations

import importlib
from typing import Any

from intaglio.errors import RuntimeMissingError


def import_onnxruntime() -> Any:
    """The module. Raises RuntimeMissingError saying how to install it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        # Ctrl-C inside its compiled part comes out as a failed import.
        if _interrupted(error):
            raise KeyboardInterrupt from error
        raise RuntimeMissingError(
            f"onnxruntime cannot be imported ({error}). Install intaglio with one of its extras, "
            "`cpu` (the package onnxruntime) or `cuda` (onnxruntime-gpu): from a checkout, pip install '.[cpu]'"
        ) from error


def _interrupted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
