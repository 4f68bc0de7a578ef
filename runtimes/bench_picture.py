"""Speed and memory of a picture pipeline's stages, beside a float32 product and a competitor in the same run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from intaglio.engines.engine import Engine
from intaglio.engines.memory import peak_rss_bytes, reset_peak_rss
from intaglio.engines.stage_interface import runs_as
from intaglio.engines.target import session_options
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.bench_against import graph_request, key_of, start_competitor
from intaglio.runtimes.competitors.child import Competitor
from intaglio.runtimes.images import check_size
from intaglio.runtimes.latents import FACTOR
from intaglio.runtimes.machine import Float32MatMul, describe_machine
from intaglio.runtimes.picture_request import PictureModel
from intaglio.runtimes.profile import check_profile, profiled_session, read_profiles
from intaglio.runtimes.random_feeds import Sizes, random_feeds

# Competitors that run the linear layers of the transformer and nothing else.
_LINEARS_ONLY = ("openvino",)
# Pixels and channels of the latents that sd.cpp knows.
_SD_CPP = (FACTOR, 128)
_STAGES = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")


def bench_picture(
    engine: Engine,
    *,
    height: int | None,
    width: int | None,
    against: str | None,
    repeats: int,
    threads: int,
    profile: bool,
    progress: ProgressCallback | None,
) -> dict[str, Any]:
    """Times each stage that the bundle has; see :func:`intaglio.runtimes.bench.bench`."""
    if against in _LINEARS_ONLY:
        check_profile(engine.info.target)  # theirs is compared with what the linear layers take in ours
    if repeats < 1:
        raise InputError(f"repeats is {repeats}, expected at least 1")
    model = PictureModel.of(engine.bundle, engine.bundle_path, engine.dims)
    default = model.default_size
    height, width = default[0] if height is None else height, default[1] if width is None else width
    check_size(height, width, model.factor)
    if against == "sd.cpp" and (model.factor, model.channels) != _SD_CPP:
        raise InputError(
            f"{engine.bundle_path}: has latents of {model.channels} channels and {model.factor} pixels, and sd.cpp "
            f"runs only FLUX.2's, of {_SD_CPP[1]} and {_SD_CPP[0]}"
        )
    info = engine.bundle.text_to_image
    assert info is not None, "only bundles for pictures come here"
    sizes = Sizes.choose(engine.dims, tokens=info.text_length, height=height, width=width, batch=1)
    stages = [stage for stage in _STAGES if stage in engine.bundle.stages]
    if against is not None and "transformer" not in stages:
        raise InputError(f"{engine.bundle_path}: has no transformer to compare with {against}'s")
    count = Progress(progress, "bench", repeats * len(stages), "runs")
    product = Float32MatMul(threads or os.cpu_count() or 1)
    speeds: list[float] = []
    rows = []
    for stage in stages:
        reset_peak_rss()
        started = time.perf_counter()
        with ExitStack() as stack:
            profiled = profile or (against in _LINEARS_ONLY and stage == "transformer")
            if profiled:
                session = stack.enter_context(profiled_session(engine, stage, threads=threads))
            else:
                session = engine.load(stage, **session_options(engine.info.target, threads=threads))
            load_seconds = time.perf_counter() - started
            feeds = random_feeds(engine.bundle, runs_as(engine.bundle.stages[stage]), engine.dims, sizes, seed=0)
            seconds: list[float] = []
            theirs: list[float] = []
            peak = 0
            name = against if stage == "transformer" else None
            competitor = stack.enter_context(_competitor(engine, name, feeds, sizes, threads))
            for _ in range(repeats):
                started = time.perf_counter()
                session.run(feeds)
                seconds.append(time.perf_counter() - started)
                # Before the product, which needs memory of its own.
                peak = peak or peak_rss_bytes()
                if competitor is not None:
                    theirs.append(competitor.seconds())
                speeds.append(product.operations_per_second())
                count.advance(1)
            # The last run: the first one also makes the memory that the others find.
            profiles = read_profiles(session)[-1:] if profiled else []
        row: dict[str, Any] = {
            "stage": stage,
            "target": engine.info.target,
            "height": height,
            "width": width,
            "load_seconds": round(load_seconds, 2),
            "seconds": round(statistics.median(seconds), 2),
            "best_seconds": round(min(seconds), 2),
            "peak_rss_mib": round(peak / 2**20),
        }
        if stage == "transformer":
            row["gops"] = round(_operations(engine, feeds) / min(seconds) / 1e9)
        if competitor is not None and name in _LINEARS_ONLY:
            row |= _of_linears(name, competitor.ready, profiles[0], theirs)
        elif competitor is not None and name is not None:
            row |= _of_competitor(name, competitor.ready, seconds, theirs)
        if profile:
            row["profile"] = profiles[0]
        rows.append(row)
        del session
    ceilings = {
        "float32_matmul_gops": round(max(speeds) / 1e9),
        "median_float32_matmul_gops": round(statistics.median(speeds) / 1e9),
    }
    return {"machine": describe_machine(threads), "ceilings": ceilings, "rows": rows}


def _operations(engine: Engine, feeds: Mapping[str, np.ndarray]) -> int:
    """Multiplications and additions of the blocks of one step: their linear layers and attentions."""
    config = engine.bundle.components["transformer"].config
    width = config["num_attention_heads"] * config["attention_head_dim"]
    inner = round(width * config["mlp_ratio"])
    tokens = feeds["hidden_states"].shape[1] + feeds["encoder_hidden_states"].shape[1]
    linear = tokens * (4 * width * width + 3 * inner * width)
    attention = 2 * tokens * tokens * width
    return 2 * (config["num_layers"] + config["num_single_layers"]) * (linear + attention)


@contextmanager
def _competitor(
    engine: Engine, name: str | None, feeds: Mapping[str, np.ndarray], sizes: Sizes, threads: int
) -> Iterator[Competitor | None]:
    """The competitor's transformer, ready for its runs; None without one."""
    if name is None:
        yield None
        return
    components = engine.bundle.components
    request = {
        "config": components["transformer"].config,
        "image_tokens": feeds["hidden_states"].shape[1],
        "text_tokens": feeds["encoder_hidden_states"].shape[1],
        "height": sizes.height,
        "width": sizes.width,
        "threads": threads or os.cpu_count(),
    }
    if name == "onnxruntime":
        request = graph_request(engine, "transformer", threads, sizes)
    with start_competitor("text-to-image", name, request) as competitor:
        yield competitor


def _of_competitor(name: str, version: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Their seconds, and our time beside theirs: of the best runs, and the median of the pairs."""
    key = key_of(name)
    return {
        f"{key}_version": version,
        f"{key}_seconds": round(statistics.median(theirs), 2),
        f"{key}_best_seconds": round(min(theirs), 2),
        f"best_of_{key}": round(min(ours) / min(theirs), 3),
        f"of_{key}": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
    }


def _of_linears(name: str, version: str, profile: Mapping[str, Any], theirs: list[float]) -> dict[str, Any]:
    """For who runs the linear layers alone: the time of our matrix products in the profiled run beside theirs."""
    key = key_of(name)
    ours = (
        sum(row["ms"] for row in profile["operators"] if "MatMul" in row["op_type"] or "Gemm" in row["op_type"]) / 1e3
    )
    return {
        f"{key}_version": version,
        "linears_seconds": round(ours, 2),
        f"{key}_linears_seconds": round(statistics.median(theirs), 2),
        f"{key}_linears_best_seconds": round(min(theirs), 2),
        f"linears_of_{key}": round(ours / min(theirs), 3),
    }
