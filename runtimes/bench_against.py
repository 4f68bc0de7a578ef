"""Whom ``bench`` can run beside a bundle, and what each of them is asked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from intaglio.engines.cache import cache_folder
from intaglio.engines.engine import Engine, read_report
from intaglio.errors import InputError, RuntimeMissingError
from intaglio.exporters.bundle import SourceFile
from intaglio.runtimes.competitors.child import Competitor
from intaglio.runtimes.machine import available_bytes
from intaglio.runtimes.random_feeds import Sizes

# By kind of bundle: the module that runs each of them in a process of its own.
COMPETITORS = {
    "text-generation": {
        "onnxruntime": "intaglio.runtimes.competitors.onnxruntime_graph",
        "llama.cpp": "intaglio.runtimes.competitors.llama_cpp_text",
    },
    "text-to-image": {
        "onnxruntime": "intaglio.runtimes.competitors.onnxruntime_graph",
        "diffusers": "intaglio.runtimes.competitors.diffusers_transformer",
        "sd.cpp": "intaglio.runtimes.competitors.sd_cpp_transformer",
        "openvino": "intaglio.runtimes.competitors.openvino_linears",
    },
}


def key_of(name: str) -> str:
    """A competitor's name in the keys of a row."""
    return name.replace(".", "_")


def check_competitor(kind: str, name: str) -> None:
    """Raises InputError unless this one runs beside bundles of this kind."""
    if name not in COMPETITORS[kind]:
        others = [other for other, names in COMPETITORS.items() if name in names]
        found = f"{name} runs beside bundles for {others[0]}" if others else f"against {name!r} is unknown"
        raise InputError(f"{found}; beside one for {kind} there is {', '.join(COMPETITORS[kind])}")


def start_competitor(kind: str, name: str, request: dict[str, Any]) -> Competitor:
    """Starts it; ``ready`` of the result is its version. Raises RuntimeMissingError."""
    return Competitor(name, COMPETITORS[kind][name], request)


def graph_request(engine: Engine, stage: str, threads: int, sizes: Sizes | None) -> dict[str, Any]:
    """For onnxruntime alone: the portable graph of ``stage``, on the random inputs of ``sizes`` or a generation.

    Left to itself onnxruntime unpacks all weights to float32 at load and packs them once more; where that would take
    more than half of the memory that is free, the graph unpacks them in each run.
    """
    weights = read_report(engine.bundle_path, engine.info.target).stages[stage].weight_count
    return {
        "bundle": str(engine.bundle_path),
        "stage": stage,
        "threads": threads or os.cpu_count(),
        "unpack": 2 * 4 * weights < available_bytes() // 2,
        "sizes": None if sizes is None else asdict(sizes),
    }


@contextmanager
def start_llama_cpp(gguf: Path, context: int, threads: int) -> Iterator[tuple[Competitor, str | None]]:
    """llama.cpp with the file, and a note where it had to do without some of its kernels.

    Some compilers build its kernels for AMX so that the first product ends the process; then it runs without these.
    """
    request = {"gguf": str(gguf), "context": context, "threads": threads or os.cpu_count(), "extra_buffers": True}
    note = None
    competitor = start_competitor("text-generation", "llama.cpp", request)
    try:
        # Few tokens take another way than many.
        for count in (1, 64):
            competitor.ask(generation([0] * min(count, context - 1), 1))
    except RuntimeMissingError:
        if (competitor.ended_with or 0) >= 0:
            raise
        note = (
            f"its kernels that repack weights ended the process with signal {-(competitor.ended_with or 0)}: left out"
        )
        competitor.close()
        competitor = start_competitor("text-generation", "llama.cpp", request | {"extra_buffers": False})
    with competitor:
        yield competitor, note


def generation(prompt: Sequence[int], new_tokens: int) -> str:
    """The line that asks a competitor for a generation; see ``competitors.text_protocol``."""
    return json.dumps({"prompt": list(prompt), "new_tokens": new_tokens})


def find_gguf(engine: Engine, given: Path | None) -> tuple[Path, bool]:
    """The GGUF file for llama.cpp and whether it is the one that the bundle was made from.

    Where none is given, the bundle's source is looked for beside the bundle, in the working folder and in the cache
    of fetched models. Raises InputError.
    """
    files = engine.bundle.language_model.source.files
    if given is not None:
        if not given.is_file():
            raise InputError(f"{given}: no such file; expected a GGUF file for llama.cpp")
        return given, any(_is_source(given, file) for file in files)
    for file in files:
        for folder in (engine.bundle_path.parent, Path(), cache_folder() / "packages"):
            path = folder / file.name
            if file.name.endswith(".gguf") and path.is_file() and _is_source(path, file):
                return path, True
    names = ", ".join(file.name for file in files)
    raise InputError(f"{engine.bundle_path}: its source {names} is not here as a GGUF file; say where with --gguf FILE")


def _is_source(path: Path, file: SourceFile) -> bool:
    if path.stat().st_size != file.bytes:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
