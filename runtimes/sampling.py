"""Choosing the next token from logits.

Shape suffixes: B batch, V vocabulary.

The order and the meaning of the filters are those of transformers (`generation/logits_process.py`):
repetition penalty (Keskar et al. 2019, arXiv:1909.05858), temperature, then top-k (Fan et al. 2018,
arXiv:1805.04833), top-p (Holtzman et al. 2019, arXiv:1904.09751), min-p (Nguyen et al. 2024, arXiv:2407.01082).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from intaglio.errors import EngineError, InputError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    temperature: 0 always takes the most probable token, and only repetition_penalty then has an effect; else logits
    are divided by it. top_k: only this many most probable tokens are kept, and those equal to the last of
    them. top_p: only the fewest most probable tokens whose probabilities reach this sum are kept, at least
    one. min_p: only tokens at least this many times as probable as the most probable one are kept, of those that
    the other filters left. repetition_penalty: the logits of tokens that are in the prompt or were written before
    are divided by it where positive and multiplied by it where negative; above 1 makes repetition less probable.
    seed: None draws one from the operating system.

    Raises InputError for a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not _is_real(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise InputError(
                f"temperature is {self.temperature!r}; expected a finite number of at least 0 (0 is greedy)."
            )
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k is {self.top_k!r}; expected an integer of at least 1, or None to keep all.")
        if self.top_p is not None and (not _is_real(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p is {self.top_p!r}; expected a number above 0 and at most 1, or None.")
        if self.min_p is not None and (not _is_real(self.min_p) or not 0 <= self.min_p <= 1):
            raise InputError(f"min_p is {self.min_p!r}; expected a number from 0 to 1, or None.")
        penalty = self.repetition_penalty
        if penalty is not None and (not _is_real(penalty) or not math.isfinite(penalty) or penalty <= 0):
            raise InputError(
                f"repetition_penalty is {penalty!r}; expected a finite number above 0 (1 changes nothing), or None."
            )
        if self.seed is not None and (not _is_integer(self.seed) or self.seed < 0):
            raise InputError(f"seed is {self.seed!r}; expected an integer of at least 0, or None.")


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class Sampler:
    """Draws tokens, one call per step of generation. The same seed and the same logits give the same tokens.

    Each call takes one uniform number per row, in order, from NumPy's Philox generator and inverts the
    cumulative distribution over token ids in ascending order. Greedy choice takes none.
    """

    def __init__(self, params: SamplingParams, excluded: np.ndarray | None = None) -> None:
        """``excluded`` are ids that are never chosen, since they stand for no token."""
        self.params = params
        self._excluded = excluded
        seed = None if params.seed is None else int(params.seed)
        self._generator = np.random.Generator(np.random.Philox(seed))

    def sample(self, logits_BV: np.ndarray, tokens: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """Takes float32 logits [batch, vocab] and returns int64 token ids [batch].

        ``tokens`` are those of each row so far, prompt included and padding left out; a repetition penalty needs
        them. Raises EngineError for another shape or dtype and for logits that are not finite, InputError where
        tokens are missing.
        """
        if self.params.temperature == 0:
            return np.argmax(self._penalized(logits_BV, tokens), axis=-1).astype(np.int64)
        probabilities_BV = self.probabilities(logits_BV, tokens)
        uniforms_B = self._generator.random(len(logits_BV))
        tokens_B = np.empty(len(logits_BV), np.int64)
        for row, (probabilities_V, uniform) in enumerate(zip(probabilities_BV, uniforms_B, strict=True)):
            cumulative_V = np.cumsum(probabilities_V)
            # "right" passes over tokens of probability 0. A uniform number is at most 1 - 2**-53, so the
            # product stays below the total even when rounded, and there always is such a token.
            tokens_B[row] = np.searchsorted(cumulative_V, uniform * cumulative_V[-1], side="right")
        return tokens_B

    def probabilities(self, logits_BV: np.ndarray, tokens: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """The float64 distribution [batch, vocab] that `sample` draws from, 0 for filtered tokens.

        Raises the errors of `sample`, and InputError at temperature 0, where nothing is drawn.
        """
        params = self.params
        if params.temperature == 0:
            raise InputError("temperature is 0: the most probable token is taken and there is no distribution.")
        scores_BV = self._penalized(logits_BV, tokens).astype(np.float64)
        # Taking the maximum off first changes no probability and keeps a tiny temperature from overflowing to
        # inf - inf.
        scores_BV -= scores_BV.max(axis=-1, keepdims=True)
        with np.errstate(over="ignore"):
            scores_BV /= params.temperature
        if params.top_k is not None:
            scores_BV = _keep_top_k(scores_BV, int(params.top_k))
        if params.top_p is not None and params.top_p < 1:
            scores_BV = _keep_top_p(scores_BV, float(params.top_p))
        if params.min_p is not None and params.min_p > 0:
            scores_BV = _keep_min_p(scores_BV, float(params.min_p))
        return _softmax(scores_BV)

    def _penalized(self, logits_BV: np.ndarray, tokens: Sequence[Sequence[int]] | None) -> np.ndarray:
        """The checked logits after the repetition penalty; minus infinity for what is excluded."""
        _check_logits(logits_BV)
        if self._excluded is not None and len(self._excluded):
            scores_BV = self._repetition_penalized(logits_BV, tokens).copy()
            scores_BV[:, self._excluded] = -np.inf
            return scores_BV
        return self._repetition_penalized(logits_BV, tokens)

    def _repetition_penalized(self, logits_BV: np.ndarray, tokens: Sequence[Sequence[int]] | None) -> np.ndarray:
        if self.params.repetition_penalty in (None, 1):
            return logits_BV
        if tokens is None or len(tokens) != len(logits_BV):
            raise InputError("a repetition penalty needs the tokens so far of every row of the logits.")
        # In float32, as the logits are: greedy choices are then those of transformers to the last bit.
        penalty = np.float32(self.params.repetition_penalty)
        largest = np.finfo(np.float32).max
        scores_BV = logits_BV.copy()
        for scores_V, row in zip(scores_BV, tokens, strict=True):
            seen = np.unique(np.asarray(row, np.int64))
            # A vocabulary may be wider than the logits.
            seen = seen[seen < len(scores_V)]
            with np.errstate(over="ignore"):
                changed = np.where(scores_V[seen] < 0, scores_V[seen] * penalty, scores_V[seen] / penalty)
            scores_V[seen] = np.clip(changed, -largest, largest)
        return scores_BV


def _check_logits(logits_BV: np.ndarray) -> None:
    if logits_BV.ndim != 2 or logits_BV.shape[1] == 0 or logits_BV.dtype != np.float32:
        raise EngineError(
            f"logits are {logits_BV.dtype} of shape {logits_BV.shape}; expected float32 [batch, vocab]. "
            "Take the last position of each row, and widen a half-precision output."
        )
    finite_BV = np.isfinite(logits_BV)
    if not finite_BV.all():
        row = int(np.flatnonzero(~finite_BV.all(axis=-1))[0])
        count = int(np.count_nonzero(~finite_BV[row]))
        raise EngineError(
            f"row {row} of the logits has {count} of {logits_BV.shape[1]} values that are not finite. The "
            "engine overflowed or its weights are damaged: compare it with `intaglio parity`, or compile "
            "in float32."
        )


def _keep_top_k(scores_BV: np.ndarray, top_k: int) -> np.ndarray:
    vocab = scores_BV.shape[-1]
    if top_k >= vocab:
        return scores_BV
    threshold_B1 = np.partition(scores_BV, vocab - top_k, axis=-1)[:, vocab - top_k, None]
    return np.where(scores_BV < threshold_B1, -np.inf, scores_BV)


def _keep_top_p(scores_BV: np.ndarray, top_p: float) -> np.ndarray:
    # Ascending. Of equal scores at the edge the lowest ids are kept, as in greedy decoding; torch leaves that
    # open.
    order_BV = np.argsort(-scores_BV, axis=-1, kind="stable")[:, ::-1]
    sorted_BV = np.take_along_axis(scores_BV, order_BV, axis=-1)
    remove_BV = np.cumsum(_softmax(sorted_BV), axis=-1) <= 1 - top_p
    remove_BV[:, -1] = False
    removed_BV = np.empty_like(remove_BV)
    np.put_along_axis(removed_BV, order_BV, remove_BV, axis=-1)
    return np.where(removed_BV, -np.inf, scores_BV)


def _keep_min_p(scores_BV: np.ndarray, min_p: float) -> np.ndarray:
    probabilities_BV = _softmax(scores_BV)
    return np.where(probabilities_BV < min_p * probabilities_BV.max(axis=-1, keepdims=True), -np.inf, scores_BV)


def _softmax(scores_BV: np.ndarray) -> np.ndarray:
    weights_BV = np.exp(scores_BV - scores_BV.max(axis=-1, keepdims=True))
    return weights_BV / weights_BV.sum(axis=-1, keepdims=True)
