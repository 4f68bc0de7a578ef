"""The dims table at work: overrides from ``--shapes``, and the check of every input before a run."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, StageInfo, evaluate_dim, expression_names

# Tokens that a key-value cache has room for unless somebody asks for another number: its buffers are held whole.
CONTEXT = 2048
# Values that the smallest run may be fed with: a dims table that asks for more lies.
_MAX_FEED = 1 << 26


class Tensor(Protocol):
    """An input or output; ``shape`` None is of unknown rank."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int | str, ...] | None: ...


class Interface(Protocol):
    """What a session needs to know: a stage of a bundle, or a model that others wrote."""

    @property
    def inputs(self) -> Sequence[Tensor]: ...
    @property
    def outputs(self) -> Sequence[Tensor]: ...


def override_dims(dims: Mapping[str, Dim], shapes: str | None) -> dict[str, Dim]:
    """``dims`` with ``NAME=VALUE`` or ``NAME=MIN:OPT:MAX``, comma-separated, in their place. Raises InputError."""
    result, seen = dict(dims), set[str]()
    for item in filter(None, (shapes or "").split(",")):
        match = re.fullmatch(r"\s*([^=]*[^=\s])=([0-9]{1,18})(?::([0-9]{1,18}):([0-9]{1,18}))?\s*", item)
        if not match:
            raise InputError(f"--shapes: {item!r} is not NAME=VALUE or NAME=MIN:OPT:MAX")
        name, low = match[1], int(match[2])
        if name in seen:
            raise InputError(f"--shapes: {name} is given twice; each set of sizes takes a --shapes of its own")
        seen.add(name)
        opt, high = (int(match[3]), int(match[4])) if match[3] else (low, low)
        if name not in dims:
            raise InputError(f"--shapes: the dim {name!r} is unknown; there are {', '.join(dims)}")
        declared = dims[name]
        if declared.expression:
            raise InputError(f"--shapes: {name} is {declared.expression}, so it cannot be set")
        if not declared.min <= low <= opt <= high <= declared.max:
            raise InputError(f"--shapes: {name}={low}:{opt}:{high} must rise, within {declared.min} to {declared.max}")
        if not high:
            raise InputError(f"--shapes: {name}={low}:{opt}:{high}: the greatest size is 0, expected 1 or more")
        for size in (low, opt, high):
            if size % declared.multiple_of:
                raise InputError(f"--shapes: {name}={size} is not a multiple of {declared.multiple_of}")
        result[name] = declared.model_copy(update={"min": low, "opt": opt, "max": high})
    return result


