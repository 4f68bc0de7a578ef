"""Joins the look-up of packed rows, such as an embedding's, with their dequantization."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    attribute,
    constant_of,
    is_standard,
    only_consumer,
    producer,
    remove_unread,
)
from intaglio.kernels.grouped_quant import DOMAIN

_DEQUANTIZE = "GroupedQuantDequantize"


class FuseGatherPass(ir.passes.InPlacePass):
    """Turns ``GroupedQuantDequantize`` of gathered rows into one ``GroupedQuantGather``.

    The reshapes go as well where indices were flattened and the rows got the dims of the indices back. The function's
    body is removed with its last node.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, _DEQUANTIZE)]
        joined = [node for node in nodes if _join(model.graph, node)]
        key = (DOMAIN, _DEQUANTIZE, "")
        if len(joined) == len(nodes) and key in model.functions:
            del model.functions[key]
        return ir.passes.PassResult(model, modified=bool(joined))


def _join(graph: ir.Graph, node: ir.Node) -> bool:
    tables: list[ir.Value] = []
    indices: ir.Value | None = None
    for value in node.inputs:
        gather = value.producer() if value is not None else None
        table = value if gather is None or not is_standard(gather, "Gather") else gather.inputs[0]
        if table is None or not table.is_initializer() or (gather and attribute(gather, "axis", 0) != 0):
            return False
        if gather is not None:
            if indices is not None and gather.inputs[1] is not indices:
                return False
            indices = gather.inputs[1]
        tables.append(table)
    if indices is None or indices.dtype != ir.DataType.INT64:
        return False
    replaced = [node]
    user = only_consumer(node.outputs[0])
    if user is not None and is_standard(user, "Cast") and user.outputs[0].dtype == ir.DataType.FLOAT:
        replaced.append(user)
        user = only_consumer(user.outputs[0])
    flatten = indices.producer()
    if user is not None and _restores(user, flatten):
        assert flatten is not None and flatten.inputs[0] is not None
        replaced.append(user)
        indices = flatten.inputs[0]
    stated = {name: attribute.value for name, attribute in node.attributes.items()}
    gathered = ir.node("GroupedQuantGather", [indices, *tables], stated, domain=DOMAIN, name=node.name)
    sources = [value for old in replaced for value in old.inputs]
    outputs = replaced[-1].outputs
    convenience.replace_nodes_and_values(graph, replaced[-1], replaced, [gathered], outputs, gathered.outputs)
    remove_unread(graph, sources)
    return True


def _restores(node: ir.Node, flatten: ir.Node | None) -> bool:
    """Whether ``node`` gives rows the dims of the indices that ``flatten`` made one axis of, and one more."""
    if not is_standard(node, "Reshape") or flatten is None or not is_standard(flatten, "Reshape"):
        return False
    flat, back = constant_of(flatten.inputs[1]), node.inputs[1]
    dims = back.producer() if back is not None else None
    if flat is None or flat.tolist() != [-1] or dims is None or not is_standard(dims, "Concat"):
        return False
    if len(dims.inputs) != 2:
        return False
    shape, width = producer(dims.inputs[0], "Shape"), constant_of(dims.inputs[1])
    is_whole = shape is not None and not shape.attributes and shape.inputs[0] is flatten.inputs[0]
    return is_whole and width is not None and width.size == 1
