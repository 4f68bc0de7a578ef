"""The two sides of a comparison: an engine, and a portable graph in a runtime of others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from intaglio.engines.engine import Engine, open_engine
from intaglio.engines.graph_stats import output_order
from intaglio.engines.references import check_reference, open_reference
from intaglio.engines.stage_interface import runs_as
from intaglio.errors import OutputError
from intaglio.exporters.bundle import Bundle, Dim, StageInfo, read_bundle
from intaglio.runtimes.difference import Difference, measure
from intaglio.runtimes.flow_matching import step

if TYPE_CHECKING:
    from intaglio.engines.nvidia.activation_ranges import LargeActivation

# Targets that round every activation to the dtype of the engine, which the graph run for parity need not do.
ROUNDED_TARGETS = ("tensorrt-rtx", "tensorrt")


class Run(Protocol):
    """A loaded stage. Outputs come one by one, so that a caller who drops them holds no more than one twice."""

    def __call__(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """The chosen ``outputs`` in their order. Raises InputError, EngineError."""


@dataclass(frozen=True)
class Side:
    """One implementation of a bundle: an ``engine``, or the reference called ``name``."""

    name: str
    path: Path
    bundle: Bundle
    dims: Mapping[str, Dim]
    engine: Engine | None = None

    @property
    def is_fast(self) -> bool:
        """Whether this is an engine of the accuracy ``fast``."""
        return self.engine is not None and self.engine.accuracy == "fast"

    @property
    def dtype(self) -> str:
        """What it computes in: the bundle's dtype, unless the engine was narrowed from that."""
        options = {} if self.engine is None or self.bundle.dtype != "float32" else self.engine.options
        return options.get("dtype", self.bundle.dtype)

    @property
    def is_rounded(self) -> bool:
        """Whether this is an engine of ``ROUNDED_TARGETS``, of halves."""
        return self.engine is not None and self.engine.info.target in ROUNDED_TARGETS and self.dtype != "float32"

    @property
    def first_dims(self) -> Mapping[str, Dim]:
        """The dims, or of an engine of several sets of sizes those of the first."""
        variants = () if self.engine is None else self.engine.variants
        return variants[0] if variants else self.dims

    def keeps_cache(self, stage: str) -> bool:
        """Whether an engine keeps the stage's key-value cache in states of its own: float16, and of fixed sizes."""
        has_past = any(tensor.name.startswith("past_key_values.") for tensor in self.bundle.stages[stage].inputs)
        return has_past and self.engine is not None and self.engine.info.target == "coreml"

    def graph(self, stage: str) -> Path:
        """The file of the portable graph."""
        return self.path / self.bundle.stages[stage].file

    def stage(self, name: str) -> StageInfo:
        """What a stage takes and gives: float32 in place of bfloat16, which every side widens."""
        return runs_as(self.bundle.stages[name])

    def large_activations(self, stage: str, feeds: Mapping[str, np.ndarray]) -> tuple[LargeActivation, ...]:
        """What comes near the end of an engine's halves on a GPU; nothing where that is not looked for.

        Raises InputError, EngineError, RuntimeMissingError.
        """
        if self.engine is None or not self.is_rounded:
            return ()
        found: tuple[LargeActivation, ...] = self.engine.load_for_parity(stage).large_activations(feeds)
        return found

    def load(self, stage: str) -> Run:
        """The stage, ready to run. Raises EngineError, RuntimeMissingError."""
        if self.engine is None:
            reference = open_reference(self.name, self.graph(stage))
            return lambda feeds, outputs: _one_by_one(reference.run(feeds, outputs), outputs)
        session = self.engine.load_for_parity(stage)
        return lambda feeds, outputs: _one_by_one(session.run(feeds, outputs, resident=outputs), outputs)


def _one_by_one(values: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in names:
        value = values.pop(name)
        yield name, value if isinstance(value, np.ndarray) else value.numpy()


def engine_side(bundle: str | Path, target: str) -> Side:
    """The engine of a bundle. Raises EngineError, BundleError."""
    engine = open_engine(bundle, target)
    return Side(target, engine.bundle_path, engine.bundle, engine.dims, engine)


def reference_side(bundle: str | Path, name: str) -> Side:
    """A bundle in one of ``REFERENCES``. Raises InputError, BundleError."""
    check_reference(name)
    described = read_bundle(Path(bundle))
    return Side(name, Path(bundle), described, described.dims)


def beside(engine: Side, reference: Side, stage: str, feeds: Mapping[str, np.ndarray]) -> Iterator[Difference]:
    """Each output of a stage on both sides, in order of computation. Raises EngineError, OutputError."""
    names = output_order(reference.graph(stage))
    # One side after the other, and what the first gave on disk: a picture's taps are larger than its model's weights.
    with tempfile.TemporaryDirectory(prefix="intaglio-parity-") as folder:
        files = {name: Path(folder) / f"{i}.npy" for i, name in enumerate(names)}
        for name, expected in reference.load(stage)(feeds, names):
            try:
                np.save(files[name], expected)
            except OSError as error:
                raise OutputError(
                    f"{folder}: cannot hold the reference's outputs ({error.strerror or error}); free space, or let "
                    "TMPDIR name a larger disk"
                ) from error
        for name, found in engine.load(stage)(feeds, names):
            yield measure(name, found, np.load(files[name], mmap_mode="r"))


def sample(
    run: Run, feeds: Mapping[str, np.ndarray], latents: np.ndarray, sigmas: np.ndarray, timesteps: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    """Euler steps with the transformer: the step, its noise, and the latents after it, float32.

    ``latents`` are those before the first, ``sigmas`` one more than ``timesteps``, which are from 0 to 1. Noise that
    is not finite ends it, with no latents.
    """
    for i, timestep in enumerate(timesteps):
        now = {
            **feeds,
            "hidden_states": latents.astype(feeds["hidden_states"].dtype),
            "timestep": np.full_like(feeds["timestep"], timestep),
        }
        ((_, noise),) = run(now, ["noise_pred"])
        noise = noise.astype(np.float32)
        if not np.isfinite(noise).all():
            yield i, noise, None
            return
        latents = step(latents, noise, sigmas, i)
        yield i, noise, latents
