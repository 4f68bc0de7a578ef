"""Constants that several modules of a graph use."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder


def shared_constant(op: OpBuilder, name: str, values: np.ndarray) -> ir.Value:
    """The initializer ``name`` of the graph, made of ``values`` where it is not there yet."""
    known = op.builder.root.graph.initializers.get(name)
    return known if known is not None else op.builder.initializer(ir.tensor(values, name=name), qualify=False)
