"""Takes the key-value cache out of ``Attention``, for targets whose Attention has none.

Shape suffixes: B batch, H query heads, K key heads, P past tokens, S queries, T all keys, E numbers of a head.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from intaglio.engines.lowering.decompose_attention import causal_mask, heads_of, size_of, split_heads
from intaglio.engines.lowering.fuse_nodes import attribute, called
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.errors import CompileError

_INT64 = ir.DataType.INT64
_SWAP_HEADS = [0, 2, 1, 3]
_TOKENS = 2


class SplitAttentionCachePass(ir.passes.InPlacePass):
    """Joins past and new keys and values by a Concat before ``Attention``, which is what its presents are.

    Causality then counts from the first key of the past, which a mask says. A node without past or presents stays.
    Raises CompileError for one that gives its scores.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        every = [node for node in model.graph.all_nodes() if not node.domain and node.op_type == "Attention"]
        nodes = [node for node in every if _has_cache(node)]
        for node in nodes:
            _split(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))


def _is_used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _has_cache(node: ir.Node) -> bool:
    if any(_is_used(output) for output in node.outputs[3:]):
        raise CompileError(f"{called(node)}: Attention that gives its scores, which no kernel of the target does")
    return any(value is not None for value in node.inputs[4:6]) or any(map(_is_used, node.outputs[1:3]))


def _split(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask, past_key, past_value, lengths = (*node.inputs, *[None] * 4)[:7]
    if lengths is not None:
        raise CompileError(
            f"{called(node)}: Attention with a cache and with lengths of what is not padding; ONNX has either"
        )
    assert query is not None and key is not None and value is not None and query.shape is not None
    build, heads, dtype = GraphBuilder(graph, str(node.outputs[0].name)), heads_of(node), query.dtype
    is_flat = query.shape.rank() == 3
    if is_flat:
        query = split_heads(build, query, heads.query)
        key, value = (split_heads(build, each, heads.key) for each in (key, value))
    joined = []
    for new, past, present in zip((key, value), (past_key, past_value), (*node.outputs, None, None)[1:3], strict=True):
        shape = None if present is None else present.shape
        inputs = [new] if past is None else [past, new]
        joined.append(build("Concat", inputs, new.dtype, shape, axis=_TOKENS))
    if attribute(node, "is_causal", 0):
        ends = {"S": size_of(build, query, _TOKENS), "T": size_of(build, joined[0], _TOKENS)}
        offset = None if past_key is None else size_of(build, past_key, _TOKENS)
        mask = _joined_mask(build, mask, causal_mask(build, ends, offset), dtype)
    kept = {
        name: each.value for name, each in node.attributes.items() if name in ("scale", "softcap", "softmax_precision")
    }
    for each, size in zip(joined, (heads.size, heads.value_size), strict=True):
        each.shape = each.shape or ir.Shape([None, heads.key, None, size])
    shape = None if is_flat else node.outputs[0].shape
    result = build("Attention", [query, *joined, *([] if mask is None else [mask])], dtype, shape, **kept)
    if is_flat:
        rows = build("Transpose", [result], dtype, perm=_SWAP_HEADS)
        result = build("Reshape", [rows, build.int64([0, 0, -1])], dtype)
    build.replace(node, result, *joined[: len(node.outputs) - 1])


def _joined_mask(
    build: GraphBuilder, mask: ir.Value | None, causal_ST: ir.Value, dtype: ir.DataType | None
) -> ir.Value:
    if mask is None:
        return causal_ST
    if mask.dtype == ir.DataType.BOOL:
        return build("And", [mask, causal_ST], mask.dtype, _over_scores(mask.shape))
    hidden = build.scalar(-math.inf, mask.dtype or dtype or ir.DataType.FLOAT)
    return build("Where", [causal_ST, mask, hidden], mask.dtype, _over_scores(mask.shape))


def _over_scores(shape: ir.Shape | None) -> list[Any] | None:
    """The shape of a mask once it has all queries and keys: an axis of 1 was one for all of them."""
    return None if shape is None else [*shape[:-2], *(None if dim == 1 else dim for dim in shape[-2:])]
