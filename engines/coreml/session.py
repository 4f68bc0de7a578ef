"""A loaded stage of the target ``coreml``: one face over Core ML on a Mac and over the evaluator elsewhere.

Shape suffixes: B batch, S new tokens, C tokens of a chunk, T tokens that a cache has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np

from intaglio.engines.coreml.description import FunctionDescription, PackageDescription
from intaglio.engines.shapes import Interface, check_feeds
from intaglio.errors import EngineError, InputError, IntaglioError
from intaglio.exporters.bundle import Dim


class Model(Protocol):
    """One function of a package, as coremltools loads it: names, dtypes and shapes are the package's."""

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> Mapping[str, np.ndarray]:
        """The outputs by name; ``state`` is changed in place."""

    def make_state(self) -> Any:
        """Zeroed states."""


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
        self._open, self._models = open_function, dict[str, Model]()

    def run(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: Collection[str] | None = None,
        *,
        resident: Collection[str] = (),
    ) -> dict[str, np.ndarray]:
        """Runs the function that was made for the sizes of ``feeds``. ``outputs`` chooses by name (all by default).

        ``resident`` is what a :class:`CpuSession` leaves in the runtime's memory, and changes nothing here. Raises
        InputError on wrong inputs and for sizes that the package has no function for, EngineError if the run fails.
        """
        check_feeds(self.name, self.stage, self.dims, feeds)
        function = self.description.function_for(_sizes(self.stage, feeds))
        found = self._predict(function, feeds, None)
        return {name: value for name, value in found.items() if outputs is None or name in outputs}

    def _predict(self, function: str, feeds: Mapping[str, np.ndarray], state: Any) -> dict[str, np.ndarray]:
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
