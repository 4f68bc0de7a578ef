"""``bench``: speed and memory of a bundle's engine, beside what the machine can do, measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intaglio.engines.engine import open_engine
from intaglio.errors import InputError
from intaglio.progress import ProgressCallback
from intaglio.runtimes.bench_picture import COMPETITORS, bench_picture
from intaglio.runtimes.bench_text import bench_text


def bench(
    bundle: str | Path,
    target: str = "cpu",
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    height: int | None = None,
    width: int | None = None,
    against: str | None = None,
    repeats: int | None = None,
    threads: int = 0,
    profile: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Times the stages of an engine and returns ``{machine, ceilings, rows}``.

    Of a language model: load, prefill of ``prompt_tokens`` (128) and decode of ``new_tokens`` (64), beside the speed of
    reading all weights once a token; medians of ``repeats`` (5). Of a picture pipeline: every stage for a picture of
    ``height`` and ``width`` pixels (512), beside onnxruntime's float32 product; medians of ``repeats`` (3).
    ``against="diffusers"`` runs its transformer, of the same configuration, in turns with ours. ``profile`` adds the
    time of each kind of operator in one run to every row (:mod:`intaglio.runtimes.profile`). Raises InputError,
    EngineError, RuntimeMissingError.
    """
    engine = open_engine(bundle, target)
    text = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    picture = {"height": height, "width": width, "against": against}
    is_text = engine.bundle.kind == "text-generation"
    if stray := [name for name, value in (picture if is_text else text).items() if value is not None]:
        raise InputError(f"{stray[0].replace('_', ' ')} has no meaning for {bundle}, a bundle for {engine.bundle.kind}")
    if is_text:
        return bench_text(
            engine,
            prompt_tokens=128 if prompt_tokens is None else prompt_tokens,
            new_tokens=64 if new_tokens is None else new_tokens,
            repeats=5 if repeats is None else repeats,
            threads=threads,
            profile=profile,
            progress=progress,
        )
    if against is not None and against not in COMPETITORS:
        raise InputError(f"against {against!r}: there is {', '.join(COMPETITORS)}")
    return bench_picture(
        engine,
        height=512 if height is None else height,
        width=512 if width is None else width,
        against=against,
        repeats=3 if repeats is None else repeats,
        threads=threads,
        profile=profile,
        progress=progress,
    )
