"""Leaves ``Attention`` that full TensorRT has no kernel for to our plugin of flash attention.

Shape suffixes: B batch, H query heads, K key heads, S queries, T keys, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from intaglio.engines.lowering.decompose_attention import heads_of, narrowed_mask, split_heads
from intaglio.engines.lowering.fuse_nodes import attribute
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.kernels.cuda.tiles import PLUGIN_LARGEST_HEAD
from intaglio.kernels.grouped_quant import DOMAIN

# The plugins' names.
PLAIN, MASKED = "FlashAttention", "FlashAttentionMasked"
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SWAP_HEADS = [0, 2, 1, 3]
_RANK = 4


class AttentionPluginPass(ir.passes.InPlacePass):
    """Replaces ``Attention`` by ``intaglio.FlashAttention(q, k, v)`` or ``FlashAttentionMasked(q, k, v, mask)``.

    Queries are ``[B, H, S, E]``, keys and values ``[B, K, T, E]``, a mask has four axes and is boolean or of their
    dtype; attributes are ``scale``, ``softcap`` (0 for none) and ``is_causal``. ``why`` says of a node why TensorRT has
    no kernel for it, or None; what the plugin has none for either stays, and so does one under a mask whose axes are
    not known. After the call ``notes`` tell of the nodes.
    """

    def __init__(self, why: Callable[[ir.Node], str | None]) -> None:
        super().__init__()
        self._why = why
        self.notes: list[str] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        reasons: dict[str, int] = {}
        for node in [node for node in graph.all_nodes() if not node.domain and node.op_type == "Attention"]:
            reason = self._why(node)
            if reason is None or not _has_kernel(node):
                continue
            _replace(graph, node)
            reasons[reason] = reasons.get(reason, 0) + 1
        self.notes = [f"{count} of Attention as a plugin: {reason}" for reason, count in reasons.items()]
        if reasons:
            graph.opset_imports.setdefault(DOMAIN, 1)
        return ir.passes.PassResult(model, modified=bool(reasons))


def _has_kernel(node: ir.Node) -> bool:
    inputs = (list(node.inputs) + [None] * 7)[:7]
    query, mask, heads = inputs[0], inputs[3], heads_of(node)
    used = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    if query is None or any(value is not None for value in inputs[4:]) or used:
        return False
    if mask is not None and not _is_broadcast(mask, query, inputs[1], heads.query):
        return False
    if query.dtype not in _FLOATS or heads.size is None or heads.size != heads.value_size:
        return False
    return heads.size <= PLUGIN_LARGEST_HEAD[query.dtype.bitwidth // 8] and heads.query % heads.key == 0


def _is_broadcast(mask: ir.Value, query: ir.Value, key: ir.Value | None, heads: int) -> bool:
    """Whether each axis of a mask is known to be that of the scores, or 1: the kernel reads it where it lies."""
    if mask.shape is None or not 2 <= mask.shape.rank() <= _RANK:
        return False
    assert query.shape is not None and key is not None and key.shape is not None
    rows = 1 if query.shape.rank() != _RANK else 2
    scores = [query.shape[0], heads, query.shape[rows], key.shape[rows]]
    dims = [dim if isinstance(dim, int) else dim.value for dim in mask.shape]
    known = [dim if isinstance(dim, int) else dim.value for dim in scores][-len(dims) :]
    pairs = list(zip(dims, known, strict=True))
    return all(dim is not None and dim in (1, own) for dim, own in pairs) and dims[-1] == known[-1]


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask = (*node.inputs, None)[:4]
    assert query is not None and key is not None and value is not None and query.shape is not None
    build, heads, dtype = GraphBuilder(graph, str(node.outputs[0].name)), heads_of(node), query.dtype
    assert heads.size is not None
    is_flat = query.shape.rank() != _RANK
    if is_flat:
        query, key, value = (
            split_heads(build, each, count)
            for each, count in ((query, heads.query), (key, heads.key), (value, heads.key))
        )
    inputs = [query, key, value]
    if mask is not None:
        assert mask.shape is not None
        mask = mask if mask.dtype == ir.DataType.BOOL else narrowed_mask(build, mask, dtype)
        missing = _RANK - (mask.shape.rank() if mask.shape is not None else _RANK)
        if missing:
            shape = [1] * missing + list(mask.shape or ())
            mask = build("Unsqueeze", [mask, build.int64(list(range(missing)))], mask.dtype, shape)
        inputs.append(mask)
    result = build(
        PLAIN if mask is None else MASKED,
        inputs,
        dtype,
        None if is_flat else node.outputs[0].shape,
        domain=DOMAIN,
        scale=float(attribute(node, "scale", 0.0) or heads.size**-0.5),
        softcap=float(attribute(node, "softcap", 0.0)),
        is_causal=attribute(node, "is_causal", 0),
    )
    if is_flat:
        rows = build("Transpose", [result], dtype, perm=_SWAP_HEADS)
        result = build("Reshape", [rows, build.int64([0, 0, -1])], dtype)
    build.replace(node, result)
