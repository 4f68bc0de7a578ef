"""The dims table at work: overrides from ``--shapes``, and the check of every input before a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from intaglio.errors import InputError
from intaglio.exporters.bundle import Dim, evaluate_dim, expression_names


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
    result = dict(dims)
    for item in filter(None, (shapes or "").split(",")):
        match = re.fullmatch(r"\s*([^=]*[^=\s])=([0-9]{1,18})(?::([0-9]{1,18}):([0-9]{1,18}))?\s*", item)
        if not match:
            raise InputError(f"--shapes: {item!r} is not NAME=VALUE or NAME=MIN:OPT:MAX")
        name, low = match[1], int(match[2])
        opt, high = (int(match[3]), int(match[4])) if match[3] else (low, low)
        if name not in dims:
            raise InputError(f"--shapes: the dim {name!r} is unknown; there are {', '.join(dims)}")
        declared = dims[name]
        if declared.expression:
            raise InputError(f"--shapes: {name} is {declared.expression}, so it cannot be set")
        if not declared.min <= low <= opt <= high <= declared.max:
            raise InputError(f"--shapes: {name}={low}:{opt}:{high} must rise, within {declared.min} to {declared.max}")
        for size in (low, opt, high):
            if size % declared.multiple_of:
                raise InputError(f"--shapes: {name}={size} is not a multiple of {declared.multiple_of}")
        result[name] = declared.model_copy(update={"min": low, "opt": opt, "max": high})
    return result


def smallest_sizes(dims: Mapping[str, Dim]) -> dict[str, int]:
    """The least size of every dim; dependent ones follow from the others."""
    return sizes_at(dims, {name: dim.min for name, dim in dims.items()})


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
