"""``intaglio bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.scripts.console import Json, Quiet, Target, Threads, print_json, print_table, progress_bar


def bench(
    bundle: Annotated[Path, typer.Argument(help="A compiled bundle.")],
    target: Target = "cpu",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write after it.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")] = 5,
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure an engine: load, prefill and decode, beside a ceiling measured in the same run."""
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.bench(
            bundle,
            target,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    if as_json:
        print_json(result)
        return
    print_table("machine and ceilings", ("key", "value"), [*result["machine"].items(), *result["ceilings"].items()])
    for row in result["rows"]:
        print_table(f"\n{row['stage']} on {row['target']}", ("measure", "value"), list(row.items()))
