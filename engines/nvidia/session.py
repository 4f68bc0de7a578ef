"""A loaded stage of a TensorRT target, with the face of a session of the target ``cpu``.

Shape suffixes: B batch, K key heads, S new tokens, C context, E numbers of a head.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.kv_cache import PAST, POSITION, PRESENT, TOKENS, FilledPast
from intaglio.engines.nvidia.bound import Bound
from intaglio.engines.nvidia.cache_buffers import buffer, buffered_feeds
from intaglio.engines.nvidia.device import Device, Memory
from intaglio.engines.nvidia.plan import Context, Plan, PlanTensor, Shape
from intaglio.engines.nvidia.refit import BaseWeights, EngineWeights, Exchange, Refit
from intaglio.engines.shapes import Interface, check_feeds, check_outputs
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim

# Sets of shapes that stay bound: a step, a prompt before it, and one more.
_MOST_BOUND = 3


class GpuCache:
    """A key-value cache on the GPU, ``length`` tokens of ``batch`` texts in buffers ``[B, K, C, E]``."""

    def __init__(self, batch: int, buffers: dict[str, Memory]) -> None:
        self.batch, self.buffers = batch, buffers
        self.length = 0

    def free(self) -> None:
        """Gives its memory back now."""
        for memory in self.buffers.values():
            memory.free()


class GpuSession:
    """A stage on the GPU. ``run`` takes and gives NumPy arrays; outputs named ``resident`` stay on the GPU, as
    :class:`~intaglio.engines.nvidia.device.DeviceArray`, which the next run takes as they are.

    Memory is taken for a set of shapes when it is first run, and kept for the last few sets; what an engine works in is
    shared by all of them. From the second run of a set on, its work is recorded and run as one call. ``again`` is the
    command that compiles the stage, for messages; ``budget`` bounds what this process holds on the GPU, in bytes;
    ``graph`` is the portable graph with the base weights, of which adapters are computed. Threads may share a session:
    runs on one GPU come one after the other.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        stage: Interface,
        dims: Mapping[str, Dim],
        *,
        again: str = "",
        budget: int | None = None,
        graph: Path | None = None,
    ) -> None:
        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._opened: Plan | None = plan
        self._device, self._again, self._budget = plan.device, again, budget
        self._graph = graph
        self._refit: Refit | None = None
        self._scratch = Scratch(plan.device, name, budget)
        self._bound: OrderedDict[tuple[Shape, ...], Bound] = OrderedDict()
        pasts = [tensor for tensor in stage.inputs if tensor.name.startswith(PAST)]
        self._pasts = pasts if POSITION in plan.tensors else []
        self._save = weakref.finalize(self, plan.save_cache)

    def close(self) -> None:
        """Lets go of what it holds on the GPU, also where it was closed before; a run after that raises EngineError."""
        with self._device.lock:
            if self._opened is None:
                return
            self._device.make_current()
            self._unbind()
            self._scratch.free()
            self._save()
            self._opened.close()
            self._opened = self._refit = None

    @property
    def _plan(self) -> Plan:
        if self._opened is None:
            raise EngineError(f"{self.name}: its session was closed; load the stage again")
        return self._opened

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._device.lock:
            self._plan.device.make_current()
            yield

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: Collection[str] | None = None,
        *,
        resident: Collection[str] = (),
    ) -> dict[str, Any]:
        """Runs the stage. ``outputs`` chooses by name (all by default).

        A stage whose cache is kept in buffers takes and gives it whole here, copied in and out, for a comparison;
        :meth:`run_with_cache` is what text is written with. Raises InputError on wrong inputs and for sizes that the
        engine was not built for, EngineError if the run fails.
        """
        self._check(feeds)
        check_outputs(self.name, self.stage, outputs)
        with self._working():
            if self._pasts:
                return self._run_whole(feeds, outputs)
            names = [tensor.name for tensor in self.stage.outputs if outputs is None or tensor.name in outputs]
            return self._results(self._run(feeds), names, resident)

    def new_cache(self, batch: int) -> GpuCache | None:
        """An empty key-value cache for :meth:`run_with_cache`; None if this stage takes and gives its cache whole.

        Raises InputError for a batch that the engine was not built for, or beyond the memory budget.
        """
        if not self._pasts:
            return None
        self._check_range((self._pasts[0].shape or ())[:1], (batch,))
        cache = GpuCache(batch, {})
        with self._working():
            try:
                for past in self._pasts:
                    tensor = self._plan.tensors[past.name]
                    nbytes = math.prod((batch, *tensor.shape[1:])) * tensor.dtype.itemsize
                    memory = self._device.allocate(nbytes, f"the key-value cache of {self.name}", self._budget)
                    cache.buffers[past.name] = memory
                    # What is not written yet is hidden by a mask, which does not hide what is not a number.
                    self._device.clear(memory.address, nbytes)
            except BaseException:
                cache.free()
                raise
        return cache

    def run_with_cache(
        self, feeds: Mapping[str, np.ndarray], outputs: Collection[str], cache: GpuCache
    ) -> dict[str, np.ndarray]:
        """Runs the stage with a cache in place of past and present, and appends to it.

        ``feeds`` are the other inputs. Errors as of :meth:`run`; the cache then holds what it held before.
        """
        first, *others = self._pasts
        filled = {first.name: FilledPast(first, cache)}
        self._check({**feeds, **filled}, unchecked={tensor.name for tensor in others})
        check_outputs(self.name, self.stage, outputs)
        with self._working():
            found = self._results(self._append(feeds, cache), list(outputs), ())
            cache.length += feeds[TOKENS].shape[1]
        return found

    @property
    def refit(self) -> Refit:
        """The adapters that the engine has, and how strong.

        Raises EngineError where it was compiled without ``--refit``.
        """
        with self._working():
            if self._refit is None:
                try:
                    weights = self._plan.weights()
                except EngineError as error:
                    raise EngineError(
                        f"{error}. Compile again with {self._again.removesuffix('`')} --refit`"
                    ) from error
                if self._graph is None:
                    raise EngineError(f"{self.name}: the graph with its base weights is gone; adapters need a bundle")

                self._refit = Refit(BaseWeights(self._graph), weights.names, self._exchanged(weights))
            return self._refit

    def _exchanged(self, weights: EngineWeights) -> Exchange:
        # A session that held itself would keep its memory until garbage is collected.
        itself = weakref.ref(self)

        def exchange(arrays: Mapping[str, np.ndarray], current: Callable[[str], np.ndarray]) -> None:
            if (session := itself()) is None:
                raise EngineError("the session of these adapters is gone; load the stage again")
            with session._working():
                # Nothing may be under way meanwhile.
                session._device.wait()
                for bound in session._bound.values():
                    bound.forget()
                weights(arrays, current)

        return exchange

    # --- one run ---------------------------------------------------------------------------------------------

    def _append(self, feeds: Mapping[str, np.ndarray], cache: GpuCache) -> Bound:
        """Runs the engine behind what is in the cache, which it appends to."""
        if cache.length + feeds[TOKENS].shape[1] > self._context:
            raise InputError(
                f"{self.name}: {feeds[TOKENS].shape[1]} tokens cannot be appended to {cache.length}: the engine's "
                f"context is {self._context}. {self._wider('total_sequence')}"
            )
        return self._run(buffered_feeds(self.name, feeds, cache.length, self._context), cache.buffers)

    def _run(self, feeds: Mapping[str, Any], buffers: Mapping[str, Memory] | None = None) -> Bound:
        """Runs the engine. ``buffers`` are inputs that lie on the GPU and are changed in place."""
        shapes = {name: tuple(feed.shape) for name, feed in feeds.items()}
        for name in buffers or {}:
            shapes[name] = (shapes[TOKENS][0], *self._plan.tensors[name].shape[1:])
        bound = self._bound_for(shapes)
        for name, feed in feeds.items():
            bound.feed(name, feed)
        bound.run(buffers or {})
        return bound

    def _bound_for(self, shapes: Mapping[str, Shape]) -> Bound:
        key = tuple(shapes[name] for name in sorted(shapes))
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        profile = self._profile_for(shapes)
        context = None
        if len(self._bound) >= _MOST_BOUND:
            _, oldest = self._bound.popitem(last=False)
            # Making one takes long where it compiles.
            context = oldest.release()
        context = context or self._plan.new_context()
        try:
            self._bound[key] = self._bind(context, profile, shapes)
        except (InputError, EngineError):
            if not self._bound:
                raise
            # There may be room without the other sets.
            self._unbind()
            self._bound[key] = self._bind(context, profile, shapes)
        return self._bound[key]

    def _unbind(self) -> None:
        # A traceback may hold them.
        for bound in self._bound.values():
            bound.release().close()
        self._bound.clear()

    def _bind(self, context: Context, profile: int, shapes: Mapping[str, Shape]) -> Bound:
        cached = [tensor.name for tensor in self._pasts]
        return Bound(self._plan, context, self._scratch, profile, shapes, cached, self._budget)

    def _profile_for(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile that takes these shapes. Raises InputError saying which dim does not fit."""
        complaints = []
        for index, profile in enumerate(self._plan.profiles):
            wrong = self._misfit(shapes, profile)
            if wrong is None:
                return index
            complaints.append(wrong)
        name, axis = complaints[0]
        size, dim = shapes[name][axis], self._dim(name, axis)
        ranges = dict.fromkeys(
            _range_text(profile[name][0][axis], profile[name][1][axis]) for profile in self._plan.profiles
        )
        if any(self._fits(size, profile[name], axis) for profile in self._plan.profiles):
            raise InputError(
                f"{self.name}: no profile of the engine takes these sizes together ({_shapes_text(shapes)}). Compile "
                f"with them as a set of --shapes: {self._again}"
            )
        raise InputError(
            f"{self.name}: {dim} is {size}, and the engine was compiled for {' and '.join(ranges)}. {self._wider(dim)}"
        )

    def _misfit(
        self, shapes: Mapping[str, Shape], profile: Mapping[str, tuple[Shape, Shape]]
    ) -> tuple[str, int] | None:
        """Input and axis of the first size that a profile does not take."""
        for name, bounds in profile.items():
            if name not in shapes:
                raise EngineError(f"{self.name}: the engine wants an input {name!r}, which this stage does not have")
            for axis, size in enumerate(shapes[name]):
                if not self._fits(size, bounds, axis):
                    return name, axis
        return None

    @staticmethod
    def _fits(size: int, bounds: tuple[Shape, Shape], axis: int) -> bool:
        return bounds[0][axis] <= size <= bounds[1][axis]

    def _dim(self, name: str, axis: int) -> str:
        declared = next((tensor.shape for tensor in self.stage.inputs if tensor.name == name), None)
        return str(declared[axis]) if declared is not None else f"axis {axis} of {name}"

    def _results(self, bound: Bound, names: Collection[str], resident: Collection[str]) -> dict[str, Any]:
        dtypes = {tensor.name: tensor.dtype for tensor in self.stage.outputs}
        return {
            name: bound.kept(name, dtypes[name]) if name in resident else bound.result(name, dtypes[name])
            for name in names
        }

    # --- checks ----------------------------------------------------------------------------------------------

    def _check(self, feeds: Mapping[str, Any], unchecked: Collection[str] = frozenset()) -> None:
        """Names, dtypes and shapes; a size out of range names the command that widens it."""
        check_feeds(self.name, self.stage, {}, feeds, unchecked)
        for tensor in self.stage.inputs:
            if tensor.name in feeds:
                self._check_range(tensor.shape or (), feeds[tensor.name].shape)
        check_feeds(self.name, self.stage, self.dims, feeds, unchecked)

    def _check_range(self, dims: Sequence[int | str], shape: Shape) -> None:
        for dim, size in zip(dims, shape, strict=True):
            bounds = self.dims.get(dim) if isinstance(dim, str) else None
            if bounds is not None and not bounds.min <= size <= bounds.max:
                raise InputError(
                    f"{self.name}: {dim} is {size}, and the engine was compiled for "
                    f"{_range_text(bounds.min, bounds.max)}. {self._wider(str(dim))}"
                )

    def _wider(self, dim: str) -> str:
        return f'Compile for it, with "{dim}=MIN:OPT:MAX" in --shapes: {self._again}'

    # --- a cache that is given whole -------------------------------------------------------------------------

    @property
    def _context(self) -> int:
        """Tokens that the buffers of the cache have room for."""
        return self._plan.tensors[self._pasts[0].name].shape[2]

    def _run_whole(self, feeds: Mapping[str, np.ndarray], outputs: Collection[str] | None) -> dict[str, np.ndarray]:
        past = {tensor.name: feeds[tensor.name] for tensor in self._pasts}
        batch, length = (next(iter(past.values())).shape[axis] for axis in (0, 2))
        if length > self._context:
            raise InputError(
                f"{self.name}: the past has {length} tokens, and the engine's context is {self._context}. "
                f"{self._wider('total_sequence')}"
            )
        cache = self.new_cache(batch)
        assert cache is not None, "there is a cache"
        try:
            for name, array in past.items():
                whole = buffer(array.astype(self._plan.tensors[name].dtype), self._context)
                self._device.write(cache.buffers[name].address, whole)
            cache.length = length
            bound = self._append({name: feed for name, feed in feeds.items() if name not in past}, cache)
            names = [tensor.name for tensor in self.stage.outputs if outputs is None or tensor.name in outputs]
            presents = {name.replace(PAST, PRESENT, 1): name for name in past}
            found = self._results(bound, [name for name in names if name not in presents], ())
            length += feeds[TOKENS].shape[1]
            for name in names:
                if name in presents:
                    whole = self._read_past(self._plan.tensors[presents[name]], cache, presents[name])
                    found[name] = whole[:, :, :length].astype(past[presents[name]].dtype)
            return {name: found[name] for name in names}
        finally:
            cache.free()

    def _read_past(self, tensor: PlanTensor, cache: GpuCache, name: str) -> np.ndarray:
        whole = np.empty((cache.batch, *tensor.shape[1:]), tensor.dtype)
        self._device.read(cache.buffers[name].address, whole)
        return whole


class Scratch:
    """What an engine works in, shared by its sets of shapes, which run one after the other. It grows where it must.

    ``version`` changes with the memory: what was recorded before is of no use then.
    """

    def __init__(self, device: Device, name: str, budget: int | None) -> None:
        self._device, self._name, self._budget = device, name, budget
        self.memory: Memory | None = None
        self.version = 0

    def reserve(self, nbytes: int) -> Memory:
        """At least ``nbytes``. Raises InputError beyond the budget, EngineError where the GPU is full."""
        if self.memory is None or self.memory.nbytes < nbytes:
            # Never both: the old one goes first.
            self.free()
            self.memory = self._device.allocate(nbytes, f"what {self._name} works in", self._budget)
        return self.memory

    def free(self) -> None:
        """Gives it back now; what was recorded is of no use after."""
        if self.memory is not None:
            self._device.wait()
            self.memory.free()
            self.memory = None
            self.version += 1


def _range_text(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _shapes_text(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
