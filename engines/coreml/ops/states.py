"""States: buffers that outlive a call."""

from __future__ import annotations

import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import cast
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import UPDATE_STATE, converter
from intaglio.kernels.grouped_quant import DOMAIN

# The axis of a cache that the position counts along; the others are written whole.
_WHOLE = [True, True, False, True]


@converter(UPDATE_STATE, domain=DOMAIN)
def UpdateState(node: Node) -> Var:
    """The buffer after ``new`` is written between ``begin`` and ``end``. States are float16, whatever the graph is."""
    state, new, begin, end = (node.input(i) for i in range(4))
    filled = mb.slice_update(
        x=mb.read_state(input=state),
        update=cast(new, "fp16"),
        begin=begin,
        end=end,
        begin_mask=_WHOLE,
        end_mask=_WHOLE,
    )
    updated = mb.coreml_update_state(state=state, value=filled, name=node.name)
    return cast(updated, "fp16" if node.output_dtype() == ir.DataType.FLOAT16 else "fp32")
