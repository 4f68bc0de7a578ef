"""The axes that nodes name, checked before anything is made of them: coremltools takes some that are none."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.node import Node

# The attributes that name axes of the first input, and the input that does in place of one, by op.
_ATTRIBUTES = ("axis", "axes", "batch_axis", "time_axis")
_INPUTS = {"CumSum": 1, "Pad": 3, "Slice": 3, "Squeeze": 1, "Unsqueeze": 1}
# Their axes are those of another tensor, or end with the rank.
_WITHIN_RANK = {"Flatten": 1, "OneHot": 1}
_OTHERS = {"ConcatFromSequence", "SequenceInsert", "SplitToSequence", "DequantizeLinear", "QuantizeLinear", "Scan"}
# Softmax before this opset flattens its input.
_FLATTENING = 13


def check_axes(node: Node) -> None:
    """Refuses axes out of range, and such that are named twice. Raises CompileError."""
    if node.domain or node.op_type in _OTHERS or not node.has_input(0):
        return
    named = {name: np.ravel(node.any_ints(name)) for name in _ATTRIBUTES if node.has(name)}
    place = _INPUTS.get(node.op_type, 1 if node.op_type.startswith("Reduce") else None)
    if place is not None and node.has_input(place) and node.is_constant(place):
        named["axes"] = np.ravel(node.constant(place))
    if not named:
        return
    rank = node.input(0).rank
    above = _WITHIN_RANK.get(node.op_type, int("max" in node.op_type and node.opset < _FLATTENING))
    for name, axes in named.items():
        found = axes.tolist()
        if node.op_type == "Unsqueeze":
            above = len(found)
        wrong = [axis for axis in found if not -rank - above <= axis < rank + above]
        if wrong:
            node.fail(f"names the axis {wrong[0]} ({name}); expected {-rank - above} to {rank + above - 1}")
        counted = [axis % (rank + above) for axis in found]
        if len(set(counted)) < len(counted):
            node.fail(f"names an axis twice ({name} {found})")
