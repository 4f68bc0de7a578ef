"""A decoder whose key-value cache is in buffers of a fixed length: what it is fed beside them. See ScatterCachePass.

Shape suffixes: B batch, K key heads, P past tokens, S new tokens, C context, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from intaglio.engines.kv_cache import MASK, PAST, POSITION, TOKENS
from intaglio.engines.shapes import Tensor, largest_sizes
from intaglio.errors import InputError
from intaglio.exporters.bundle import Dim


def context_of(inputs: Sequence[Tensor], dims: Mapping[str, Dim]) -> int:
    """Tokens that the buffers of a stage hold: the most that its dims allow; 0 without a cache that is appended to."""
    has_cache = any(tensor.name.startswith(PAST) for tensor in inputs)
    # What past and new tokens come to at most, which may be far less than the table's bound.
    return largest_sizes(dims)["total_sequence"] if has_cache and "total_sequence" in dims else 0


def buffered_feeds(name: str, feeds: Mapping[str, Any], past: int, context: int) -> dict[str, Any]:
    """``feeds`` without a cache, behind ``past`` tokens of it: the mask as long as the buffers, and the position.

    Raises InputError where the context has no room.
    """
    count, mask_BT = feeds[TOKENS].shape[1], feeds[MASK]
    if past + count > context:
        raise InputError(f"{name}: {count} tokens cannot be appended to {past}: the engine's context is {context}")
    mask_BC = np.zeros((mask_BT.shape[0], context), mask_BT.dtype)
    mask_BC[:, : mask_BT.shape[1]] = mask_BT
    return {**feeds, MASK: mask_BC, POSITION: np.array([past], np.int64)}


def buffer(past_BKPE: np.ndarray, context: int) -> np.ndarray:
    """A past in a buffer ``[B, K, C, E]``, zeros behind it."""
    whole = np.zeros((*past_BKPE.shape[:2], context, past_BKPE.shape[3]), past_BKPE.dtype)
    whole[:, :, : past_BKPE.shape[2]] = past_BKPE
    return whole
