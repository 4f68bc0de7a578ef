"""Takes ``Attention`` apart where a target has no kernel for it.

Shape suffixes: B batch, H query heads, K key heads, R = H / K, S queries, T keys, E numbers of a head, V of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import attribute, called
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.errors import CompileError

_SWAP_HEADS = [0, 2, 1, 3]
_WIDE = ir.DataType.FLOAT
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class DecomposeAttentionPass(ir.passes.InPlacePass):
    """Replaces ``Attention`` nodes by MatMul, Softmax and MatMul.

    ``why`` says of a node why it is to be taken apart, or None if it is not. Products are in the dtype of the inputs;
    softmax is float32 where the node says so or where the inputs are. Heads that share a key are one product, no copy.
    The pass is for nodes without a cache of their own; raises CompileError for one with an output of scores. After the
    call ``notes`` say what was taken apart.
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
            if reason is None:
                continue
            _decompose(graph, node)
            reasons[reason] = reasons.get(reason, 0) + 1
        self.notes = [f"{count} of Attention as MatMul and Softmax: {reason}" for reason, count in reasons.items()]
        return ir.passes.PassResult(model, modified=bool(reasons))


@dataclass(frozen=True)
class Heads:
    """What an Attention node says of its heads; sizes are None where its inputs do not tell."""

    query: int
    key: int
    size: int | None
    value_size: int | None


def heads_of(node: ir.Node) -> Heads:
    """The heads of an Attention node of either layout. Raises CompileError where they are unknown."""
    query, key, value = (_shape(node, i) for i in range(3))
    if len(query) == 3:
        counts = attribute(node, "q_num_heads", None), attribute(node, "kv_num_heads", None)
        sizes = [
            width // count if isinstance(width, int) and count else None
            for width, count in ((query[2], counts[0]), (value[2], counts[1]))
        ]
    else:
        counts, sizes = (query[1], key[1]), [d if isinstance(d, int) else None for d in (query[3], value[3])]
    if not all(isinstance(count, int) and count for count in counts):
        raise CompileError(f"{called(node)}: Attention whose numbers of heads are not known ({counts[0]}, {counts[1]})")
    return Heads(int(counts[0]), int(counts[1]), *sizes)


def _shape(node: ir.Node, index: int) -> ir.Shape:
    value = node.inputs[index]
    if value is None or value.shape is None or value.shape.rank() not in (3, 4):
        raise CompileError(f"{called(node)}: Attention whose input {index} is not known to have 3 or 4 axes")
    return value.shape


