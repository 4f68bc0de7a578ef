"""SmolLM2-135M as a Core ML package with its cache in states, run by the evaluator."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from coreml_decoders import CacheDecoder, StateDecoder, relative_l2, token_feeds, write_decoder

import intaglio

pytestmark = pytest.mark.full_size

PROMPT = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
TOKENS = 12


def test_greedy_text_of_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The text is that of the engine for the CPU; bound: logits 5e-3 of relative L2, of a float16 cache."""
    bundle, path = tmp_path / "bundle", tmp_path / "m.mlpackage"
    intaglio.export(smollm2_gguf, bundle)
    intaglio.compile(bundle)
    pipeline = intaglio.load(bundle)
    expected = pipeline(PROMPT, max_new_tokens=TOKENS)
    started = time.monotonic()
    state, cache = StateDecoder(path, write_decoder(bundle, path, context=128, chunk=16)), CacheDecoder(bundle)
    print(f"\nconverted in {time.monotonic() - started:.0f} s")
    tokens: list[int] = []
    worst = 0.0
    waiting = pipeline.tokenizer.encode(PROMPT)
    while len(tokens) < len(expected.token_ids):
        feeds = token_feeds(np.array([waiting]), np.ones((1, state.length + len(waiting)), np.int64), state.length)
        logits = state.append(feeds)
        worst = max(worst, relative_l2(logits, cache.append(feeds)))
        waiting = [int(logits[0, -1].argmax())]
        tokens += waiting
    one, both = (
        (tmp_path / f"{name}.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        for name in ("decode", "m")
    )
    print(
        f"{expected.text!r}; logits differ by {worst:.1e}; {one / 1e6:.0f} MB of weights, {both / 1e6:.0f} MB for both"
    )
    assert tuple(tokens) == expected.token_ids
    assert worst <= 5e-3
    assert both <= 1.01 * one
