"""Matrix products and attention."""

from __future__ import annotations

import math

import numpy as np

from intaglio.engines.coreml.evaluator.ops.activations import softmax
from intaglio.engines.coreml.evaluator.registry import Tensor, op

# The two products that Core ML has, as the places of each letter in inputs and output.
_EINSUMS = ("abcd,adce->abce", "abc,cbd->abd")


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[..., in]``, ``weight`` ``[out, in]``."""
    product = np.matmul(x, weight.T)
    return product if bias is None else product + bias


@op
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    if transpose_x and x.ndim > 1:
        x = np.swapaxes(x, -1, -2)
    if transpose_y and y.ndim > 1:
        y = np.swapaxes(y, -1, -2)
    return np.matmul(x, y)


@op
def einsum(values: list[Tensor], equation: str) -> Tensor:
    letters: dict[str, str] = {}
    spelled = "".join(
        letters.setdefault(letter, chr(ord("a") + len(letters))) if letter.isalpha() else letter
        for letter in equation.replace(" ", "")
    )
    if spelled not in _EINSUMS:
        raise ValueError(f"has the equation {equation!r}; Core ML has nchw,nwhu->nchu and chw,whr->chr")
    return np.einsum(spelled, *values)


@op
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """``query`` ``[..., L, E]``, ``key`` ``[..., S, E]``, ``value`` ``[..., S, EV]``; the mask is boolean or added."""
    scores = np.matmul(query, np.swapaxes(key, -1, -2)) / query.dtype.type(math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        mask = attn_mask
        if mask.dtype == np.bool_:
            mask = np.where(mask, query.dtype.type(0), query.dtype.type(-np.inf))
        scores = scores + mask
    return np.matmul(softmax(scores), value)
