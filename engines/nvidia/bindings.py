"""TensorRT's Python bindings, which are extras."""

from __future__ import annotations

import importlib
from typing import Any

from intaglio.errors import RuntimeMissingError

# Plugins are compiled ahead of time since 10.9, and found by the domain of their node since 10.10.
_SINCE = (10, 10)


def import_tensorrt_rtx() -> Any:
    """TensorRT for RTX. Raises RuntimeMissingError saying how to install it."""
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:  # the latter where the bindings are there and the libraries are not
            reason = error
    raise RuntimeMissingError(
        f"TensorRT for RTX cannot be imported ({reason}). It is in two packages, tensorrt-rtx-cu13-bindings and "
        "tensorrt-rtx-cu13-libs. Install intaglio with its extra `tensorrt-rtx`: "
        "from a checkout, pip install '.[tensorrt-rtx]'"
    ) from reason


def import_tensorrt() -> Any:
    """TensorRT itself, with ``tensorrt.plugin``. Raises RuntimeMissingError saying how to install it."""
    try:
        trt = importlib.import_module("tensorrt")
        importlib.import_module("tensorrt.plugin")
    except (ImportError, OSError) as error:
        raise RuntimeMissingError(
            f"TensorRT cannot be imported ({error}). Install the package tensorrt-cu13 from "
            "NVIDIA's own index, as TensorRT's installation guide says, or compile for the target tensorrt-rtx"
        ) from error
    version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if version < _SINCE:
        raise RuntimeMissingError(
            f"TensorRT is {trt.__version__}, and {_SINCE[0]}.{_SINCE[1]} is the first that finds our plugins; update it"
        )
    return trt
