"""What a node gives that reads constants alone, computed as ONNX defines it, in the graph's own dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# Ops that give elements of their inputs, as they are and no more of them.
MOVES = frozenset(
    {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Concat", "Split", "Slice", "Gather"}
)
_ELEMENTWISE = {
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Clip",
    "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Log", "Max",
    "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
    "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
}  # fmt: skip
_SHRINKING = {
    "CumSum", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Shape", "Size", "Softmax", "Trilu",
}  # fmt: skip
_GROWING = {"ConstantOfShape", "Expand", "MatMul", "Range", "Tile"}
_DTYPES = "biuf"


def evaluate(
    node: ir.Node, inputs: Sequence[np.ndarray | None], opset: int, most_elements: int
) -> list[np.ndarray] | None:
    """The outputs of a node for these inputs, None where an optional one is left out.

    None if that is not computed here: another op than the plain ones, dtypes that NumPy has not, more elements than
    ``most_elements``, or what ONNX does not define, such as an integer divided by zero.
    """
    known = {*MOVES, *_ELEMENTWISE, *_SHRINKING, *_GROWING}
    arrays = [array for array in inputs if array is not None]
    if node.domain not in ("", "ai.onnx") or node.op_type not in known or not arrays:
        return None
    if any(array.dtype.kind not in _DTYPES or array.size > most_elements for array in arrays):
        return None
    try:
        with np.errstate(all="ignore"):
            if _most_elements(node, arrays) > most_elements:
                return None
            outputs = _evaluated(node, inputs, opset)
    except Exception:  # the evaluator raises whatever comes; who converts the node says what is wrong with it
        return None
    return outputs if all(array.dtype.kind in _DTYPES for array in outputs) else None


def _evaluated(node: ir.Node, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    if node.op_type == "Div" and all(array is not None and array.dtype.kind in "iu" for array in inputs):
        return [_divided(*[np.asarray(array) for array in inputs])]
    proto = onnx.NodeProto(
        op_type=node.op_type,
        input=["" if array is None else f"i{i}" for i, array in enumerate(inputs)],
        output=[f"o{i}" if value.name else "" for i, value in enumerate(node.outputs)],
        attribute=[ir.to_proto(attribute) for attribute in node.attributes.values()],
    )
    feeds = {f"i{i}": array for i, array in enumerate(inputs) if array is not None}
    return [np.asarray(array) for array in ReferenceEvaluator(proto, opsets={"": opset}).run(None, feeds)]


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Integers divided towards zero."""
    if not y.all():
        raise ZeroDivisionError
    quotient = x // y
    return quotient + ((x % y != 0) & ((x < 0) != (y < 0))).astype(quotient.dtype)


def _most_elements(node: ir.Node, arrays: Sequence[np.ndarray]) -> int:
    """How many elements an output has at most."""
    first = arrays[0]
    if node.op_type in _ELEMENTWISE:
        return math.prod(np.broadcast_shapes(*(array.shape for array in arrays)))
    if node.op_type == "ConstantOfShape":
        return math.prod(first.tolist())
    if node.op_type == "Expand":
        return math.prod(np.broadcast_shapes(first.shape, tuple(arrays[1].tolist())))
    if node.op_type == "Tile":
        return first.size * math.prod(arrays[1].tolist())
    if node.op_type == "Range":
        start, limit, delta = (array.item() for array in arrays)
        return max(math.ceil((limit - start) / delta), 0)
    if node.op_type == "Gather":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        return arrays[1].size * (first.size // max(first.shape[axis], 1))
    if node.op_type == "MatMul":
        rows = first.size // first.shape[-1]
        return rows * (arrays[1].size // arrays[1].shape[max(arrays[1].ndim - 2, 0)])
    return sum(array.size for array in arrays)
