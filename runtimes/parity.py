"""``parity``: two implementations of one bundle on the same inputs, output by output, in order of computation."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from intaglio.errors import InputError
from intaglio.exporters.bundle import Bundle, StageInfo
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.difference import Bounds, Difference, compare
from intaglio.runtimes.random_feeds import Sizes, is_known, random_feeds

if TYPE_CHECKING:
    from intaglio.engines.nvidia.activation_ranges import LargeActivation

__all__ = ["BOUNDS", "Bounds", "Difference", "ParityReport", "compare", "parity", "tap_names"]

# By the bundle's dtype. Measured in float32: two right runs part by 2e-6 in tiny models and 1e-5 in real ones. In
# float16 they round in other places: by 2e-3 in models of a few layers, as measured against tract. A widened bfloat16
# graph is float32 on both sides. The cosines are a little below what these distances leave possible.
BOUNDS = {
    "float32": Bounds(cosine=0.99999, relative_l2=1e-4),
    "float16": Bounds(cosine=0.9999, relative_l2=1e-2),
    "bfloat16": Bounds(cosine=0.99999, relative_l2=1e-4),
}
# tract adds up the products of a float16 convolution in float16: measured 1.2e-2 from float32 at the end of a tiny
# autoencoder, where the engine is at 5e-4.
# Activations rounded to 8 bits put every product off by 7e-3, and a residual stream adds these up block by block.
FAST_BOUNDS = Bounds(cosine=0.999, relative_l2=5e-2)
# Weights and scales rounded to bfloat16 while the reference has all their digits: 8e-3 in models of two layers.
ROUNDED_BOUNDS = {"bfloat16": Bounds(cosine=0.999, relative_l2=3e-2)}
REFERENCE_BOUNDS = {("tract", "float16"): Bounds(cosine=0.999, relative_l2=3e-2)}
GOLDEN = "golden:"
_PIPELINE = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")


@dataclass(frozen=True)
class ParityReport:
    """Outputs in order of computation, stage by stage, up to the first that diverges or all of them.

    ``bound`` and ``min_cosine`` are None where they differ from tensor to tensor, each of which has its ``bounds``.
    Of a golden folder, ``not_compared`` are outputs without a file, ``unmatched`` files that belong to no output, and
    ``notes`` say which stages could not be run, and why. ``large_activations`` are those of an engine of float16 or
    bfloat16 for TensorRT that come within a factor of two of the end, on these inputs: they may overflow on others.
    """

    target: str
    against: str
    stages: tuple[str, ...]
    bound: float | None
    min_cosine: float | None
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    large_activations: tuple[LargeActivation, ...] = ()

    @property
    def first_divergent(self) -> Difference | None:
        """The first output beyond its bounds, whose ``reason`` says why; None if all agree."""
        return next((d for d in self.differences if d.reason is not None), None)


def parity(
    bundle: str | Path,
    target: str = "cpu",
    *,
    against: str = "onnxruntime",
    stage: str | None = None,
    tokens: int | None = None,
    height: int | None = None,
    width: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    bound: float | None = None,
    min_cosine: float | None = None,
    keep_going: bool = False,
    progress: ProgressCallback | None = None,
) -> ParityReport:
    """Runs the engine of a bundle beside ``against``: ``onnxruntime`` (the portable graph without kernels), ``tract``,
    ``exact`` (the kernels in their exact accuracy, for a ``fast`` engine), or ``golden:DIR``, tensors that another
    program or machine has stored.

    By default every stage is run whose inputs are known, of a language model ``score``. The inputs are those of
    :func:`random_feeds`, of the sizes asked for; those of a golden folder are stored there. A bundle exported with
    taps shows the first layer that diverges; without, only its outputs are compared. Both measures must hold: relative
    L2 at most ``bound`` and cosine at least ``min_cosine``, by default those of ``BOUNDS``, of ``FAST_BOUNDS`` for a
    ``fast`` engine, and of ``golden_bounds`` for a golden folder. Stops at the first output beyond them unless told to
    keep going. Raises InputError, EngineError, RuntimeMissingError, CancelledError.
    """
    # These bring the graph library, which running does not need.
    from intaglio.runtimes.golden_parity import against_golden
    from intaglio.runtimes.sides import beside, engine_side, reference_side

    _check_bounds(bound, min_cosine)
    if against.startswith(GOLDEN):
        if not all(size is None for size in (tokens, height, width, batch)):
            raise InputError("the sizes of a golden folder's inputs are stored there; none can be asked for")
        folder = Path(against.removeprefix(GOLDEN))
        return against_golden(bundle, target, folder, stage, bound, min_cosine, keep_going, progress)
    reference = reference_side(bundle, against)
    engine = engine_side(bundle, target)
    stages = chosen_stages(engine.bundle, stage)
    asked = {"tokens": tokens, "height": height, "width": width, "batch": batch}
    if batch is None and any(map(engine.keeps_cache, stages)):
        asked["batch"] = 1
    # What nobody asks for is that of one set of sizes, where an engine has several.
    dims = engine.dims if any(size is not None for size in asked.values()) else engine.first_dims
    sizes = Sizes.choose(dims, **asked)
    # A cache in states is float16, whatever the graph is.
    dtype = "float16" if any(map(engine.keeps_cache, stages)) else engine.dtype
    default = REFERENCE_BOUNDS.get((against, dtype), BOUNDS[dtype])
    if engine.is_fast:
        default = FAST_BOUNDS
    if engine.is_rounded:
        default = ROUNDED_BOUNDS.get(dtype, default)
    bounds = Bounds(
        default.cosine if min_cosine is None else min_cosine, default.relative_l2 if bound is None else bound
    )
    count = Progress(progress, "parity", len(stages), "stages")

    large: list[LargeActivation] = []

    def walk() -> Generator[Difference]:
        for name in stages:
            feeds = random_feeds(engine.bundle, engine.stage(name), engine.dims, sizes, seed)
            # First, for it may be why the stage diverges.
            large.extend(replace(each, stage=name) for each in engine.large_activations(name, feeds))
            for difference in beside(engine, reference, name, feeds):
                yield replace(difference, stage=name, bounds=bounds)
            count.advance(1)

    differences = until_divergent(walk(), keep_going)
    return ParityReport(
        target, against, stages, bounds.relative_l2, bounds.cosine, differences, large_activations=tuple(large)
    )


def _check_bounds(bound: float | None, min_cosine: float | None) -> None:
    if bound is not None and not 0 < bound < np.inf:
        raise InputError(f"the bound is {bound}, expected a number above zero")
    if min_cosine is not None and not -1 <= min_cosine <= 1:
        raise InputError(f"the least cosine is {min_cosine}, expected a number from -1 to 1")


def chosen_stages(bundle: Bundle, stage: str | None) -> tuple[str, ...]:
    """``stage``, else all of a pipeline whose inputs are known, in its order; of a language model ``score``, or the
    only one there is. Raises InputError.
    """
    if stage is not None:
        if stage not in bundle.stages:
            raise InputError(
                f"the bundle has no stage {stage!r}, only {', '.join(bundle.stages)}; export again with --stages"
            )
        return (stage,)
    stages = [name for name, info in bundle.stages.items() if is_known(info)]
    if not stages:
        raise InputError(f"of no stage of the bundle ({', '.join(bundle.stages)}) the inputs are known")
    if bundle.kind == "text-generation":
        return ("score",) if "score" in stages else (stages[0],)
    return tuple(sorted(stages, key=lambda name: _PIPELINE.index(name) if name in _PIPELINE else len(_PIPELINE)))


def until_divergent(differences: Generator[Difference], keep_going: bool) -> tuple[Difference, ...]:
    """Collects until the first that is beyond its bounds, or all."""
    collected = []
    with contextlib.closing(differences):
        for difference in differences:
            collected.append(difference)
            if difference.reason is not None and not keep_going:
                break
    return tuple(collected)


def some_of(names: Sequence[str], most: int = 8) -> str:
    """The first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def tap_names(stage: StageInfo) -> list[str]:
    """The outputs of a text stage that are taps, in the order of computation."""
    return [o.name for o in stage.outputs if not o.name.startswith(("logits", "hidden_states.", "present."))]
