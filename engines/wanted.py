"""What an engine is asked to be: target, accuracy, sizes and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from intaglio.engines.shapes import override_dims
from intaglio.engines.target import target_module
from intaglio.errors import InputError
from intaglio.exporters.bundle import Dim


@dataclass(frozen=True)
class Wanted:
    """The part of an engine's identity that a user chooses.

    ``variants`` are the sets of sizes where there are several; ``shapes`` then reach from their least to their largest.
    """

    target: str
    accuracy: str
    shapes: dict[str, Dim]
    variants: tuple[dict[str, Dim], ...]
    options: dict[str, str]


def choose(
    target: str,
    dims: Mapping[str, Dim],
    accuracy: str,
    shapes: str | Sequence[str] | None,
    options: Mapping[str, str],
) -> Wanted:
    """Checks what a user asks for. ``dims`` is the dims table, ``shapes`` one or several overrides of it.

    Raises InputError, RuntimeMissingError.
    """
    module = target_module(target)
    if accuracy not in module.ACCURACIES:
        raise InputError(f"accuracy {accuracy!r}: {target} has {', '.join(module.ACCURACIES)}")
    given = [shapes] if isinstance(shapes, str) else list(shapes or [])
    checked = module.check_options(options, len(given))
    sets = [module.fit_dims(override_dims(dims, each), dims) for each in given or [""]]
    if any(sets.index(each) != i for i, each in enumerate(sets)):
        raise InputError("--shapes: the same sizes are given twice")
    return Wanted(target, accuracy, _spanned(sets), tuple(sets) if len(sets) > 1 else (), checked)


def _spanned(sets: Sequence[Mapping[str, Dim]]) -> dict[str, Dim]:
    """The least and the largest size of every dim; the best is that of the first set."""
    first = sets[0]
    return {
        name: dim.model_copy(
            update={"min": min(each[name].min for each in sets), "max": max(each[name].max for each in sets)}
        )
        for name, dim in first.items()
    }
