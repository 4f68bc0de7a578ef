"""Type and shape inference as a help that may fail."""

from __future__ import annotations

import contextlib
import logging

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass


def infer_shapes(model: ir.Model) -> None:
    """Gives values the dtypes and shapes that ONNX's inference finds; where it cannot, they stay without."""
    logger = logging.getLogger("onnx_ir.passes.common")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.suppress(Exception):
            # Propagating data as well runs away on some graphs.
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    finally:
        logger.setLevel(level)
