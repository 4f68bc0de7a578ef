"""The key-value cache of a loaded stage of the target ``cpu``.

Shape suffixes: B batch, K key heads, C capacity, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from intaglio.engines.shapes import Tensor

# In the metadata of a lowered graph whose cache can be appended to in place: see FuseAttentionPass.
CACHE_IN_PLACE = "intaglio.cache_in_place"

# Tokens that a buffer has room for at first, and by how much it grows.
_LEAST_CAPACITY, _GROWTH = 64, 2


class KeyValueCache:
    """Buffers with room to grow, which the graph appends to in place. They double when they are full, up to
    ``longest`` tokens, and are never held twice: each is copied and let go before the next one.

    ``length`` tokens of them are filled. ``binding`` is where the session has bound them.
    """

    def __init__(self, ort: Any, tensors: Sequence[Tensor], batch: int, longest: int) -> None:
        self._ort, self._tensors, self._longest = ort, tensors, longest
        self.batch = batch
        self.length = self.capacity = 0
        self._buffers: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        self.binding: Any = None

    def reserve(self, tokens: int) -> bool:
        """Makes room for ``tokens`` more; whether the buffers have to be bound again.

        Interrupted or out of memory, the cache holds what it held, and the next call begins anew.
        """
        needed = self.length + tokens
        if needed <= self.capacity:
            return self.binding is None
        # It would keep the buffers that are replaced.
        self.binding = None
        # Never just as long as what is filled: that is how an ordinary past looks.
        capacity = max(needed, min(max(_GROWTH * needed, _LEAST_CAPACITY), self._longest))
        self.capacity = 0
        for tensor in self._tensors:
            sizes = {"batch": self.batch, "past_sequence": capacity}
            assert tensor.shape is not None
            buffer_BKCE = np.empty([n if isinstance(n, int) else sizes[n] for n in tensor.shape], tensor.dtype)
            if self.length:
                buffer_BKCE[:, :, : self.length] = self._buffers[tensor.name][:, :, : self.length]
            self._buffers[tensor.name] = buffer_BKCE
            # Of the same memory.
            self.values[tensor.name] = self._ort.OrtValue.ortvalue_from_numpy(buffer_BKCE)
        self.capacity = capacity
        return True

    def past(self, name: str) -> np.ndarray:
        """What is filled of one of the buffers, ``[B, K, length, E]``, in the buffer's own memory."""
        return self._buffers[name][:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
