"""The dims table as conversion takes it: sizes that are fixed, ranges of those that vary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from intaglio.engines.model_engine import NO_MAXIMUM
from intaglio.engines.shapes import largest_sizes, smallest_sizes
from intaglio.exporters.bundle import Dim


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
    # Core ML takes names as programs have them; dims of others may have any.
    safe = re.sub(r"\W", "_", "_".join(parts) or "main", flags=re.ASCII)
    return safe if safe.isidentifier() else f"_{safe}"


def _size(size: int | Dim) -> str:
    return str(size) if isinstance(size, int) else f"{size.min}to{size.max}"
