"""What the passes that join nodes to one share: how they find them, and the op of joined products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intaglio.kernels.grouped_quant import DOMAIN

# The op that products become, and its inputs before codes, scales and offsets of each weight.
FUSED_PRODUCT = "FusedGroupedQuantMatMul"
X, NORM_WEIGHT, RESIDUAL, WEIGHTS = range(4)


def is_product(node: ir.Node | None) -> bool:
    """Whether a node is a quantized product of float32 and a constant weight that nothing is joined to yet."""
    if node is None or (node.domain, node.op_type) != (DOMAIN, "GroupedQuantMatMul"):
        return False
    x, *weight = node.inputs
    is_constant = all(value is not None and value.is_initializer() for value in weight)
    return x is not None and x.dtype == ir.DataType.FLOAT and is_constant


def is_standard(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    """Whether a node is this op of ONNX itself."""
    return node is not None and not node.domain and node.op_type == op_type


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes ``value``, if it is this op of ONNX itself."""
    node = value.producer() if value is not None else None
    return node if is_standard(node, op_type) else None


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The node that alone reads ``value``, and once; None if it is an output of the graph too."""
    uses = list(value.uses())
    return None if value.is_graph_output() or len(uses) != 1 else uses[0].node


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values have one shape. Dims without a name are taken for the same: rows that are to be repeated have
    a dim of 1, and a kernel that is told otherwise says so."""
    if a.shape is None or b.shape is None:
        return False
    dims_a, dims_b = ([d if isinstance(d, int) else d.value for d in shape] for shape in (a.shape, b.shape))
    return dims_a == dims_b


def modulates(vector: ir.Value | None, x: ir.Value) -> bool:
    """Whether ``vector`` is ``[B, 1, D]`` of float32 beside ``x`` ``[B, S, D]``."""
    if vector is None or vector.shape is None or x.shape is None or vector.dtype != ir.DataType.FLOAT:
        return False
    one, rows = vector.shape, x.shape
    if one.rank() != 3 or rows.rank() != 3 or one[1] != 1 or one[2] != rows[2] or not isinstance(rows[2], int):
        return False
    return one[0] in (1, rows[0])


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The array of a value that is known before the graph runs. An initializer that is an input too is not: it may be
    given another."""
    if value is None or value.is_graph_input():
        return None
    tensor = convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def called(node: ir.Node) -> str:
    """A node's name, which many files leave out, or else that of what it makes."""
    return node.name or str(node.outputs[0].name)


def attribute(node: ir.Node, name: str, missing: Any) -> Any:
    """The value of an attribute, or ``missing``."""
    return node.attributes[name].value if name in node.attributes else missing


def is_over_last_axis(node: ir.Node) -> bool:
    """Whether a norm is of float32 rows, over their last axis alone."""
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT or attribute(node, "stash_type", 1) != ir.DataType.FLOAT:
        return False
    axis = attribute(node, "axis", -1)
    return axis == -1 or (x.shape is not None and axis == x.shape.rank() - 1)


def remove_unread(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Removes the nodes that made values which nothing reads any more, and those before them."""
    for value in values:
        node = value.producer() if value is not None else None
        if node is None or node.graph is None or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        sources = list(node.inputs)
        graph.remove(node, safe=True)
        remove_unread(graph, sources)


def same_attributes(nodes: Sequence[ir.Node]) -> bool:
    """Whether the attributes of nodes agree: one joined node states one format for all its weights."""
    stated = [{name: attribute.value for name, attribute in node.attributes.items()} for node in nodes]
    return all(attributes == stated[0] for attributes in stated)


def fused_product(
    products: Sequence[ir.Node],
    outputs: int,
    *,
    residual: ir.Value | None = None,
    attributes: Mapping[str, int] | None = None,
) -> ir.Node:
    """Products of one x and one format as one node, not yet in a graph, with ``outputs`` outputs."""
    first = products[0]
    weights = [value for product in products for value in product.inputs[1:]]
    stated = {name: attribute.value for name, attribute in first.attributes.items()}
    return ir.node(
        FUSED_PRODUCT,
        [first.inputs[X], None, residual, *weights],
        {**stated, **(attributes or {})},
        domain=DOMAIN,
        num_outputs=outputs,
        name=first.name,
    )


def silu_input(value: ir.Value | None) -> tuple[ir.Value, list[ir.Node]] | None:
    """``x`` and the nodes of a ``value`` that is ``x * sigmoid(x)``, of which nothing else reads a part but ``x``."""
    multiply = value.producer() if value is not None else None
    if value is None or only_consumer(value) is None or not is_standard(multiply, "Mul"):
        return None
    assert multiply is not None
    for x, gate in (multiply.inputs, multiply.inputs[::-1]):
        sigmoid = gate.producer() if gate is not None else None
        if x is not None and is_standard(sigmoid, "Sigmoid") and sigmoid is not None and sigmoid.inputs[0] is x:
            return (x, [sigmoid, multiply]) if only_consumer(sigmoid.outputs[0]) is multiply else None
    return None


@dataclass(frozen=True)
class RowPart:
    """``size`` numbers from ``offset`` on of each row of ``rows``."""

    rows: ir.Value
    offset: int
    size: int


def row_part(value: ir.Value | None) -> RowPart | None:
    """Where ``value`` was cut from wider rows of float32 by a Split of constant sizes; None if it was not."""
    split = value.producer() if value is not None else None
    if value is None or split is None or not is_standard(split, "Split"):
        return None
    rows = split.inputs[0]
    if rows is None or rows.shape is None or rows.dtype != ir.DataType.FLOAT:
        return None
    rank, width = rows.shape.rank(), rows.shape[-1]
    if attribute(split, "axis", 0) not in (-1, rank - 1) or not isinstance(width, int):
        return None
    count = len(split.outputs)
    sizes = constant_of(split.inputs[1]) if len(split.inputs) > 1 else None
    if sizes is None:
        if len(split.inputs) > 1 or width % count:
            return None
        sizes = np.full(count, width // count)
    index = split.outputs.index(value)
    return RowPart(rows, int(sizes[:index].sum()), int(sizes[index]))
