"""``probe``: how large activations become on given texts, beside what the dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from intaglio.engines.engine import open_engine
from intaglio.errors import BundleError, InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes.parity import tap_names
from intaglio.runtimes.text_generation import TextGenerationPipeline

# Prose, digits, code and another script: what tends to wake the largest activations of a language model.
TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Il était une fois, dans un petit village au bord de la mer, un pêcheur.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "今日は天気がいいですね。\n\n",
)


@dataclass(frozen=True)
class TensorRange:
    """The largest ``|x|`` of a tap (infinite if a value is not finite), and its part of the dtype's maximum."""

    name: str
    max_abs: float
    share: float


@dataclass(frozen=True)
class ProbeReport:
    """Every tap in order of computation. ``dtype`` is the one they are compared with, ``maximum`` its largest value."""

    dtype: str
    maximum: float
    ranges: tuple[TensorRange, ...]

    @property
    def above_half(self) -> tuple[TensorRange, ...]:
        """The taps that come within a factor of two of the maximum: another text may overflow there."""
        return tuple(r for r in self.ranges if r.share > 0.5)


def probe(bundle: str | Path, texts: Sequence[str] = (), target: str = "cpu") -> ProbeReport:
    """Runs the ``score`` stage of a bundle with taps on each of ``texts`` (a short list of our own by default).

    A float16 or bfloat16 bundle is compared with its own dtype, a float32 one with float16, to decide before
    exporting. Seen are the outputs of modules, not what lies inside them: the product of a gated feed-forward block
    and the scores of an attention are no taps. Raises BundleError for a bundle without taps or tokenizer, EngineError
    without an engine, InputError for an empty text or one longer than the context.
    """
    folder = Path(bundle)
    described = read_bundle(folder)
    taps = tap_names(described.stages["score"]) if "score" in described.stages else []
    if not taps:
        raise BundleError(
            f"{folder}: has no taps to probe; export it again with --taps, and with the stage score among its stages"
        )
    engine = open_engine(folder, target)
    pipeline = TextGenerationPipeline(engine)
    session = engine.load("score")
    largest = dict.fromkeys(taps, 0.0)
    for text in texts or TEXTS:
        ids = np.array([pipeline.tokenizer.encode(text)], np.int64)
        if not ids.size:
            raise InputError("a text to probe with is empty")
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
        }
        for name, value in session.run(feeds, taps).items():
            largest[name] = max(largest[name], _max_abs(value))
    dtype = "float16" if described.dtype == "float32" else described.dtype
    maximum = float(ml_dtypes.finfo(dtype).max)
    return ProbeReport(dtype, maximum, tuple(TensorRange(n, v, v / maximum) for n, v in largest.items()))


def _max_abs(value: np.ndarray) -> float:
    if not np.isfinite(value).all():
        return float("inf")
    return float(np.abs(value).max(initial=0))
