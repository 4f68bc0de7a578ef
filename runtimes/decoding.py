"""The loop under text generation: tokens in, the next token's logits out, the key-value cache in between.

Shape suffixes: B batch, S new tokens, T all tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Decoding:
    """One generation with a session of the ``generate`` stage.

    A session that appends to its cache in place holds it once, in buffers with room to grow. Any other's stays in the
    runtime's own memory between steps: it is neither copied out nor in.
    """

    def __init__(self, session: Any, prompts: Sequence[Sequence[int]], pad_token_id: int = 0) -> None:
        self._session = session
        longest = max(map(len, prompts))
        # Padded on the left, so that the last position of every row is its newest token.
        self._tokens_BS = np.array([[pad_token_id] * (longest - len(p)) + list(p) for p in prompts], np.int64)
        self._mask_BT = np.array([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], np.int64)
        self._positions_BS = np.maximum(self._mask_BT.cumsum(axis=1) - 1, 0)
        self._cache = session.new_cache(len(prompts))
        if self._cache is not None:
            return
        self._present = [t.name for t in session.stage.outputs if t.name.startswith("present.")]
        sizes = {"batch": len(prompts), "past_sequence": 0}
        self._past: dict[str, Any] = {
            tensor.name: np.zeros([n if isinstance(n, int) else sizes[n] for n in tensor.shape], tensor.dtype)
            for tensor in session.stage.inputs
            if tensor.name.startswith("past_key_values.")
        }

    @property
    def length(self) -> int:
        """Tokens of the longest row so far, those of the next step included."""
        return self._mask_BT.shape[1]

    def step(self) -> np.ndarray:
        """Runs what is waiting (first the prompts, then the tokens that were put) and returns logits ``[B, V]``."""
        feeds = {
            "input_ids": self._tokens_BS,
            "attention_mask": self._mask_BT,
            "position_ids": self._positions_BS,
        }
        # Chosen hidden states and taps are left out: nothing here reads them.
        if self._cache is not None:
            return self._session.run_with_cache(feeds, ["logits"], self._cache)["logits"][:, -1]
        outputs = self._session.run({**feeds, **self._past}, ["logits", *self._present], resident=self._present)
        self._past = {n.replace("present.", "past_key_values.", 1): outputs[n] for n in self._present}
        return outputs["logits"][:, -1]

    def put(self, tokens_B: np.ndarray) -> None:
        """Appends one token to every row, for the next step."""
        self._tokens_BS = tokens_B.astype(np.int64)[:, None]
        self._mask_BT = np.concatenate([self._mask_BT, np.ones_like(self._tokens_BS)], axis=1)
        self._positions_BS = self._positions_BS[:, -1:] + 1
