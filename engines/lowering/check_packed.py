"""Whether packed products and look-ups of a graph are what the format says, which a file of others need not be."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import called
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN, SCALE_DTYPES, GroupedQuantFormat

_OPERATORS = ("GroupedQuantMatMul", "GroupedQuantGather")
_PARTS = 3  # codes, scales and offsets


def check_packed(model: ir.Model) -> None:
    """Looks at attributes, dtypes and shapes, and reads no weight. Raises CompileError naming node and input."""
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and node.op_type in _OPERATORS:
            _check(node, f"{called(node)}: {node.op_type}")


def _check(node: ir.Node, named: str) -> None:
    if missing := [name for name in ("bits", "group_size", "zero_point") if name not in node.attributes]:
        raise CompileError(f"{named} has no attribute {missing[0]}")
    try:
        layout = GroupedQuantFormat(**{
            name: node.attributes[name].as_int() for name in ("bits", "group_size", "zero_point")
        })  # fmt: skip
    except (ValueError, TypeError) as error:
        raise CompileError(f"{named}: {error}") from error
    given = [value for value in node.inputs if value is not None]
    if len(node.inputs) != 1 + _PARTS or len(given) != 1 + _PARTS:
        raise CompileError(
            f"{named} has {len(given)} inputs, expected 4: rows, and codes, scales and offsets of a weight"
        )
    tensors = [value.const_value for value in given[1:] if not value.is_graph_input()]
    constant = [tensor for tensor in tensors if tensor is not None]
    if len(constant) != _PARTS:
        raise CompileError(f"{named} of a weight that is computed; expected a constant one")
    codes, scales, offsets = constant
    found = tuple(codes.shape.numpy())
    if codes.dtype != ir.DataType.UINT8 or len(found) != 2 or not all(found):
        raise CompileError(f"{named}: its codes are {_told(codes)}, expected uint8 of two axes")
    shape = found[0], found[1] * 8 // layout.bits
    try:
        groups = layout.groups_shape(shape)
    except ValueError as error:
        raise CompileError(f"{named}: {error}") from error
    for name, tensor, shapes in (("scales", scales, [groups]), ("offsets", offsets, [groups, ()])):
        if tensor.dtype.numpy() not in SCALE_DTYPES or tuple(tensor.shape.numpy()) not in shapes:
            raise CompileError(f"{named}: its {name} are {_told(tensor)}, expected floats of the shape {list(groups)}")
    _check_rows(node, named, shape[1])


def _check_rows(node: ir.Node, named: str, width: int) -> None:
    x = node.inputs[0]
    assert x is not None, "its inputs were looked at"
    is_look_up = node.op_type == "GroupedQuantGather"
    if x.dtype is not None and x.dtype.is_floating_point() == is_look_up:
        raise CompileError(
            f"{named}: its input is {x.dtype.numpy()}, expected {'integers' if is_look_up else 'floats'}"
        )
    last = x.shape[-1] if x.shape is not None and x.shape.rank() else None
    if not is_look_up and isinstance(last, int) and last != width:
        raise CompileError(f"{named}: its input has rows of {last}, and its weight takes {width}")


def _told(tensor: ir.TensorProtocol) -> str:
    shape: Sequence[int] = tensor.shape.numpy()
    return f"{tensor.dtype.numpy()} of the shape {list(shape)}"
