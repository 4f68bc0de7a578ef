"""Optimisation profiles: the sizes that an engine takes, and those it is best at."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from intaglio.engines.model_engine import NO_MAXIMUM
from intaglio.engines.shapes import Tensor, best_sizes, largest_sizes, smallest_sizes
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """Least, best and greatest shape of an input."""

    min: Shape
    opt: Shape
    max: Shape


def profiles_of(inputs: Sequence[Tensor], variants: Sequence[Mapping[str, Dim]]) -> list[dict[str, Range]]:
    """The profile of each set of sizes, each once: sets may differ in dims of other stages. Raises CompileError."""
    found: list[dict[str, Range]] = []
    for dims in variants:
        made = profile(inputs, dims)
        if made not in found:
            found.append(made)
    return found


def profile(inputs: Sequence[Tensor], dims: Mapping[str, Dim]) -> dict[str, Range]:
    """The profile of these dims, by the names of the inputs. Raises CompileError for a dim without a greatest size."""
    least, best, largest = smallest_sizes(dims), best_sizes(dims), largest_sizes(dims)
    result = {}
    for tensor in inputs:
        if tensor.shape is None:
            raise CompileError(f"the input {tensor.name!r} is of unknown rank, and TensorRT must know it")
        shapes = [tuple(_size(tensor, dim, sizes) for dim in tensor.shape) for sizes in (least, best, largest)]
        result[tensor.name] = Range(*shapes)
    return result


def _size(tensor: Tensor, dim: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    if dim in sizes and _LARGEST < sizes[dim] < NO_MAXIMUM:
        raise CompileError(
            f"the dim {dim!r} of the input {tensor.name!r} is {sizes[dim]} at the most, and TensorRT counts to "
            f"{_LARGEST}; give it less"
        )
    if dim not in sizes or sizes[dim] > _LARGEST:
        raise CompileError(
            f"the dim {dim!r} of the input {tensor.name!r} has no greatest size, and TensorRT must know one; give its "
            f"bounds: --shapes {shlex.quote(f'{dim}=MIN:OPT:MAX')}, or one size: --shapes {shlex.quote(f'{dim}=N')}"
        )
    return sizes[dim]


# TensorRT counts in int32 here and there.
_LARGEST = 2**31 - 1
