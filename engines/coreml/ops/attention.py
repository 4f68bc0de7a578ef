"""Attention and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.tensors import (
    Size,
    arange,
    cast,
    constant,
    dtype_of,
    is_float,
    is_static,
    joined,
    reshape,
    size_of,
    static_sizes,
)
from intaglio.engines.coreml.registry import converter

# Enough to hide a key, with room for its score.
_HIDDEN = 3e4


@dataclass(frozen=True)
class _Mask:
    """What is added to the scores or, boolean, who sees whom. ``blind``: rows that may see nothing are looked for."""

    value: Var | None
    blind: bool


@converter
def Attention(node: Node) -> Sequence[Var | None]:
    query, key, value = (_heads(node, i, "q_num_heads" if i == 0 else "kv_num_heads") for i in range(3))
    past_key, past_value = node.optional(4), node.optional(5)
    if past_key is not None and past_value is not None:
        key = mb.concat(values=[past_key, key], axis=2)
        value = mb.concat(values=[past_value, value], axis=2)
    mask = _mask(node, query, key, past_key)
    present = [key, value]
    key, value = _repeat_heads(node, key, query), _repeat_heads(node, value, query)
    wanted = len(node.outputs) > 3 and node.outputs[3] != ""
    if wanted or node.float("softcap", 0.0) > 0.0:
        y, scores = _by_hand(node, query, key, value, mask)
    else:
        y, scores = _fused(node, query, key, value, mask), None
    if node.input(0).rank == 3:
        y = mb.transpose(x=y, perm=[0, 2, 1, 3])
        y = reshape(y, [size_of(y, 0), size_of(y, 1), int(y.shape[2]) * int(y.shape[3])])
    return [y, *present, scores]


@converter
def RotaryEmbedding(node: Node) -> Var:
    x = node.input(0)
    is_flat = x.rank == 3
    if is_flat:
        heads = node.int("num_heads")
        x = reshape(x, [size_of(x, 0), size_of(x, 1), heads, int(x.shape[2]) // heads])
    else:
        x = mb.transpose(x=x, perm=[0, 2, 1, 3])
    (head_dim,) = static_sizes(node, x, [3], "rotary embeddings need that of a head")
    turned = node.int("rotary_embedding_dim", 0) or head_dim
    tables = [node.input(1), node.input(2)]
    positions = node.optional(3)
    if positions is not None:
        tables = [mb.gather(x=table, indices=positions, axis=0) for table in tables]
    cos, sin = (cast(mb.expand_dims(x=table, axes=[2]), dtype_of(x)) for table in tables)
    y = _rotated(_along(x, 0, turned), cos, sin, node.int("interleaved", 0) != 0)
    if turned < head_dim:
        y = mb.concat(values=[y, _along(x, turned, head_dim)], axis=-1)
    if is_flat:
        return reshape(y, [size_of(y, 0), size_of(y, 1), int(y.shape[2]) * head_dim])
    return mb.transpose(x=y, perm=[0, 2, 1, 3], name=node.name)


def _rotated(x_BSHE: Var, cos: Var, sin: Var, interleaved: bool) -> Var:
    half = int(x_BSHE.shape[-1]) // 2
    if interleaved:
        pairs = reshape(x_BSHE, [*(size_of(x_BSHE, i) for i in range(3)), half, 2])
        first, second = mb.split(x=pairs, num_splits=2, axis=-1)
        first, second = mb.squeeze(x=first, axes=[-1]), mb.squeeze(x=second, axes=[-1])
    else:
        first, second = mb.split(x=x_BSHE, num_splits=2, axis=-1)
    real = mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin))
    imaginary = mb.add(x=mb.mul(x=first, y=sin), y=mb.mul(x=second, y=cos))
    if not interleaved:
        return mb.concat(values=[real, imaginary], axis=-1)
    pairs = mb.stack(values=[real, imaginary], axis=-1)
    return reshape(pairs, [*(size_of(x_BSHE, i) for i in range(3)), 2 * half])


def _along(x: Var, begin: int, end: int) -> Var:
    """A part of the last axis."""
    if begin == 0 and end == x.shape[-1]:
        return x
    rest = [True] * (x.rank - 1) + [False]
    begins, ends = [0] * (x.rank - 1) + [begin], [0] * (x.rank - 1) + [end]
    return mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=rest, end_mask=rest)


def _heads(node: Node, i: int, heads: str) -> Var:
    """Query, key or value as ``[B, H, S, E]``."""
    x = node.input(i)
    if x.rank == 4:
        return x
    if x.rank != 3:
        node.fail(f"has an input {i} of rank {x.rank}; expected 3 or 4")
    (width,) = static_sizes(node, x, [2], "splitting heads needs that of the last axis")
    count = node.int(heads)
    return mb.transpose(x=reshape(x, [size_of(x, 0), size_of(x, 1), count, width // count]), perm=[0, 2, 1, 3])


def _repeat_heads(node: Node, x: Var, query: Var) -> Var:
    """Keys or values with each head as often as queries share it: the fused op takes as many heads of all."""
    (have,), (want,) = (static_sizes(node, v, [1], "sharing heads needs their number") for v in (x, query))
    if have == want:
        return x
    if want % have:
        node.fail(f"shares {have} heads of keys among {want} of queries, which they do not divide")
    times = want // have
    tiled = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, times, 1, 1])
    return reshape(tiled, [size_of(x, 0), want, size_of(x, 2), size_of(x, 3)])


def _mask(node: Node, query: Var, key: Var, past_key: Var | None) -> _Mask:
    """The mask that attn_mask, is_causal, windows and the number of valid keys make together."""
    given = node.optional(3)
    rules = _rules(node, query, key, past_key)
    if given is None:
        # Without padding every row of a causal mask sees something.
        return _Mask(rules, blind=node.optional(6) is not None or _has_window(node))
    missing = _missing_keys(given, key)
    if missing:
        fill: object = False if not is_float(given) else constant(np.array(-np.inf), given)
        pads = [0] * (2 * given.rank - 1) + [missing]
        if is_float(given):
            given = mb.pad(x=given, pad=pads, mode="constant", constant_val=fill)
        else:
            given = cast(mb.pad(x=cast(given, "fp32"), pad=pads, mode="constant"), "bool")
    if not is_float(given):
        visible = given if rules is None else mb.logical_and(x=given, y=rules)
        blind = visible.val is None or bool((~visible.val.any(axis=-1)).any())
        return _Mask(visible, blind)
    if dtype_of(given) != dtype_of(query):
        # What hides a key in float32 must not become infinite: a row of such would be NaN. As it is, a query that may
        # see nothing sees all keys by their scores, where float32 would have it see all alike.
        given = mb.clip(x=cast(given, "fp32"), alpha=np.float32(-_HIDDEN), beta=np.float32(_HIDDEN))
    given = cast(given, dtype_of(query))
    if rules is not None:
        # A select has the shape of what it selects, whatever that of its condition.
        nothing = mb.mul(x=cast(rules, dtype_of(given)), y=constant(np.array(0.0), given))
        given = mb.select(cond=rules, a=mb.add(x=given, y=nothing), b=constant(np.array(-np.inf), given))
    blind = bool(np.isneginf(given.val).all(axis=-1).any()) if given.val is not None else rules is not None
    return _Mask(given, blind)


def _has_window(node: Node) -> bool:
    return node.int("left_window_size", -1) >= 0 or node.int("right_window_size", -1) >= 0


def _missing_keys(mask: Var, key: Var) -> int:
    if not is_static([mask.shape[-1], key.shape[2]]) or mask.shape[-1] == 1:
        return 0
    return int(key.shape[2]) - int(mask.shape[-1])


def _rules(node: Node, query: Var, key: Var, past_key: Var | None) -> Var | None:
    """Who may see whom by position, boolean ``[S, T]`` or ``[B, 1, S, T]``; None where all may."""
    left, right = node.int("left_window_size", -1), node.int("right_window_size", -1)
    if node.int("is_causal", 0):
        right = 0 if right < 0 else min(right, 0)
    valid = node.optional(6)
    if left < 0 and right < 0 and valid is None:
        return None
    keys_T, queries_S = arange(size_of(key, 2)), arange(size_of(query, 2))
    if valid is not None:
        valid = reshape(valid, [size_of(valid, 0), 1, 1, 1])
    rows = _positions(queries_S, query, past_key, valid)
    rules: list[Var] = []
    if right >= 0:
        rules.append(mb.less_equal(x=keys_T, y=_plus(rows, right)))
    if left >= 0:
        rules.append(mb.greater_equal(x=keys_T, y=_plus(rows, -left)))
    if valid is not None:
        rules.append(mb.less(x=keys_T, y=valid))
    total = rules[0]
    for rule in rules[1:]:
        total = mb.logical_and(x=total, y=rule)
    return total


def _positions(queries_S: Var, query: Var, past_key: Var | None, valid: Var | None) -> Var:
    """The position of each query among the keys, ``[S, 1]`` or ``[B, 1, S, 1]``."""
    rows = mb.expand_dims(x=queries_S, axes=[1])
    offset: Size = 0 if past_key is None else size_of(past_key, 2)
    if past_key is None and valid is not None:
        return mb.add(x=rows, y=mb.sub(x=valid, y=_scalar(size_of(query, 2))))
    return _plus(rows, offset)


def _plus(x: Var, y: Size) -> Var:
    return x if isinstance(y, int) and y == 0 else mb.add(x=x, y=_scalar(y))


def _scalar(size: Size) -> Var | np.int32:
    return mb.squeeze(x=size, axes=[0]) if isinstance(size, Var) else np.int32(size)


def _fused(node: Node, query: Var, key: Var, value: Var, mask: _Mask) -> Var:
    (head_dim,) = static_sizes(node, query, [3], "the scale of attention needs that of a head")
    # The op divides by the root of the head's size by itself.
    factor = node.float("scale", 1.0 / math.sqrt(head_dim)) * math.sqrt(head_dim)
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = mb.mul(x=query, y=constant(np.array(factor), query))
    if mask.value is None:
        return mb.scaled_dot_product_attention(query=query, key=key, value=value)
    shape = mask.value.shape
    masked = mask.value
    if masked.rank < 2:
        masked = mb.expand_dims(x=masked, axes=[0])
    y = mb.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=_keys_whole(masked, key, shape))
    return _zero_where_blind(y, mask)


def _keys_whole(mask: Var, key: Var, shape: Sequence[object]) -> Var:
    """The op wants a mask that names every key."""
    if shape[-1] != 1 or key.shape[2] == 1:
        return mask
    reps = joined([*([1] * (mask.rank - 1)), size_of(key, 2)])
    return cast(mb.tile(x=cast(mask, "fp32") if not is_float(mask) else mask, reps=reps), dtype_of(mask))


def _zero_where_blind(y: Var, mask: _Mask) -> Var:
    """A query that sees nothing gets zeros, and not the NaN of its softmax."""
    if not mask.blind or mask.value is None:
        return y
    return mb.select(cond=_seeing(mask.value), a=y, b=constant(np.array(0.0), y))


def _seeing(mask: Var) -> Var:
    """Which rows see something, boolean with a last axis of 1; once for each mask."""
    if is_float(mask):
        most = mb.reduce_max(x=mask, axes=[-1], keep_dims=True)
        return mb.greater(x=most, y=constant(np.array(-np.inf), mask))
    most = mb.reduce_max(x=mb.cast(x=mask, dtype="int32"), axes=[-1], keep_dims=True)
    return mb.greater(x=most, y=np.int32(0))


def _by_hand(node: Node, query: Var, key: Var, value: Var, mask: _Mask) -> tuple[Var, Var]:
    """The op's definition, where a soft cap or the scores themselves are wanted: output and scores."""
    (head_dim,) = static_sizes(node, query, [3], "the scale of attention needs that of a head")
    root = constant(np.array(math.sqrt(node.float("scale", 1.0 / math.sqrt(head_dim)))), query)
    scores = mb.matmul(x=mb.mul(x=query, y=root), y=mb.mul(x=key, y=root), transpose_y=True)
    stages = [scores]
    cap = node.float("softcap", 0.0)
    if cap > 0.0:
        capped = mb.tanh(x=mb.mul(x=scores, y=constant(np.array(1.0 / cap), scores)))
        scores = mb.mul(x=capped, y=constant(np.array(cap), scores))
    stages.append(scores)
    if mask.value is not None:
        if is_float(mask.value):
            scores = mb.add(x=scores, y=mask.value)
        else:
            scores = mb.select(cond=mask.value, a=scores, b=constant(np.array(-np.inf), scores))
    stages.append(scores)
    wide = node.int("softmax_precision", 0) in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    weights = cast(mb.softmax(x=cast(scores, "fp32") if wide else scores, axis=-1), dtype_of(query))
    weights = _zero_where_blind(weights, mask)
    stages.append(weights)
    return mb.matmul(x=weights, y=value), stages[node.int("qk_matmul_output_mode", 0)]
