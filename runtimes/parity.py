"""``parity``: an engine beside an independent run of the same stage, output by output, in order of computation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intaglio.engines.engine import open_engine
from intaglio.errors import InputError
from intaglio.exporters.bundle import Bundle, StageInfo

# Two right runs in float16 round in other places: by 2e-3 of relative L2 in models of a few layers, as measured
# against tract. A widened bfloat16 graph is float32 on both sides.
BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-4}


@dataclass(frozen=True)
class Difference:
    """How far an output is from the reference's: cosine of the angle, ``|a - b| / |b|`` (L2), largest ``|a - b|``."""

    name: str
    cosine: float
    relative_l2: float
    max_abs: float


def compare(name: str, found: np.ndarray, expected: np.ndarray) -> Difference:
    """Measures in float64. What is not finite is infinitely far; shapes must be equal."""
    if found.shape != expected.shape:
        raise InputError(f"{name}: shapes differ, {list(found.shape)} and {list(expected.shape)}")
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        # Two equal overflows are no agreement.
        return Difference(name, 0.0, np.inf, np.inf)
    norm_a, norm_b, distance = np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(a - b)
    if norm_a == 0 or norm_b == 0:
        relative = 0.0 if distance == 0 else float(distance / norm_b) if norm_b else np.inf
        return Difference(name, float(distance == 0), relative, float(np.abs(a - b).max(initial=0)))
    return Difference(name, float(a @ b / (norm_a * norm_b)), float(distance / norm_b), float(np.abs(a - b).max()))


@dataclass(frozen=True)
class ParityReport:
    """The outputs of one stage in order of computation; ``first_divergent`` is the first beyond ``bound``."""

    stage: str
    against: str
    bound: float
    differences: tuple[Difference, ...]

    @property
    def first_divergent(self) -> Difference | None:
        """The first output whose relative L2 is over the bound; None if all agree."""
        return next((d for d in self.differences if not d.relative_l2 <= self.bound), None)


def parity(
    bundle: str | Path,
    target: str = "cpu",
    *,
    against: str = "onnxruntime",
    stage: str = "score",
    tokens: int = 12,
    seed: int = 0,
    bound: float | None = None,
) -> ParityReport:
    """Runs ``stage`` on the engine and on a reference (``onnxruntime`` or ``tract``) with the same random inputs.

    The inputs are those of :func:`random_feeds`. A bundle exported with taps shows the first layer that diverges;
    without, only its outputs are compared. ``bound`` is by default that of the bundle's dtype in ``BOUNDS``. Raises
    InputError, EngineError, RuntimeMissingError.
    """
    # These bring the graph library, which running does not need.
    from intaglio.engines.graph_stats import output_order
    from intaglio.engines.references import reference

    run_reference = reference(against)
    if bound is not None and not 0 < bound < np.inf:
        raise InputError(f"the bound is {bound}, expected a number above zero")
    engine = open_engine(bundle, target)
    session = engine.load(stage)
    feeds = random_feeds(engine.bundle, session.stage, tokens, seed)
    if bound is None:
        bound = BOUNDS[engine.bundle.dtype]
    graph = engine.bundle_path / engine.bundle.stages[stage].file
    found, expected = session.run(feeds), run_reference(graph, feeds)
    differences = tuple(compare(name, found[name], expected[name]) for name in output_order(graph))
    return ParityReport(stage, against, bound, differences)


def tap_names(stage: StageInfo) -> list[str]:
    """The outputs of a stage that are taps, in the order of computation."""
    return [o.name for o in stage.outputs if not o.name.startswith(("logits", "hidden_states.", "present."))]


def random_feeds(bundle: Bundle, stage: StageInfo, tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs for a text model's stage as an engine takes it, from a seed.

    A batch of two, the second row padded on the left by a third. A stage with a cache gets ``tokens`` new tokens over
    a past of as many, random too. Raises InputError.
    """
    longest = bundle.dims["sequence"].max // 2
    if not 2 <= tokens <= longest:
        raise InputError(f"tokens is {tokens}, expected 2 to {longest}")
    generator = np.random.Generator(np.random.Philox(seed))
    cache = [t for t in stage.inputs if t.name.startswith("past_key_values.")]
    past = tokens if cache else 0
    mask = np.ones((2, past + tokens), np.int64)
    mask[1, : tokens // 3] = 0
    feeds = {
        "input_ids": generator.integers(0, bundle.language_model.config["vocab_size"], (2, tokens)),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:],
    }
    sizes = {"batch": 2, "past_sequence": past}
    for tensor in cache:
        shape = [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
        feeds[tensor.name] = generator.normal(size=shape).astype(tensor.dtype)
    return feeds
