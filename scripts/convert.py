"""``intaglio convert``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.scripts.console import Config, Json, PackTernary, Quiet, print_json, progress_bar, say, settings


def convert(
    source: Annotated[Path, typer.Argument(help="A .gguf file, a .safetensors file, or a Hugging Face or MLX folder.")],
    target: Annotated[
        Path,
        typer.Argument(
            help="NAME.gguf, a folder to write safetensors into, or NAME.safetensors (FLUX.2's transformer)."
        ),
    ],
    storage: Annotated[
        str | None,
        typer.Option("--type", help="Round to a type: F32, F16, BF16; in GGUF files also Q8_0, Q4_0, Q4_1, …"),
    ] = None,
    config: Config = None,
    pack_ternary: PackTernary = False,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Leave the tokenizer out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every value, write nothing.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another format: exactly, or not at all."""
    with progress_bar(quiet=quiet) as progress:
        report = intaglio.convert(
            source,
            target,
            storage=storage,
            config=settings(config),
            pack_ternary=pack_ternary,
            tokenizer=not no_tokenizer,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(asdict(report) | {"source": str(report.source), "target": str(report.target)})
    kinds = Counter(
        t.storage if t.storage == t.source_storage else f"{t.source_storage} to {t.storage}" for t in report.tensors
    )
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    say(f"{'would write' if dry_run else 'wrote'} {target}: {len(report.tensors)} tensors ({text})", quiet=quiet)
    if report.rounded:
        say(f"rounded: {len(report.rounded)} tensors, as --type {storage} asks; the others are exact", quiet=quiet)
    for note in report.notes:
        say(note, quiet=quiet)