def fit_context(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims with a cache of at most ``CONTEXT`` tokens, where its length is as ``declared`` and nobody's choice.

    A call of more tokens that somebody chose makes it that long.
    """
    fitted = dict(dims)
    past, total, new = (dims.get(name) for name in ("past_sequence", "total_sequence", "sequence"))
    if past is None or total is None or new is None or past != declared["past_sequence"]:
        return fitted
    is_chosen = new != declared["sequence"]
    context = max(CONTEXT, new.max) if is_chosen else CONTEXT
    fitted["past_sequence"], fitted["total_sequence"] = _up_to(past, context - 1), _up_to(total, context)
    if not is_chosen:
        fitted["sequence"] = _up_to(new, context)
    return fitted


def _up_to(dim: Dim, most: int) -> Dim:
    if dim.max <= most or dim.min > most:
        return dim
    return dim.model_copy(update={"max": most, "opt": None if dim.opt is None else min(dim.opt, most)})


def smallest_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """The least size of every dim; dependent ones follow from the others."""
    return sizes_at(dims, {name: dim.min for name, dim in dims.items()})


def smallest_feeds(stage: StageInfo, dims: Mapping[str, Dim]) -> dict[str, np.ndarray]:
    """Inputs of the smallest allowed shapes: ones for masks, zeros otherwise."""
    sizes = smallest_sizes(dims)
    feeds = {}
    for tensor in stage.inputs:
        shape = [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
        if math.prod(shape) > _MAX_FEED:
            raise InputError(f"{tensor.name} has the shape {shape} at the least sizes, which is too much to try out")
        fill = 1 if tensor.name == "attention_mask" else 0
        feeds[tensor.name] = np.full(shape, fill, np.dtype(tensor.dtype))
    return feeds


def check_finite(name: str, outputs: Mapping[str, np.ndarray]) -> None:
    """Raises EngineError naming those outputs of a run on :func:`smallest_feeds` that are not finite."""
    bad = [each for each, value in outputs.items() if value.dtype.kind == "f" and not np.isfinite(value).all()]
    if bad:
        raise EngineError(f"{name}: the outputs {', '.join(bad)} are not finite at the smallest shapes")


def largest_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """The greatest size of every dim, likewise."""
    return sizes_at(dims, {name: dim.max for name, dim in dims.items()})


def best_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """The size that every dim is best at, which is its least where the table does not say."""
    return sizes_at(dims, {name: dim.min if dim.opt is None else dim.opt for name, dim in dims.items()})


def sizes_at(dims: Mapping[str, Dim], chosen: Mapping[str, int]) -> dict[str, int]:
    """The size of every dim: as ``chosen``, or what a dependent one comes to, within its own bounds."""
    sizes = dict[str, int]()
    # Some dims that depend on others depend on such themselves.
    for name, dim in sorted(dims.items(), key=lambda item: _depth(item[0], dims)):
        size = None if dim.expression is None else evaluate_dim(dim.expression, sizes)
        sizes[name] = chosen[name] if size is None else min(max(size, dim.min), dim.max)
    return sizes


def _depth(name: str, dims: Mapping[str, Dim]) -> int:
    expression = dims[name].expression if name in dims else None
    return (
        0 if expression is None else 1 + max((_depth(each, dims) for each in expression_names(expression)), default=0)
    )


def check_feeds(
    stage_name: str,
    stage: Interface,
    dims: Mapping[str, Dim],
    feeds: Mapping[str, Any],
    unchecked: Collection[str] = frozenset(),
) -> None:
    """Checks names, dtypes and shapes of ``feeds`` against a stage. Raises InputError naming the input.

    A value needs ``shape``; one with a ``dtype`` is checked for it too. Inputs that are ``unchecked`` are not fed.
    """
    declared = {tensor.name: tensor for tensor in stage.inputs if tensor.name not in unchecked}
    if feeds.keys() != declared.keys():
        missing, unknown = sorted(declared.keys() - feeds.keys()), sorted(feeds.keys() - declared.keys())
        raise InputError(f"{stage_name}: inputs are missing: {missing}; or unknown: {unknown}")
    sizes: dict[str, int] = {}
    # Of each declared shape, one that fits: the layers of a cache have one shape, and are many at every token.
    fitting: dict[tuple[int | str, ...], tuple[int, ...]] = {}
    for name, tensor in declared.items():
        wanted_shape = tensor.shape
        shape = tuple(_shape(feeds[name]))
        dtype = getattr(feeds[name], "dtype", None)
        if dtype is not None and str(dtype) != tensor.dtype:
            raise InputError(f"{stage_name}: {name} is {dtype}, expected {tensor.dtype}")
        if wanted_shape is None or fitting.get(wanted_shape) == shape:
            continue
        fits = len(shape) == len(wanted_shape) and all(
            found == (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, found))
            for found, wanted in zip(shape, wanted_shape, strict=True)
        )
        if not fits:
            known = f" with {sizes}" if sizes else ""
            raise InputError(f"{stage_name}: {name} has the shape {list(shape)}, expected {list(wanted_shape)}{known}")
        fitting[wanted_shape] = shape
    for name, size in sizes.items():
        _check_size(stage_name, name, size, dims.get(name), sizes)


def check_outputs(stage_name: str, stage: Interface, outputs: Collection[str] | None) -> None:
    """Raises InputError for names that are no outputs of a stage; None stands for all."""
    names = [tensor.name for tensor in stage.outputs]
    if unknown := sorted(set(outputs or ()).difference(names)):
        raise InputError(f"{stage_name}: has no output {unknown[0]!r}; there are {', '.join(names)}")


def _shape(value: Any) -> tuple[int, ...]:
    shape = value.shape
    return shape() if callable(shape) else shape  # onnxruntime's device values have a method


def _check_size(stage_name: str, name: str, size: int, dim: Dim | None, sizes: dict[str, int]) -> None:
    if dim is None:
        return
    if not dim.min <= size <= dim.max:
        raise InputError(f"{stage_name}: {name} is {size}, expected {dim.min} to {dim.max}")
    if size % dim.multiple_of:
        raise InputError(f"{stage_name}: {name} is {size}, expected a multiple of {dim.multiple_of}")
    expected = evaluate_dim(dim.expression, sizes) if dim.expression else None
    if expected is not None and expected != size:
        raise InputError(f"{stage_name}: {name} is {size}, expected {dim.expression} = {expected}")
