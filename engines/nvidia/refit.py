"""LoRA on a built engine of full TensorRT: weights of products are exchanged while it stays loaded.

What an engine holds is always computed from the base weights, which are the bundle's, and never from what it held:
no adapter leaves a residue. Names of weights are the checkpoint's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import EngineError, InputError

# How the two matrices of a low-rank branch beside a quantized weight are named after their module.
_DOWN, _UP = "lora_A.weight", "lora_B.weight"
# Behind the name of a weight that was narrowed.
_NARROWED = re.compile(r"\.b?float16$")
# Exchanged at a time: what is computed must stay in memory until TensorRT has read it.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class LoraTerm:
    """What an adapter adds to a weight ``[out, in]``: ``scale * up @ down``; ``down`` is ``[rank, in]``."""

    down: np.ndarray
    up: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """The width between the two matrices."""
        return int(self.down.shape[0])


# By the name of the weight.
LoraTerms = Mapping[str, LoraTerm]
_Mix = tuple[tuple[str, float], ...]
# Exchanges weights, together; what others hold now is told by name, where TensorRT wants them along with these.
Exchange = Callable[[Mapping[str, np.ndarray], Callable[[str], np.ndarray]], None]


class BaseWeights:
    """The weights of a stage of a bundle by name, read whenever they are asked for."""

    def __init__(self, graph: Path) -> None:
        import onnx_ir as ir

        self._values = ir.load(graph).graph.initializers

    @property
    def names(self) -> set[str]:
        """The weights of the checkpoint, those that are quantized too."""
        found = {name.removesuffix(".codes") for name in self._values}
        return {name for name in found if name.endswith(".weight") and not name.endswith((f".{_DOWN}", f".{_UP}"))}

    def __call__(self, name: str) -> np.ndarray:
        """The weight ``name``. Raises EngineError."""
        from intaglio.engines.lowering.packed_blocks import read_tensor

        tensor = self._values[name].const_value if name in self._values else None
        if tensor is None:
            raise EngineError(f"the bundle has no weight {name!r}")
        return read_tensor(tensor)


class Refit:
    """Which adapters a loaded stage has, and how strong; begins with none.

    ``base`` reads a weight of the bundle, ``names`` are those that the engine can exchange, and ``write`` exchanges
    some of them, together. A weight that is quantized is not exchanged: its adapters go into the low-rank branch
    beside it, where the bundle was exported with one: into the part of its rank that adds nothing yet.
    """

    def __init__(
        self,
        base: Callable[[str], np.ndarray],
        names: Collection[str],
        write: Exchange,
    ) -> None:
        self._base, self._names, self._write = base, frozenset(names), write
        self._adapters: dict[str, dict[str, LoraTerm]] = {}
        # What each weight of the engine is made of; None: an exchange failed, and nobody knows.
        self._held: dict[str, _Mix | None] = {}
        self._strengths: dict[str, float] = {}

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are known."""
        return tuple(self._adapters)

    @property
    def strengths(self) -> dict[str, float]:
        """What was asked for last, without strengths of 0."""
        return dict(self._strengths)

    def add(self, name: str, terms: LoraTerms) -> None:
        """Makes an adapter known, with the strength 0.

        Raises InputError for a name that is taken, for a weight that cannot be exchanged, and for matrices that are not
        of its shape.
        """
        if name in self._adapters:
            raise InputError(f"an adapter {name!r} is there already; remove it first, or give another name")
        if not terms:
            raise InputError(f"the adapter {name!r} changes nothing of this stage")
        for weight, term in terms.items():
            rows, columns = self._shape(name, weight)
            found = (term.up.shape[0], term.down.shape[1])
            if found != (rows, columns) or term.up.shape[1] != term.rank:
                raise InputError(
                    f"the adapter {name!r} adds {list(found)} to {weight}, which is [{rows}, {columns}]; it is of "
                    "another model"
                )
        self._adapters[name] = dict(terms)

    def remove(self, name: str) -> None:
        """Forgets an adapter, and takes it out of the engine. Raises InputError, EngineError."""
        self._known(name)
        self.set_strengths({other: strength for other, strength in self.strengths.items() if other != name})
        del self._adapters[name]

    def set_strengths(self, strengths: Mapping[str, float]) -> list[str]:
        """Gives the engine these adapters with these strengths, and takes out all others; the weights it exchanged.

        Raises InputError for an adapter that is not known, a strength that is no number, or a branch whose rank is too
        small; EngineError where TensorRT refuses. The weights it had not taken yet are written again next time.
        """
        for name, strength in strengths.items():
            self._known(name)
            if not np.isfinite(strength):
                raise InputError(f"the strength of {name!r} is {strength}, expected a number")
        wanted: dict[str, list[tuple[str, float]]] = {}
        for name in sorted(name for name, strength in strengths.items() if strength):
            for weight in self._adapters[name]:
                wanted.setdefault(weight, []).append((name, float(strengths[name])))
        mixes: dict[str, _Mix] = {weight: tuple(wanted.get(weight, ())) for weight in {*wanted, *self._held}}
        changed = sorted(weight for weight, mix in mixes.items() if self._held.get(weight, ()) != mix)
        for weight in changed:
            self._check_rank(weight, mixes[weight])
        self._strengths = {name: float(strengths[name]) for name in sorted(strengths) if strengths[name]}
        written: list[str] = []
        for weights, arrays in self._batches(changed, mixes):
            self._held |= dict.fromkeys(weights)
            self._write(arrays, self._current)
            self._held |= {weight: mixes[weight] for weight in weights}
            written += arrays
        self._held = {weight: mix for weight, mix in self._held.items() if mix != ()}
        return written

    def _current(self, name: str) -> np.ndarray:
        """What the engine holds under a name, also where that is half of a branch."""
        module = next((name.removesuffix(f".{end}") for end in (_DOWN, _UP) if name.endswith(f".{end}")), None)
        weight = name if module is None or self._branch(f"{module}.weight") is None else f"{module}.weight"
        return self._computed(weight, self._held.get(weight) or ())[name]

    def _known(self, name: str) -> None:
        if name not in self._adapters:
            raise InputError(f"the adapter {name!r} is unknown; there are {', '.join(self._adapters) or 'none'}")

    def _branch(self, weight: str) -> tuple[str, str] | None:
        module = weight.removesuffix(".weight")
        down, up = f"{module}.{_DOWN}", f"{module}.{_UP}"
        return (down, up) if weight not in self._names and {down, up} <= self._names else None

    def _shape(self, adapter: str, weight: str) -> tuple[int, int]:
        if branch := self._branch(weight):
            return int(self._base(branch[1]).shape[0]), int(self._base(branch[0]).shape[1])
        if weight not in self._names:
            raise InputError(
                f"the adapter {adapter!r} changes {weight}, which the engine cannot exchange: it is quantized and has "
                "no low-rank branch, or it was compiled without --refit. Export the bundle with --lora FILE:0 to give "
                "it branches, and compile with --refit"
            )
        rows, columns = self._base(weight).shape
        return int(rows), int(columns)

    def _check_rank(self, weight: str, mix: _Mix) -> None:
        branch = self._branch(weight)
        if branch is None:
            return
        needed = sum(self._adapters[name][weight].rank for name, _ in mix)
        free = int((~self._base(branch[1]).astype(np.float32).any(axis=0)).sum())
        if needed > free:
            raise InputError(
                f"{weight}: the adapters have rank {needed} together, and its branch has room for {free}; export the "
                "bundle with an adapter of a larger rank and the strength 0"
            )

    def _batches(
        self, changed: list[str], mixes: Mapping[str, _Mix]
    ) -> Iterator[tuple[list[str], dict[str, np.ndarray]]]:
        weights: list[str] = []
        arrays: dict[str, np.ndarray] = {}
        for weight in changed:
            weights.append(weight)
            arrays |= self._computed(weight, mixes[weight])
            if sum(array.nbytes for array in arrays.values()) >= _BATCH_BYTES:
                yield weights, arrays
                weights, arrays = [], {}
        if weights:
            yield weights, arrays

    def _computed(self, weight: str, mix: _Mix) -> dict[str, np.ndarray]:
        """The weight, or the two matrices of its branch, in the dtype of the base; sums are float32."""
        terms = [(self._adapters[name][weight], strength) for name, strength in mix]
        branch = self._branch(weight)
        if branch is None:
            base = self._base(weight)
            if not terms:
                return {weight: base}
            total = base.astype(np.float32)
            # What comes out as not finite is refused when it is exchanged.
            with np.errstate(over="ignore", invalid="ignore"):
                for term, strength in terms:
                    total = total + _float32(term.up) * np.float32(term.scale * strength) @ _float32(term.down)
            return {weight: _rounded(total, base.dtype)}
        down, up = (self._base(name) for name in branch)
        free = np.flatnonzero(~up.astype(np.float32).any(axis=0))
        new_down, new_up = down.copy(), up.copy()
        for term, strength in terms:
            own, free = free[: term.rank], free[term.rank :]
            new_down[own] = _rounded(term.down, down.dtype)
            new_up[:, own] = _rounded(_float32(term.up) * np.float32(term.scale * strength), up.dtype)
        return {branch[0]: new_down, branch[1]: new_up}


