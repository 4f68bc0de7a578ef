"""What the passes that join nodes to one share: how they find them, and the op of joined products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from intaglio.kernels.grouped_quant import DOMAIN

# The op that products become, and its inputs before codes, scales and offsets of each weight.
FUSED_PRODUCT = "FusedGroupedQuantMatMul"
X, NORM_WEIGHT, RESIDUAL, WEIGHTS = range(4)


def is_product(node: ir.Node | None) -> bool:
    """Whether a node is a quantized product of float32 and a constant weight that nothing is joined to yet."""
    return (
        node is not None
        and (node.domain, node.op_type) == (DOMAIN, "GroupedQuantMatMul")
        and node.inputs[X] is not None
        and node.inputs[X].dtype == ir.DataType.FLOAT
        and all(value is not None and value.is_initializer() for value in node.inputs[1:])
    )


def is_standard(node: ir.Node | None, op_type: str) -> bool:
    """Whether a node is this op of ONNX itself."""
    return node is not None and not node.domain and node.op_type == op_type


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The node that alone reads ``value``, and once; None if it is an output of the graph too."""
    uses = list(value.uses())
    return None if value.is_graph_output() or len(uses) != 1 else uses[0].node


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have one shape."""
    if a.shape is None or b.shape is None:
        return False
    dims_a, dims_b = ([d if isinstance(d, int) else d.value for d in shape] for shape in (a.shape, b.shape))
    return dims_a == dims_b and None not in dims_a


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
