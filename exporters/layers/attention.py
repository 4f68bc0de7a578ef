"""Masks, heads and the key-value cache of decoder attention."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class CausalMask:
    """``visible`` is boolean ``[B, 1, S, T]``: True where a query may see a key.

    ``blind``, boolean ``[B, S, 1]``, are the queries that see no key but themselves, which that makes finite: their
    attention is zero, as scaled_dot_product_attention in torch has it. None with a cache, where nothing reads them.
    """

    visible: ir.Value
    blind: ir.Value | None = None


def causal_mask(
    op: OpBuilder,
    attention_mask_BT: ir.Value,
    input_ids_BS: ir.Value,
    past_key: ir.Value | None,
    sliding_window: int | None = None,
) -> CausalMask:
    """The mask of all layers with one window.

    A query sees the valid keys up to its own position, of those only the last ``sliding_window`` (itself
    included). One that would see nothing, and whose softmax would be NaN, sees itself. With a cache every query sees
    itself, which is cheaper: there nothing reads a padding row, while text encoders hand theirs on.
    """
    keys_T = count_up(op, op.Shape(attention_mask_BT, start=1, end=2))
    queries_S = count_up(op, op.Shape(input_ids_BS, start=1, end=2))
    if past_key is not None:
        queries_S = op.Add(queries_S, op.Shape(past_key, start=2, end=3))
    queries_S1 = op.Unsqueeze(queries_S, [-1])
    causal_ST = op.LessOrEqual(keys_T, queries_S1)
    if sliding_window is not None:
        causal_ST = op.And(causal_ST, op.Greater(keys_T, op.Sub(queries_S1, sliding_window)))
    itself_ST = op.Equal(keys_T, queries_S1)
    valid_B11T = op.Unsqueeze(op.Cast(attention_mask_BT, to=ir.DataType.BOOL), [1, 2])
    if past_key is not None:
        return CausalMask(op.And(causal_ST, op.Or(valid_B11T, itself_ST)))
    blind_BS1 = op.Unsqueeze(op.Equal(_valid_keys(op, attention_mask_BT, sliding_window), 0), [2])
    blind_B1S1 = op.Unsqueeze(blind_BS1, [1])
    return CausalMask(op.Or(op.And(causal_ST, valid_B11T), op.And(itself_ST, blind_B1S1)), blind_BS1)


def _valid_keys(op: OpBuilder, attention_mask_BS: ir.Value, sliding_window: int | None) -> ir.Value:
    """How many keys each query sees where there is no cache, int64 ``[B, S]``."""
    valid_BS = op.CumSum(attention_mask_BS, 1)
    if sliding_window is None:
        return valid_BS
    earlier_BS = op.Slice(op.Pad(valid_BS, [0, sliding_window, 0, 0]), [0], op.Shape(valid_BS, start=1, end=2), [1])
    return op.Sub(valid_BS, earlier_BS)


def count_up(op: OpBuilder, length: ir.Value) -> ir.Value:
    """``0, 1, …`` up to ``length`` ``[1]``, int64."""
    # Not Range: tract cannot tell how long its result is.
    return op.Sub(op.CumSum(op.Expand([1], length), 0), 1)


def split_heads(op: OpBuilder, x_BSD: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """``[B, S, H * E]`` to ``[B, H, S, E]``."""
    return op.Transpose(op.Reshape(x_BSD, [0, 0, heads, head_dim]), perm=[0, 2, 1, 3])


def merge_heads(op: OpBuilder, x_BHSE: ir.Value) -> ir.Value:
    """``[B, H, S, E]`` to ``[B, S, H * E]``."""
    return op.Reshape(op.Transpose(x_BHSE, perm=[0, 2, 1, 3]), [0, 0, -1])


def merge_seeing_heads(op: OpBuilder, x_BHSE: ir.Value, mask: CausalMask) -> ir.Value:
    """``[B, H, S, E]`` to ``[B, S, H * E]``, with zeros for queries that ``mask`` leaves blind."""
    x_BSD = merge_heads(op, x_BHSE)
    return x_BSD if mask.blind is None else op.Where(mask.blind, 0.0, x_BSD)


def text_part(op: OpBuilder, x_BSD: ir.Value, text_BTD: ir.Value) -> ir.Value:
    """The first tokens of a joint sequence: its text, in the shape of ``text_BTD``."""
    text = op.Slice(x_BSD, [0], op.Shape(text_BTD, start=1, end=2), [1])
    text.shape = text_BTD.shape
    return text


def image_part(op: OpBuilder, x_BSD: ir.Value, text_BTD: ir.Value, image_BID: ir.Value) -> ir.Value:
    """The tokens of a joint sequence after its text: the image, in the shape of ``image_BID``."""
    image = op.Slice(x_BSD, op.Shape(text_BTD, start=1, end=2), [_INT64_MAX], [1])
    image.shape = image_BID.shape
    return image


def append_to_cache(op: OpBuilder, past_BKPE: ir.Value | None, new_BKSE: ir.Value) -> ir.Value:
    """``[B, K, P + S, E]``. A Concat outside Attention is the pattern that lowering recognises."""
    return new_BKSE if past_BKPE is None else op.Concat(past_BKPE, new_BKSE, axis=2)


def attention(
    op: OpBuilder,
    query_BHSE: ir.Value,
    key_BKTE: ir.Value,
    value_BKTE: ir.Value,
    mask: ir.Value | None,
    scale: float,
) -> ir.Value:
    """Softmax attention with grouped heads (H a multiple of K), under a boolean mask if any: ``[B, H, S, E]``.

    In the dtype of its inputs, but for the softmax, which is float32.
    """
    # Absent means the dtype of the inputs: a float32 graph needs no attribute.
    island = {} if query_BHSE.dtype == ir.DataType.FLOAT else {"softmax_precision": ir.DataType.FLOAT}
    return op.Attention(query_BHSE, key_BKTE, value_BKTE, mask, scale=scale, **island)
