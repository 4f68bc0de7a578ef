"""The dims table as conversion takes it: sizes that are fixed, ranges of those that vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intaglio.engines.model_engine import NO_MAXIMUM
from intaglio.engines.shapes import largest_sizes, smallest_sizes
from intaglio.exporters.bundle import Dim

# Tokens that a key-value cache has room for unless somebody asks for another number: its buffers are held whole.
CONTEXT = 2048


def fit_context(dims: Mapping[str, Dim], declared: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims with a cache of at most ``CONTEXT`` tokens, where its length is as ``declared`` and nobody's choice."""
    fitted = dict(dims)
    past, total = dims.get("past_sequence"), dims.get("total_sequence")
    if past is None or total is None or past != declared["past_sequence"]:
        return fitted
    fitted["past_sequence"] = _up_to(past, CONTEXT - 1)
    fitted["total_sequence"] = _up_to(total, CONTEXT)
    fitted["sequence"] = _up_to(dims["sequence"], CONTEXT)
    return fitted


def _up_to(dim: Dim, most: int) -> Dim:
    if dim.max <= most or dim.min > most:
        return dim
    return dim.model_copy(update={"max": most, "opt": None if dim.opt is None else min(dim.opt, most)})


def conversion_dims(dims: Mapping[str, Dim], used: Sequence[str]) -> dict[str, int | Dim]:
    """The dims that are ``used``, each a size where it is fixed. Dependent ones follow from the others.

    A dim without a greatest size is left out: conversion says so of the input that has it.
    """
    # Expressions are sums and products: they rise with their parts.
    least, largest = smallest_sizes(dims), largest_sizes(dims)
    result: dict[str, int | Dim] = {}
    for name in used:
        if name in dims and dims[name].max != NO_MAXIMUM:
            low, high = least[name], largest[name]
            result[name] = low if low == high else Dim(min=low, max=high)
    return result


def function_name(dims: Mapping[str, int | Dim], others: Sequence[Mapping[str, int | Dim]]) -> str:
    """What the function of these sizes is called: by the dims in which it differs from the others."""
    differing = [name for name, size in dims.items() if any(size != other.get(name) for other in others)]
    parts = [f"{name}{_size(dims[name])}" for name in differing]
    return "_".join(parts) or "main"


def _size(size: int | Dim) -> str:
    return str(size) if isinstance(size, int) else f"{size.min}to{size.max}"
