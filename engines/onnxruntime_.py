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
        raise RuntimeMissingError(
            f"onnxruntime cannot be imported ({error}). Install intaglio with one of its extras, "
            "`cpu` (the package onnxruntime) or `cuda` (onnxruntime-gpu): from a checkout, pip install '.[cpu]'"
        ) from error
