"""Speed and memory of a bundle's engine, beside a ceiling measured in the same run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.engine import open_engine, read_report
from intaglio.engines.memory import peak_rss_bytes
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.decoding import Decoding


def bench(
    bundle: str | Path,
    target: str = "cpu",
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    repeats: int = 5,
    threads: int = 0,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Times load, prefill of ``prompt_tokens`` and decode of ``new_tokens``; medians of ``repeats``.

    Returns ``{machine, ceilings, rows}``. The ceiling of decoding is the speed of reading all weights once a token at
    the memory bandwidth measured here, with as many threads. Raises InputError, EngineError.
    """
    if min(prompt_tokens, new_tokens, repeats) < 1:
        raise InputError("prompt tokens, new tokens and repeats must be at least 1")
    engine = open_engine(bundle, target)
    if "generate" not in engine.bundle.stages:
        raise InputError(f"{bundle}: has no stage generate to measure, only {', '.join(engine.bundle.stages)}")
    context = engine.dims["total_sequence"].max
    if prompt_tokens + new_tokens > context:
        raise InputError(f"{prompt_tokens} + {new_tokens} tokens do not fit in the context of {context}")
    weight_bytes = read_report(bundle, target).stages["generate"].weight_bytes
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
        bandwidths.append(_read_bandwidth(threads or os.cpu_count() or 1))
    bandwidth = max(bandwidths)
    decode = 1 / statistics.median(steps)
    ceiling = bandwidth / weight_bytes
    return {
        "machine": {"processor": _processor(), "threads": threads or os.cpu_count(), "system": platform.platform()},
        "ceilings": {
            "read_gb_per_second": round(bandwidth / 1e9, 2),
            "decode_tokens_per_second": round(ceiling, 1),
        },
        "rows": [
            {
                "stage": "generate",
                "target": target,
                "load_seconds": round(load_seconds, 3),
                "prompt_tokens": prompt_tokens,
                "prefill_tokens_per_second": round(prompt_tokens / statistics.median(prefills), 1),
                "new_tokens": new_tokens,
                "decode_tokens_per_second": round(decode, 1),
                "decode_of_ceiling": round(decode / ceiling, 3),
                "weight_bytes": weight_bytes,
                "peak_rss_mib": round(peak / 2**20, 1),
            }
        ],
    }


def _read_bandwidth(threads: int) -> float:
    # Larger than any cache of today's desktops; each thread sums its own part.
    parts = [np.ones((32 << 20) // threads, np.float64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.add.reduce, parts))  # starts the threads
        started = time.perf_counter()
        list(pool.map(np.add.reduce, parts))
        return sum(part.nbytes for part in parts) / (time.perf_counter() - started)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
