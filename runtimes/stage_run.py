"""One run of a picture pipeline's stage: feeds in the stage's dtypes, and nothing that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from intaglio.errors import EngineError

# Taps that are looked at in one run when something went wrong: all of them at once can be larger than the model.
_TAPS_AT_ONCE = 8


def run_stage(
    session: Any, feeds: Mapping[str, np.ndarray], output: str, *, where: str = "", rows: int | None = None
) -> np.ndarray:
    """``output`` of a stage as float32, in memory of its own. At most ``rows`` of the batch are run at a time.

    Floating feeds are cast to what the stage takes. Raises EngineError for an output that is not finite, which says
    ``where`` it happened and, in a bundle with taps, at which point of the graph first.
    """
    batch = len(next(iter(feeds.values())))
    size = rows or batch
    parts = []
    for first in range(0, batch, size):
        part = _cast(session, {name: value[first : first + size] for name, value in feeds.items()})
        found = _run_finite(session, part, [output], where)[output]
        # Copied: an output keeps all the memory of the session that made it, also when that has left.
        parts.append(found.astype(np.float32))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class TileSession:
    """A session of a stage that decodes in bands, which casts its feeds likewise. Taps are left out."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._outputs = [tensor.name for tensor in session.stage.outputs if not tensor.name.startswith("vae_")]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name. Raises EngineError for one that is not finite."""
        return _run_finite(self._session, _cast(self._session, feeds), self._outputs, "")


def _cast(session: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    dtypes = {tensor.name: tensor.dtype for tensor in session.stage.inputs}
    return {name: value.astype(dtypes[name], copy=False) for name, value in feeds.items()}


def _run_finite(
    session: Any, feeds: Mapping[str, np.ndarray], outputs: Sequence[str], where: str
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = session.run(feeds, outputs)
    for name in outputs:
        if not np.isfinite(found[name]).all():
            taps = [tensor.name for tensor in session.stage.outputs if tensor.name not in outputs]
            raise _not_finite(session, feeds, name, found[name], taps, where)
    return found


def _not_finite(
    session: Any, feeds: Mapping[str, np.ndarray], output: str, found: np.ndarray, taps: list[str], where: str
) -> EngineError:
    count = found.size - np.count_nonzero(np.isfinite(found))
    first = _first_tap(session, feeds, taps)
    if first is not None:
        hint = f"The first point of the graph that is not finite is {first}"
    elif taps:
        hint = "All taps of the graph are finite, so it is what follows the last of them"
    else:
        hint = "Export with --taps to learn where in the graph it begins"
    return EngineError(
        f"{session.name}: {count} of {found.size} values of {output} are not finite{where and f' at {where}'}. {hint}. "
        "The engine overflowed or its weights are damaged: compare it with `intaglio parity`, or use a float32 bundle"
    )


def _first_tap(session: Any, feeds: Mapping[str, np.ndarray], taps: list[str]) -> str | None:
    """The first of ``taps``, which are in the order of computation, that has a value that is not finite."""
    for first in range(0, len(taps), _TAPS_AT_ONCE):
        names = taps[first : first + _TAPS_AT_ONCE]
        outputs = session.run(feeds, names)
        for name in names:
            if not np.isfinite(outputs[name]).all():
                return name
    return None