def _decompose(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask, past_key, past_value, lengths = (list(node.inputs) + [None] * 7)[:7]
    assert query is not None and key is not None and value is not None
    used = [output for output in node.outputs[1:] if output.uses() or output.is_graph_output()]
    if used or past_key is not None or past_value is not None or lengths is not None:
        raise CompileError(f"{called(node)}: Attention with a cache or an output of scores has no form of products")
    build, heads, dtype = GraphBuilder(graph, str(node.outputs[0].name)), heads_of(node), query.dtype
    is_flat = query.shape is not None and query.shape.rank() == 3
    if is_flat:
        query, key, value = (
            split_heads(build, each, count)
            for each, count in ((query, heads.query), (key, heads.key), (value, heads.key))
        )
    scale = attribute(node, "scale", 0.0) or (None if heads.size is None else heads.size**-0.5)
    if scale is None:
        raise CompileError(f"{called(node)}: Attention without a scale whose head size is not known")
    # Half of it on either side, as ONNX defines the operator: their product may not fit a half.
    root = build.scalar(math.sqrt(scale), dtype or _WIDE)
    query, key = (build("Mul", [each, root], dtype) for each in (query, key))
    shares = heads.query != heads.key
    if shares:  # [B, H, S, E] to [B, K, R * S, E]
        grouped = build("Reshape", [query, build.int64([0, heads.key, -1, heads.size or 0])], dtype)
    else:
        grouped = query
    scores = build("MatMul", [grouped, build("Transpose", [key], dtype, perm=[0, 1, 3, 2])], dtype)
    ends = {"S": size_of(build, query, 2), "T": size_of(build, key, 2)}
    if shares:
        shape = build("Concat", [build.int64([0, heads.query]), ends["S"], ends["T"]], ir.DataType.INT64, axis=0)
        scores = build("Reshape", [scores, shape], dtype)
    weights = _softmax(build, node, scores, mask, ends)
    if shares:
        keys = [build.int64([0, heads.key, -1]), ends["T"]]
        weights = build("Reshape", [weights, build("Concat", keys, ir.DataType.INT64, axis=0)], dtype)
    result = build("MatMul", [weights, value], dtype)
    if shares:
        size = build.int64([heads.value_size]) if heads.value_size is not None else size_of(build, value, 3)
        shape = build("Concat", [build.int64([0, heads.query]), ends["S"], size], ir.DataType.INT64, axis=0)
        result = build("Reshape", [result, shape], dtype)
    if is_flat:
        rows = build("Transpose", [result], dtype, perm=_SWAP_HEADS)
        result = build("Reshape", [rows, build.int64([0, 0, -1])], dtype)
    build.replace(node, result)


def _softmax(
    build: GraphBuilder, node: ir.Node, scores: ir.Value, mask: ir.Value | None, ends: dict[str, ir.Value]
) -> ir.Value:
    """Weights ``[B, H, S, T]`` in the dtype of ``scores``."""
    dtype = scores.dtype
    inner = ir.DataType(attribute(node, "softmax_precision", 0) or dtype or _WIDE)
    if cap := attribute(node, "softcap", 0.0):
        bound = build.scalar(cap, dtype or _WIDE)
        scores = build("Mul", [build("Tanh", [build("Div", [scores, bound], dtype)], dtype), bound], dtype)
    if attribute(node, "is_causal", 0):
        scores = build("Where", [causal_mask(build, ends), scores, build.scalar(-math.inf, dtype or _WIDE)], dtype)
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        scores = build("Where", [mask, scores, build.scalar(-math.inf, dtype or _WIDE)], dtype)
    elif mask is not None:
        scores = build("Add", [scores, narrowed_mask(build, mask, dtype)], dtype)
    return build.cast(build("Softmax", [build.cast(scores, inner)], inner, axis=-1), dtype)


def narrowed_mask(build: GraphBuilder, mask: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """A float mask in ``dtype``.

    Half of the least number hides as well as any beyond it, which would be infinite: a row that is hidden as a whole
    would then be NaN, where it was finite.
    """
    if dtype not in _HALVES or mask.dtype != _WIDE:
        return build.cast(mask, dtype)
    least = build.scalar(-float(ml_dtypes.finfo(dtype.numpy()).max) / 2, _WIDE)
    return build.cast(build("Max", [mask, least], _WIDE, mask.shape), dtype)


def causal_mask(build: GraphBuilder, ends: dict[str, ir.Value], past: ir.Value | None = None) -> ir.Value:
    """``[S, T]``: True where a key is no later than the query. ``ends`` are ``S`` and ``T``, int64 ``[1]``.

    Both are counted from their first, as ONNX has it; ``past``, int64 ``[1]``, keys come before those of the queries.
    """
    one, zero = build.int64([1]), build.scalar(0, ir.DataType.INT64)
    counted = {
        name: build("CumSum", [build("Expand", [one, end], ir.DataType.INT64), zero], ir.DataType.INT64)
        for name, end in ends.items()
    }
    queries_S = counted["S"] if past is None else build("Add", [counted["S"], past], ir.DataType.INT64)
    queries_S1 = build("Unsqueeze", [queries_S, build.int64([-1])], ir.DataType.INT64)
    return build("LessOrEqual", [counted["T"], queries_S1], ir.DataType.BOOL, [None, None])


def size_of(build: GraphBuilder, value: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, int64 ``[1]``."""
    return build("Shape", [value], ir.DataType.INT64, [1], start=axis, end=axis + 1)


def split_heads(build: GraphBuilder, rows_BSD: ir.Value, heads: int) -> ir.Value:
    """``[B, S, H * E]`` to ``[B, H, S, E]``."""
    batch, tokens, width = rows_BSD.shape or (None, None, None)
    size = width // heads if isinstance(width, int) else None
    rows = build("Reshape", [rows_BSD, build.int64([0, 0, heads, size or -1])], rows_BSD.dtype)
    return build("Transpose", [rows], rows_BSD.dtype, [batch, heads, tokens, size], perm=_SWAP_HEADS)
