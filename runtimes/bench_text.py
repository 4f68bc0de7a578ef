"""Speed and memory of a language model's engine, beside a ceiling measured in the same run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.engine import Engine, read_report
from intaglio.engines.memory import peak_rss_bytes
from intaglio.engines.target import session_options
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.bench_against import (
    find_gguf,
    generation,
    graph_request,
    key_of,
    start_competitor,
    start_llama_cpp,
)
from intaglio.runtimes.competitors.child import Competitor
from intaglio.runtimes.competitors.text_protocol import time_generation
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
    against: str | None,
    gguf: Path | None,
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
    session = engine.load("generate", **session_options(engine.info.target, threads=threads))
    load_seconds = time.perf_counter() - started
    prefills: list[float] = []
    steps: list[float] = []
    bandwidths: list[float] = []
    theirs: list[tuple[float, list[float]]] = []
    count = Progress(progress, "bench", repeats, "generations")
    prompt = np.random.Generator(np.random.Philox(0)).integers(
        0, engine.bundle.language_model.config["vocab_size"], prompt_tokens
    )
    peak = 0
    found: dict[str, Any] = {}
    with _competitor(engine, against, gguf, prompt_tokens + new_tokens, threads, found) as competitor:
        asked = generation(prompt.tolist(), new_tokens)
        if competitor is not None:
            competitor.ask(asked)  # its first takes longer: what it allocates is not there yet
        for _ in range(repeats):
            first, others = time_generation(Decoding(session, [prompt.tolist()]), new_tokens)
            prefills.append(first)
            steps += others
            # Before the first measurement of the memory itself, which needs some of its own.
            peak = peak or peak_rss_bytes()
            bandwidths.append(read_bandwidth(threads or os.cpu_count() or 1))
            if competitor is not None:
                answer = json.loads(competitor.ask(asked))
                theirs.append((answer["prefill"], answer["steps"]))
            count.advance(1)
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
    if against is not None:
        row |= found | _of_competitor(key_of(against), prompt_tokens, prefills, steps, theirs)
    if profile:
        del session
        row |= _profiles(engine, prompt.tolist(), threads)
    return {
        "machine": describe_machine(threads),
        "ceilings": {
            "read_gb_per_second": round(bandwidth / 1e9, 2),
            "decode_tokens_per_second": round(ceiling, 1),
        },
        "rows": [row],
    }


@contextmanager
def _competitor(
    engine: Engine, name: str | None, gguf: Path | None, context: int, threads: int, found: dict[str, Any]
) -> Iterator[Competitor | None]:
    """The competitor, ready to write; what is to be said of it goes to ``found``. None without one."""
    if name is None:
        yield None
        return
    key = key_of(name)
    if name == "llama.cpp":
        path, is_source = find_gguf(engine, gguf)
        with start_llama_cpp(path, context, threads) as (competitor, note):
            found |= {f"{key}_version": competitor.ready, f"{key}_runs_the_bundles_source": is_source}
            if note is not None:
                found[f"{key}_note"] = note
            yield competitor
        return
    request = graph_request(engine, "generate", threads, None)
    with start_competitor("text-generation", name, request) as competitor:
        found |= {f"{key}_version": competitor.ready, f"{key}_unpacks_at_load": request["unpack"]}
        yield competitor


def _of_competitor(
    key: str, prompt_tokens: int, prefills: list[float], steps: list[float], theirs: list[tuple[float, list[float]]]
) -> dict[str, Any]:
    """Their speeds, and how many times as fast ours are, in the medians and at best."""
    their_prefills = [prefill for prefill, _ in theirs]
    their_steps = [step for _, part in theirs for step in part]
    return {
        f"{key}_prefill_tokens_per_second": round(prompt_tokens / statistics.median(their_prefills), 1),
        f"{key}_decode_tokens_per_second": round(1 / statistics.median(their_steps), 1),
        f"prefill_times_{key}": round(statistics.median(their_prefills) / statistics.median(prefills), 3),
        f"decode_times_{key}": round(statistics.median(their_steps) / statistics.median(steps), 3),
        f"best_prefill_times_{key}": round(min(their_prefills) / min(prefills), 3),
        f"best_decode_times_{key}": round(min(their_steps) / min(steps), 3),
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
