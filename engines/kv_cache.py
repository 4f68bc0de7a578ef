"""What the key-value caches of all targets have in common."""

from __future__ import annotations

from typing import Protocol

from intaglio.engines.shapes import Tensor

# How the names of a cache's inputs and outputs begin.
PAST, PRESENT = "past_key_values.", "present."
# The input whose axis 1 is the new tokens, the one that hides tokens, and where buffers are written to, which lowering
# adds.
TOKENS, MASK, POSITION = "input_ids", "attention_mask", "position"


class Cache(Protocol):
    """A key-value cache of any target: ``length`` tokens of ``batch`` texts."""

    batch: int
    length: int


class FilledPast:
    """Shape and dtype of what is filled of a cache, for the check of feeds."""

    def __init__(self, tensor: Tensor, cache: Cache) -> None:
        sizes = {"batch": cache.batch, "past_sequence": cache.length}
        assert tensor.shape is not None
        self.shape = tuple(n if isinstance(n, int) else sizes[n] for n in tensor.shape)
        self.dtype = tensor.dtype
