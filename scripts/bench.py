"""``intaglio bench``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import intaglio
from intaglio.scripts.console import Json, Quiet, Target, Threads, print_json, print_table, progress_bar

_AGAINST = (
    "Another one in turns with ours: onnxruntime, llama.cpp (language models), diffusers, sd.cpp, openvino (pictures)."
)


def bench(
    bundle: Annotated[Path | None, typer.Argument(help="A compiled bundle.")] = None,
    target: Target = "cpu",
    kernels: Annotated[bool, typer.Option("--kernels", help="Measure the kernels; takes no bundle.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Of the kernels, few turns.")] = False,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt (128).")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to write after it (64).")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Height of a picture (as of run).")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of a picture (as of run).")] = None,
    against: Annotated[str | None, typer.Option(help=_AGAINST)] = None,
    gguf: Annotated[Path | None, typer.Option(help="The file for llama.cpp (the bundle's source).")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repetitions (5, of pictures 3); medians are reported.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Add where the time goes, operator by operator.")] = False,
    threads: Threads = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure an engine's stages or the kernels, beside ceilings and others measured in the same run."""
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.bench(
            bundle,
            target,
            kernels=kernels,
            quick=quick,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            height=height,
            width=width,
            against=against,
            gguf=gguf,
            repeats=repeats,
            threads=threads,
            profile=profile,
            progress=progress,
        )
    if as_json:
        print_json(result)
        return
    facts = [(key, _text(value)) for part in ("machine", "ceilings") for key, value in result[part].items()]
    print_table("machine and ceilings", ("key", "value"), facts)
    if kernels:
        from intaglio.runtimes.bench_kernels import tables

        for title, (columns, rows) in tables(result).items():
            print_table(f"\n{title}", columns, rows)
        return
    for row in result["rows"]:
        measures = [(key, value) for key, value in row.items() if not key.endswith("profile")]
        print_table(f"\n{row['stage']} on {row['target']}", ("measure", "value"), measures)
        for key in row.keys() - dict(measures).keys():
            _print_profile(f"{row['stage']}, {key.replace('_', ' ')}", row[key])


def _text(value: object) -> object:
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else value


def _print_profile(title: str, profile: Mapping[str, Any]) -> None:
    outside = f"{profile['seconds']} s, of which {profile['outside_operators_ms']} ms outside of operators"
    for name, columns in (
        ("operators", ("op_type", "count", "ms", "share")),
        ("nodes", ("op_type", "count", "ms", "share", "shapes")),
    ):
        rows = [[row[key] for key in columns] for row in profile[name]]
        print_table(f"\n{title}: {name} ({outside})", columns, rows)
