"""``intaglio run``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.engines.engine import engine_path, target_module
from intaglio.errors import InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.scripts.console import Quiet, Target, Threads, progress_bar, say, write

_MAX_PROMPT = 16 << 20


def run(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `intaglio export` wrote.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat to answer; - reads stdin.")],
    target: Target = "cpu",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that sum to p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least p times as likely as the likeliest only.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that the prompt or the text has are less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a draw repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put the prompt through the model's chat template.")
    ] = False,
    threads: Threads = 0,
    quiet: Quiet = False,
) -> None:
    """Write text with a bundle. Compiles it first where no engine is there yet."""
    read_bundle(bundle)
    target_module(target)
    if not engine_path(bundle, target).exists():
        say(f"no engine for {target} yet: compiling", quiet=quiet)
        with progress_bar(quiet=quiet) as progress:
            intaglio.compile(bundle, target, progress=progress)
    pipeline = intaglio.load(bundle, target, threads=threads)
    pipeline.warm_up()
    text = _read_stdin() if prompt == "-" else prompt
    started, times = time.monotonic(), []
    for piece in pipeline.stream(
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        chat=chat,
    ):
        write(piece)
        times.append(time.monotonic() - started)
    write("\n")
    # The last piece flushes what the text decoder held back; it is no token.
    tokens = len(times) - 1
    if tokens > 1 and not quiet:
        rate = (tokens - 1) / (times[-2] - times[0])
        say(f"{tokens} tokens: the first after {times[0]:.2f} s, then {rate:.1f} a second")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("the prompt is to come from stdin, which is closed")
    raw = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(raw) > _MAX_PROMPT:
        raise InputError(f"the prompt on stdin is longer than {_MAX_PROMPT} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not UTF-8 (byte {error.start}); expected text") from error
