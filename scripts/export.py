"""``intaglio export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import intaglio
from intaglio.errors import InputError
from intaglio.scripts.console import Quiet, human_bytes, progress_bar, say


def export(
    source: Annotated[Path, typer.Argument(help="A .gguf file, a .safetensors file, or a Hugging Face folder.")],
    bundle: Annotated[Path, typer.Argument(help="The folder to write; an older bundle there is replaced.")],
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float16 or bfloat16: of dense weights, activations and cache. Norms, softmax, rotary angles "
            "and logits stay float32, quantized weights as they are."
        ),
    ] = "float32",
    stages: Annotated[
        str | None,
        typer.Option(
            help="Graphs, comma-separated: generate, score, encode (hidden states only). Default: generate,score."
        ),
    ] = None,
    hidden_states: Annotated[
        str | None,
        typer.Option(help="Layers whose hidden states become outputs, comma-separated; 0 is the embeddings."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Set or override a configuration key; repeatable."),
    ] = None,
    taps: Annotated[bool, typer.Option("--taps", help="Make every named point of the graph an output.")] = False,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Go on past tensors that the architecture does not know.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Turn a checkpoint into a bundle: portable ONNX graphs, packed weights, tokenizer."""
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.export(
            source,
            bundle,
            dtype=dtype,
            stages=stages.split(",") if stages else None,
            hidden_states=_integers(hidden_states),
            config=dict(map(_setting, config or [])),
            taps=taps,
            allow_unused=allow_unused,
            dry_run=dry_run,
            progress=progress,
        )
    done = "would write" if dry_run else "wrote"
    say(
        f"{done} {bundle}: {result.architecture}, stages {', '.join(result.stages)}, in {result.dtype}, "
        f"{human_bytes(result.weights.bytes)} of weights",
        quiet=quiet,
    )
    if flushed := result.weights.flushed_to_zero:
        say(f"{flushed} weights are too small for {result.dtype} and became zero", quiet=quiet)
    if result.unused_tensors:
        names = ", ".join(result.unused_tensors[:10]) + (", …" if len(result.unused_tensors) > 10 else "")
        say(f"not used: {len(result.unused_tensors)} tensors ({names})", quiet=quiet)


def _integers(text: str | None) -> list[int]:
    try:
        return [int(item) for item in text.split(",")] if text else []
    except ValueError as error:
        raise InputError(f"--hidden-states {text!r}: expected layer numbers, comma-separated") from error


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"--config {text!r}: expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
