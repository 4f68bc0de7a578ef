"""TensorRT's Python bindings, which are extras."""

from __future__ import annotations

import importlib
from typing import Any

from intaglio.errors import RuntimeMissingError


def import_tensorrt_rtx() -> Any:
    """TensorRT for RTX. Raises RuntimeMissingError saying how to install it."""
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error
    raise RuntimeMissingError(
        f"TensorRT for RTX cannot be imported ({reason}). Install intaglio with its extra `tensorrt-rtx`: "
        "from a checkout, pip install '.[tensorrt-rtx]'"
    ) from reason
