"""``bench``: speed and memory of a bundle's engine or of the kernels, beside what the machine and others can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intaglio.engines.engine import open_engine
from intaglio.engines.target import session_options, target_module
from intaglio.errors import InputError
from intaglio.progress import ProgressCallback
from intaglio.runtimes.bench_against import check_competitor
from intaglio.runtimes.bench_picture import bench_picture
from intaglio.runtimes.bench_text import bench_text
from intaglio.runtimes.profile import check_profile


def bench(
    bundle: str | Path | None = None,
    target: str = "cpu",
    *,
    kernels: bool = False,
    quick: bool = False,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    height: int | None = None,
    width: int | None = None,
    against: str | None = None,
    gguf: str | Path | None = None,
    repeats: int | None = None,
    threads: int = 0,
    profile: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Times the stages of an engine, or our kernels, and returns ``{machine, ceilings, rows}``.

    Of a language model: load, prefill of ``prompt_tokens`` (128) and decode of ``new_tokens`` (64), beside the speed of
    reading all weights once a token; medians of ``repeats`` (5). Of a picture pipeline: every stage for a picture of
    ``height`` and ``width`` pixels (those of a picture of default size), beside onnxruntime's float32 product; medians
    of ``repeats`` (3). ``against`` runs a competitor in turns with ours: ``onnxruntime`` the portable graph,
    ``llama.cpp`` the language model's ``gguf`` file, ``diffusers`` and ``sd.cpp`` a transformer of the same
    configuration, ``openvino`` its linear layers. ``profile`` adds the time of each kind of operator in one run to
    every row (:mod:`intaglio.runtimes.profile`). ``kernels`` needs no bundle, and with ``quick`` takes few turns
    (:mod:`intaglio.runtimes.bench_kernels`). Raises InputError, EngineError, RuntimeMissingError.
    """
    text = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "gguf": gguf}
    picture = {"height": height, "width": width}
    if kernels or bundle is None:
        others = {
            **text,
            **picture,
            "against": against,
            "repeats": repeats,
            "profile": profile or None,
            "bundle": bundle,
        }
        if not kernels:
            raise InputError("there is nothing to measure: give a bundle, or --kernels")
        if stray := [name for name, value in others.items() if value is not None]:
            raise InputError(f"{stray[0].replace('_', ' ')} has no meaning with --kernels, which takes no bundle")
        from intaglio.runtimes.bench_kernels import bench_kernels  # brings a graph library, which no other one needs

        return bench_kernels(quick=quick, threads=threads, progress=progress)
    if quick:
        raise InputError("quick has no meaning for a bundle; it is for --kernels. Give --repeats 1")
    target_module(target).check_runs(**session_options(target, threads=threads))
    if profile:
        check_profile(target)
    engine = open_engine(bundle, target)
    is_text = engine.bundle.kind == "text-generation"
    if stray := [name for name, value in (picture if is_text else text).items() if value is not None]:
        raise InputError(f"{stray[0].replace('_', ' ')} has no meaning for {bundle}, a bundle for {engine.bundle.kind}")
    if against is not None:
        check_competitor(engine.bundle.kind, against)
    if gguf is not None and against != "llama.cpp":
        raise InputError("gguf is the file that llama.cpp runs; give --against llama.cpp with it")
    if is_text:
        return bench_text(
            engine,
            prompt_tokens=128 if prompt_tokens is None else prompt_tokens,
            new_tokens=64 if new_tokens is None else new_tokens,
            repeats=5 if repeats is None else repeats,
            threads=threads,
            profile=profile,
            against=against,
            gguf=None if gguf is None else Path(gguf),
            progress=progress,
        )
    return bench_picture(
        engine,
        height=height,
        width=width,
        against=against,
        repeats=3 if repeats is None else repeats,
        threads=threads,
        profile=profile,
        progress=progress,
    )
