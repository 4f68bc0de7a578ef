"""Speed and memory of a language model's engine, beside a ceiling measured in the same run."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np

from intaglio.engines.engine import Engine, read_report
from intaglio.engines.memory import peak_rss_bytes
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.machine import describe_machine, read_bandwidth
from intaglio.runtimes.profile import profiled_session, read_profiles


def bench_text(
    engine: Engine,
    *,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    threads: int,
    profile: bool,
    progress: ProgressCallback | None,
) -> dict[str, Any]:
    """Times load, prefill of ``prompt_tokens`` and decode of ``new_tokens``; medians of ``repeats``.

    Returns ``{machine, ceilings, rows}``. The ceiling of decoding is the speed of reading all weights once a token at
    the memory bandwidth measured here, with as many threads. Raises InputError, EngineError.
    """
    if min(prompt_tokens, new_tokens, repeats) < 1:
        raise InputError("prompt tokens, new tokens and repeats must be at least 1")
    if "generate" not in engine.bundle.stages:
        raise InputError(
            f"{engine.bundle_path}: has no stage generate to measure, only {', '.join(engine.bundle.stages)}"
        )
    context = engine.dims["total_sequence"].max
    if prompt_tokens + new_tokens > context:
        raise InputError(f"{prompt_tokens} + {new_tokens} tokens do not fit in the context of {context}")
    weight_bytes = read_report(engine.bundle_path, engine.info.target).stages["generate"].weight_bytes
    started = time.perf_counter()
    session = engine.load("generate", threads=threads)
    load_seconds = time.perf_counter() - started
    prefills: list[float] = []
    steps: list[float] = []
    bandwidths: list[float] = []
    count = Progress(progress, "bench", repeats * (new_tokens + 1), "steps")
    prompt = np.random.Generator(np.random.Philox(0)).integers(
        0, engine.bundle.language_model.config["vocab_size"], prompt_tokens
    )
    peak = 0
    for _ in range(repeats):
        decoding = Decoding(session, [prompt.tolist()])
        for step in range(new_tokens + 1):
            started = time.perf_counter()
            logits_BV = decoding.step()
            (prefills if step == 0 else steps).append(time.perf_counter() - started)
            decoding.put(logits_BV.argmax(axis=-1))
            count.advance(1)
        # Before the first measurement of the memory itself, which needs some of its own.
        peak = peak or peak_rss_bytes()
        bandwidths.append(read_bandwidth(threads or os.cpu_count() or 1))
    bandwidth = max(bandwidths)
    decode = 1 / statistics.median(steps)
    ceiling = bandwidth / weight_bytes
    row: dict[str, Any] = {
        "stage": "generate",
        "target": engine.info.target,
        "load_seconds": round(load_seconds, 3),
        "prompt_tokens": prompt_tokens,
        "prefill_tokens_per_second": round(prompt_tokens / statistics.median(prefills), 1),
        "new_tokens": new_tokens,
        "decode_tokens_per_second": round(decode, 1),
        "decode_of_ceiling": round(decode / ceiling, 3),
        "weight_bytes": weight_bytes,
        "peak_rss_mib": round(peak / 2**20, 1),
    }
    if profile:
        del session, decoding
        row |= _profiles(engine, prompt.tolist(), threads)
    return {
        "machine": describe_machine(threads),
        "ceilings": {
            "read_gb_per_second": round(bandwidth / 1e9, 2),
            "decode_tokens_per_second": round(ceiling, 1),
        },
        "rows": [row],
    }


def _profiles(engine: Engine, prompt: list[int], threads: int) -> dict[str, Any]:
    """Of prefill and of one token after it, each run for the second time and in a session of its own.

    Writing the profile takes as long as a small model's step, so the timed runs do without it.
    """
    with profiled_session(engine, "generate", threads=threads) as session:
        for _ in range(2):
            decoding = Decoding(session, [prompt])
            for _ in range(3):
                decoding.put(decoding.step().argmax(axis=-1))
        *_, prefill, _, decode = read_profiles(session)
    return {"prefill_profile": prefill, "decode_profile": decode}
