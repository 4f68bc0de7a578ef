"""``intaglio bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import intaglio
from intaglio.scripts.console import Json, Quiet, Target, Threads, print_json, print_table, progress_bar


def bench(
    bundle: Annotated[Path, typer.Argument(help="A compiled bundle.")],
    target: Target = "cpu",
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt (128).")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to write after it (64).")] = None,
    height: Annotated[int | None, typer.Option(min=16, help="Height of a picture (512).")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Width of a picture (512).")] = None,
    against: Annotated[
        str | None, typer.Option(help="diffusers: its transformer of the same configuration, in turns with ours.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repetitions (5, of pictures 3); medians are reported.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Add where the time goes, operator by operator.")] = False,
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure an engine's stages, beside a ceiling measured in the same run."""
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.bench(
            bundle,
            target,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            height=height,
            width=width,
            against=against,
            repeats=repeats,
            threads=threads,
            profile=profile,
            progress=progress,
        )
    if as_json:
        print_json(result)
        return
    print_table("machine and ceilings", ("key", "value"), [*result["machine"].items(), *result["ceilings"].items()])
    for row in result["rows"]:
        profiles = {key: row.pop(key) for key in list(row) if key.endswith("profile")}
        print_table(f"\n{row['stage']} on {row['target']}", ("measure", "value"), list(row.items()))
        for key, profile_ in profiles.items():
            _print_profile(f"{row['stage']}, {key.replace('_', ' ')}", profile_)


def _print_profile(title: str, profile: dict[str, Any]) -> None:
    outside = f"{profile['seconds']} s, of which {profile['outside_operators_ms']} ms outside of operators"
    for name, columns in (
        ("operators", ("op_type", "count", "ms", "share")),
        ("nodes", ("op_type", "count", "ms", "share", "shapes")),
    ):
        print_table(f"\n{title}: {name} ({outside})", columns, [[row[key] for key in columns] for row in profile[name]])
