"""A loaded stage of the target ``coreml``: one face over Core ML on a Mac and over the evaluator elsewhere.

Shape suffixes: B batch, K key heads, S new tokens, P past tokens, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from intaglio.engines.coreml.cache_calls import cache_calls
from intaglio.engines.coreml.description import PackageDescription
from intaglio.engines.kv_cache import PAST, FilledPast
from intaglio.engines.shapes import Interface, check_feeds, check_outputs
from intaglio.errors import EngineError, InputError, IntaglioError
from intaglio.exporters.bundle import Dim

# Whose axis 1 is the new tokens.
_TOKENS = "input_ids"


class ModelState(Protocol):
    """States of a model, by the names that the package has for them."""

    def read_state(self, name: str) -> np.ndarray:
        """The value of one."""

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Sets the value of one."""


class Model(Protocol):
    """One function of a package, as coremltools loads it: names, dtypes and shapes are the package's."""

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> Mapping[str, np.ndarray]:
        """The outputs by name; ``state`` is changed in place."""

    def make_state(self) -> ModelState:
        """States that are zero."""


@dataclass
class StateCache:
    """A key-value cache in a model's states, of which ``length`` tokens are filled."""

    batch: int
    state: ModelState
    length: int = 0


class CoreMLSession:
    """A loaded stage with the face of a :class:`CpuSession`. ``run`` takes and gives NumPy arrays.

    ``open_function`` loads a function of the package by its name, when it is first needed; it then stays as long as the
    session.
    """

    def __init__(
        self,
        name: str,
        stage: Interface,
        dims: Mapping[str, Dim],
        description: PackageDescription,
        open_function: Callable[[str], Model],
    ) -> None:
        self.name, self.stage, self.dims = name, stage, dict(dims)
        self.description = description
        self._open = open_function
        self._models: dict[str, Model] = {}
        self._cached = [name for name, function in description.functions.items() if function.cache is not None]
        self._pasts = [tensor for tensor in stage.inputs if self._cached and tensor.name.startswith(PAST)]

    def run(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: Collection[str] | None = None,
        *,
        resident: Collection[str] = (),
    ) -> dict[str, np.ndarray]:
        """Runs the function that was made for the sizes of ``feeds``. ``outputs`` chooses by name (all by default).

        A stage whose cache is kept in states takes and gives it whole here, copied in and out, for a comparison;
        :meth:`run_with_cache` is what text is written with. ``resident`` is what a :class:`CpuSession` leaves in the
        runtime's memory, and changes nothing. Raises InputError on wrong inputs, for names that are no outputs and for
        sizes that the package has no function for, EngineError if the run fails.
        """
        check_feeds(self.name, self.stage, self.dims, feeds)
        check_outputs(self.name, self.stage, outputs)
        if self._cached:
            found = self._run_whole(feeds)
        else:
            function = self.description.function_for(_sizes(self.stage, feeds))
            found = self._predict(function, feeds)
        return {name: value for name, value in found.items() if outputs is None or name in outputs}

    def new_cache(self, batch: int) -> StateCache | None:
        """An empty key-value cache for :meth:`run_with_cache`; None if this stage has none.

        Raises InputError for another batch than the one that the stage was compiled for.
        """
        if not self._cached:
            return None
        function = self.description.functions[self._cached[0]]
        size = function.states[0].shape[0]
        if batch != size:
            raise InputError(
                f"{self.name}: {batch} texts at once are asked for, and its cache was compiled for {size}; write them "
                'one after the other, or compile with --shapes "batch=…"'
            )
        return StateCache(batch, self._model(self._cached[0]).make_state())

    def run_with_cache(
        self, feeds: Mapping[str, np.ndarray], outputs: Collection[str], cache: StateCache
    ) -> dict[str, np.ndarray]:
        """Runs the stage with a cache in place of past and present, and appends to it.

        ``feeds`` are the other inputs. Many tokens go in chunks, in several calls. Errors as of :meth:`run`; the cache
        then holds what it held before.
        """
        first, *others = self._pasts
        filled = {first.name: FilledPast(first, cache)}
        check_feeds(self.name, self.stage, self.dims, {**feeds, **filled}, unchecked={t.name for t in others})
        check_outputs(self.name, self.stage, outputs)
        found = self._append(feeds, cache)
        return {name: found[name] for name in outputs}

    def _append(self, feeds: Mapping[str, np.ndarray], cache: StateCache) -> dict[str, np.ndarray]:
        """The outputs of all new tokens, which are then in the cache."""
        parts: dict[str, list[np.ndarray]] = {}
        calls = cache_calls(self.description, feeds, cache.length)
        for call in calls:
            for name, value in self._predict(call.function, call.feeds, cache.state).items():
                axis = self._token_axis(name)
                # What a chunk was padded with has outputs as well.
                part = value if axis is None else value.take(range(call.tokens), axis)
                # Of an output without tokens that of the last call counts, which has seen them all.
                parts[name] = [part] if axis is None else [*parts.get(name, []), part]
        cache.length += sum(call.tokens for call in calls)
        return {
            name: values[0] if len(values) == 1 else np.concatenate(values, self._token_axis(name))
            for name, values in parts.items()
        }

    def _run_whole(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        function = self.description.functions[self._cached[0]]
        past = {state.past: feeds[state.past] for state in function.states}
        batch, length = (next(iter(past.values())).shape[axis] for axis in (0, 2))
        cache = self.new_cache(batch)
        assert cache is not None, "there is a function with a cache"
        cache.length = length
        for state in function.states:
            whole = np.zeros(state.shape, np.float16)
            if length > whole.shape[2]:
                raise InputError(
                    f"{self.name}: the past has {length} tokens, and the engine's context is {whole.shape[2]}"
                )
            whole[:, :, :length] = past[state.past]
            cache.state.write_state(state.package_name, whole)
        found = self._append({name: value for name, value in feeds.items() if name not in past}, cache)
        for state in function.states:
            present = cache.state.read_state(state.package_name)[:, :, : cache.length]
            found[state.present] = present.astype(past[state.past].dtype)
        return found

    def _token_axis(self, output: str) -> int | None:
        """Which axis of an output is the new tokens."""
        tokens = next(tensor for tensor in self.stage.inputs if tensor.name == _TOKENS).shape
        shape = next((tensor.shape for tensor in self.stage.outputs if tensor.name == output), None)
        if tokens is None or shape is None or tokens[1] not in shape:
            return None
        return shape.index(tokens[1])

    def _predict(self, function: str, feeds: Mapping[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]:
        described, model = self.description.functions[function], self._model(function)
        packed = described.pack(feeds)
        try:
            made = model.predict(packed, state) if described.states else model.predict(packed)
        except IntaglioError:
            raise
        except Exception as error:  # Core ML's errors come as whatever coremltools makes of them
            raise EngineError(f"{self.name}: the run failed: {error}") from error
        if missing := [t.package_name for t in described.outputs if t.package_name not in made]:
            raise EngineError(f"{self.name}: Core ML gave no {missing[0]!r}, only {', '.join(sorted(made))}")
        return described.unpack(made)

    def _model(self, function: str) -> Model:
        if function not in self._models:
            self._models[function] = self._open(function)
        return self._models[function]


def _sizes(stage: Interface, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Of the named dims, once the feeds have been checked."""
    return {
        dim: size
        for tensor in stage.inputs
        for dim, size in zip(tensor.shape or (), feeds[tensor.name].shape, strict=False)
        if isinstance(dim, str)
    }
