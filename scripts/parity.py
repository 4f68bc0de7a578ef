"""``intaglio parity``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.scripts.console import Json, Quiet, Target, print_json, print_table, say


def parity(
    bundle: Annotated[Path, typer.Argument(help="A compiled bundle; exported with --taps it shows where they part.")],
    target: Target = "cpu",
    against: Annotated[
        str, typer.Option(help="onnxruntime (the portable graph, no kernels) or tract.")
    ] = "onnxruntime",
    stage: Annotated[str, typer.Option(help="The stage to compare.")] = "score",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the random input.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random input.")] = 0,
    bound: Annotated[
        float | None,
        typer.Option(help="Largest relative L2 distance that counts as agreement. Default: 1e-4, of float16 1e-2."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare an engine with an independent runtime, and name the first output that differs. Exits 1 if one does."""
    report = intaglio.parity(bundle, target, against=against, stage=stage, tokens=tokens, seed=seed, bound=bound)
    first = report.first_divergent
    if as_json:
        print_json({**asdict(report), "first_divergent": first and first.name})
    else:
        rows = [(d.name, f"{d.cosine:.9f}", f"{d.relative_l2:.2e}", f"{d.max_abs:.2e}") for d in report.differences]
        title = f"{stage} on {target} against {against}"
        print_table(title, ("output", "cosine", "relative L2", "max abs"), rows)
    if first is None:
        say(f"all {len(report.differences)} outputs agree within {report.bound:g}", quiet=quiet)
        return
    say(f"first beyond {report.bound:g}: {first.name}, relative L2 {first.relative_l2:.2e}")
    raise typer.Exit(1)
