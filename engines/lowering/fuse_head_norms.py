"""Joins the norms of queries and keys with the cuts and joints around them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    RowPart,
    attribute,
    constant_of,
    is_over_last_axis,
    is_standard,
    only_consumer,
    remove_unread,
    row_part,
)
from intaglio.kernels.grouped_quant import DOMAIN


class FuseHeadNormsPass(ir.passes.InPlacePass):
    """Turns ``RMSNormalization`` over heads into ``HeadRMSNorm`` where that saves a copy of the rows.

    1. Heads that were cut from wider rows are read where they lie. The Split stays for
       :class:`~intaglio.engines.lowering.fuse_splits.FuseSplitsPass`.
    2. Those of several sequences (text and image) that become one are written there at once.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        for node in list(graph):
            if is_standard(node, "Concat") and attribute(node, "axis", 0) == 1:
                norms = [_head_norm(value) for value in node.inputs]
                found = [norm for norm in norms if norm is not None and only_consumer(norm.node.outputs[0]) is node]
                if len(found) == len(norms) and len({norm.form for norm in found}) == 1:
                    _replace(graph, node, found)
                    modified = True
        for node in list(graph):
            norm = _head_norm(node.outputs[0]) if is_standard(node, "RMSNormalization") else None
            if norm is not None and row_part(norm.reshape.inputs[0]) is not None:
                _replace(graph, node, [norm])
                modified = True
        return ir.passes.PassResult(model, modified=modified)


@dataclass(frozen=True)
class _HeadNorm:
    node: ir.Node
    reshape: ir.Node
    part: RowPart
    form: tuple[int, int, int, float]  # heads, head_size, offset, epsilon


def _head_norm(value: ir.Value | None) -> _HeadNorm | None:
    """The norm of a value ``[B, S, H, E]`` that was ``[B, S, H * E]``."""
    node = value.producer() if value is not None else None
    if node is None or not is_standard(node, "RMSNormalization") or not is_over_last_axis(node):
        return None
    heads, weight = node.inputs[0], node.inputs[1]
    reshape = heads.producer() if heads is not None else None
    if reshape is None or not is_standard(reshape, "Reshape"):
        return None
    rows, dims = reshape.inputs[0], constant_of(reshape.inputs[1])
    if rows is None or rows.shape is None or rows.shape.rank() != 3 or dims is None or len(dims) != 4:
        return None
    count, size = int(dims[2]), int(dims[3])
    if dims[0] or dims[1] or attribute(reshape, "allowzero", 0) or rows.shape[2] != count * size:
        return None
    if weight is None or weight.dtype != ir.DataType.FLOAT or weight.shape != ir.Shape([size]):
        return None
    part = row_part(rows) or RowPart(rows, 0, count * size)
    return _HeadNorm(node, reshape, part, (count, size, part.offset, attribute(node, "epsilon", 1e-5)))


def _replace(graph: ir.Graph, last: ir.Node, norms: list[_HeadNorm]) -> None:
    heads, head_size, offset, epsilon = norms[0].form
    pairs = [value for norm in norms for value in (norm.part.rows, norm.node.inputs[1])]
    stated = {"heads": heads, "head_size": head_size, "offset": offset, "epsilon": epsilon}
    joined = ir.node("HeadRMSNorm", pairs, stated, domain=DOMAIN, name=last.name)
    replaced = list(dict.fromkeys([*(norm.node for norm in norms), last]))
    convenience.replace_nodes_and_values(graph, last, replaced, [joined], last.outputs, joined.outputs)
    remove_unread(graph, [norm.reshape.outputs[0] for norm in norms])
