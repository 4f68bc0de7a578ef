"""How tokens are appended to a cache that is kept in states: which functions are called, and with what.

Shape suffixes: B batch, S tokens, T all tokens so far, C context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from intaglio.engines.coreml.description import CacheDescription, PackageDescription
from intaglio.errors import EngineError, InputError

_MASK = "attention_mask"
# Fewer tokens than this are appended one by one: that costs as many calls.
_WORTH_A_CHUNK = 3


@dataclass(frozen=True)
class CacheCall:
    """One call of ``function``, which appends ``tokens`` tokens; ``feeds`` have the names of the ONNX graph.

    All calls of a package change one state. Outputs of the last one are those of the last token.
    """

    function: str
    feeds: dict[str, np.ndarray]
    tokens: int


def cache_calls(package: PackageDescription, feeds: Mapping[str, np.ndarray], past: int) -> list[CacheCall]:
    """The calls that append what is fed to a cache of ``past`` tokens, in order.

    ``feeds`` are those of the portable graph without its cache: ``input_ids`` ``[B, S]``, ``attention_mask``
    ``[B, past + S]``, ``position_ids`` ``[B, S]``. A chunk that is not full is padded behind its tokens: what it writes
    there is overwritten by the next call, before anything sees it. Raises InputError where the context has no room.
    """
    functions = {name: f.cache for name, f in package.functions.items() if f.cache is not None}
    if 1 not in {cache.tokens for cache in functions.values()}:
        raise EngineError("the package has no function that appends one token to a cache. Compile the model again.")
    count = feeds["input_ids"].shape[1]
    context = min(cache.context for cache in functions.values())
    if count < 1 or past + count > context:
        raise InputError(f"{count} tokens cannot be appended to {past}: the engine's context is {context}")
    padded_BC = _padded(feeds[_MASK], context) if _MASK in feeds else None
    calls, done = [], 0
    while done < count:
        name, tokens = _next(functions, count - done, past + done)
        cache = functions[name]
        given = {each: _chunk(array, done, tokens, cache.tokens) for each, array in feeds.items() if each != _MASK}
        if padded_BC is not None:
            given[_MASK] = padded_BC
        calls.append(CacheCall(name, {**given, cache.position: np.array([past + done], np.int64)}, tokens))
        done += tokens
    return calls


def _next(functions: Mapping[str, CacheDescription], left: int, past: int) -> tuple[str, int]:
    """The function to call and how many of the tokens that are left it is given."""
    fitting = {name: cache.tokens for name, cache in functions.items() if past + cache.tokens <= cache.context}
    full = [name for name, tokens in fitting.items() if tokens <= left]
    largest = max(full, key=lambda name: fitting[name])
    # Padded, it gives the outputs of its padding: the last token is for another call.
    roomy = [name for name, tokens in fitting.items() if tokens > left - 1]
    if fitting[largest] == 1 and left >= _WORTH_A_CHUNK and roomy:
        return min(roomy, key=lambda name: fitting[name]), left - 1
    return largest, fitting[largest]


def _chunk(array_BS: np.ndarray, done: int, tokens: int, length: int) -> np.ndarray:
    """Some of the tokens, the last one repeated up to ``length``: some graphs look at the greatest position."""
    return array_BS[:, np.minimum(np.arange(done, done + length), done + tokens - 1)]


def _padded(mask_BT: np.ndarray, context: int) -> np.ndarray:
    mask_BC = np.zeros((mask_BT.shape[0], context), mask_BT.dtype)
    mask_BC[:, : mask_BT.shape[1]] = mask_BT
    return mask_BC
