"""``intaglio compile``. Named so as not to shadow the built-in function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.engines.report import Report
from intaglio.scripts.console import Json, Quiet, Target, human_bytes, print_json, print_table, progress_bar


def compile_(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `intaglio export` wrote.")],
    target: Target = "cpu",
    accuracy: Annotated[str, typer.Option(help="exact: float32 activations and accumulation.")] = "exact",
    shapes: Annotated[
        str | None,
        typer.Option(metavar="NAME=VALUE|MIN:OPT:MAX,…", help="Override sizes of the bundle's dims table."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the engine of a bundle for one target. A stage that was built before comes from the cache."""
    with progress_bar(quiet=quiet) as progress:
        report = intaglio.compile(bundle, target, accuracy=accuracy, shapes=shapes, progress=progress)
    if as_json:
        print_json(report.model_dump())
    elif not quiet:
        print_report(report)


def print_report(report: Report) -> None:
    """The report as a table on stdout."""
    rows = [
        (
            name,
            stage.dtype,
            stage.accuracy,
            human_bytes(stage.weight_bytes),
            stage.bits_per_weight,
            f"{stage.attention_fused} of {stage.attention_total}",
            ", ".join(f"{op} x{n}" for op, n in stage.fallbacks.items()) or "none",
            "cached" if stage.from_cache else f"{stage.seconds:.1f}",
            human_bytes(stage.peak_rss_bytes),
        )
        for name, stage in report.stages.items()
    ]
    columns = (
        "stage",
        "dtype",
        "accuracy",
        "weights",
        "bits/weight",
        "attention fused",
        "without a kernel",
        "seconds",
        "peak",
    )
    print_table(f"engine for {report.target} ({report.compiler})", columns, rows)