def checkpoint_name(stored: str) -> str:
    """The name that a weight of an engine has in the checkpoint."""
    return _NARROWED.sub("", stored)


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False)


def _rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # what comes out as not finite is refused when it is exchanged
        return array.astype(dtype)


class EngineWeights:
    """What of a loaded engine can be exchanged, and the exchange. ``engine`` is TensorRT's."""

    def __init__(self, trt: Any, engine: Any, logger: Any) -> None:
        self._trt, self._refitter = trt, trt.Refitter(engine, logger)
        # Names in the engine, by the checkpoint's: one that is narrowed has another, and both may be there.
        self._stored: dict[str, list[str]] = {}
        for name in self._refitter.get_all_weights():
            self._stored.setdefault(checkpoint_name(name), []).append(name)
        self.names = tuple(self._stored)

    def __call__(self, arrays: Mapping[str, np.ndarray], current: Callable[[str], np.ndarray]) -> None:
        """Exchanges these weights, in the dtype that the engine has them in, with those that it joined them with.

        ``current`` is what a weight holds now. Raises EngineError, InputError for what that dtype does not hold.
        """
        kept: dict[str, np.ndarray] = {}
        try:
            for name, array in arrays.items():
                for stored in self._stored.get(name, [name]):
                    self._set(stored, array, kept)
            while missing := [name for name in self._refitter.get_missing_weights() if name not in kept]:
                for stored in missing:
                    self._set(stored, current(checkpoint_name(stored)), kept)
            if not self._refitter.refit_cuda_engine():
                raise EngineError(f"TensorRT cannot exchange {', '.join(list(arrays)[:4])}, …")
        finally:
            # It would read them again in the next exchange, from memory that is gone by then.
            for name in kept:
                self._refitter.unset_named_weights(name)

    def _set(self, name: str, array: np.ndarray, kept: dict[str, np.ndarray]) -> None:
        import ml_dtypes

        trt = self._trt
        numpy = {trt.float32: np.float32, trt.float16: np.float16, trt.bfloat16: ml_dtypes.bfloat16}
        prototype = self._refitter.get_weights_prototype(name)
        if prototype.dtype not in numpy or prototype.size != array.size:
            raise EngineError(
                f"{name}: the engine holds {prototype.size} numbers of {prototype.dtype}, expected {array.size} of a "
                "float type; compile the bundle again"
            )
        rounded = np.ascontiguousarray(_rounded(array, np.dtype(numpy[prototype.dtype])))
        if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
            raise InputError(
                f"{name}: with these adapters it has values that {rounded.dtype.name} does not hold; give them less "
                "strength"
            )
        kept[name] = rounded
        if not self._refitter.set_named_weights(name, trt.Weights(prototype.dtype, rounded.ctypes.data, rounded.size)):
            raise EngineError(f"{name}: TensorRT refuses the new weight")
