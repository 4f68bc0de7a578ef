"""``intaglio parity``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import intaglio
from intaglio.errors import InputError
from intaglio.runtimes.difference import Difference
from intaglio.runtimes.parity import ParityReport, some_of
from intaglio.scripts.console import Json, Quiet, Target, print_json, print_table, progress_bar, say


def parity(
    bundle: Annotated[Path, typer.Argument(help="A compiled bundle; exported with --taps it shows where they part.")],
    target: Target = "cpu",
    against: Annotated[
        str | None,
        typer.Option(
            help="onnxruntime (the default: the portable graph, no kernels), tract, exact (our kernels in that "
            "accuracy, for a fast engine), or golden:DIR, stored tensors."
        ),
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="The stage to compare. Default: all of a pipeline, of a language model score.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the random input (12).")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels of the random picture (64).")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels of the random picture (96).")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of the random input (2; 1 of a golden folder).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random input.")] = 0,
    bound: Annotated[
        float | None,
        typer.Option(
            help="Largest relative L2 distance that counts as agreement. Default: 1e-4, of float16 1e-2, of fast "
            "engines 5e-2, of golden folders 2e-2 or 5e-2."
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(
            help="Least cosine that counts as agreement. Default: 0.99999, of float16 0.9999, of fast engines and "
            "golden folders 0.999."
        ),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on past the first that differs.")] = False,
    write_golden: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Compare nothing: store one side's tensors as a golden folder.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="What --write-golden runs: onnxruntime (the default), engine or tract.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the sampler that --write-golden stores (4).")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare an engine with an independent runtime or stored tensors, and name the first output that differs.

    Exits 1 if one does.
    """
    sizes = {"tokens": tokens, "height": height, "width": width, "batch": batch}
    if write_golden is not None:
        compared = {"--against": against, "--bound": bound, "--min-cosine": min_cosine, "--keep-going": keep_going}
        if given := [name for name, value in compared.items() if value not in (None, False)]:
            raise InputError(f"{given[0]} is for a comparison, and --write-golden makes none")
        options = {**sizes, "batch": batch or 1, "steps": steps or 4, "seed": seed, "stage": stage, "target": target}
        _write(bundle, write_golden, source or "onnxruntime", options, as_json=as_json, quiet=quiet)
        return
    if source is not None or steps is not None:
        raise InputError("--from and --steps say what --write-golden stores; name a folder with it")
    with progress_bar(quiet=quiet) as progress:
        report = intaglio.parity(
            bundle,
            target,
            against=against or "onnxruntime",
            stage=stage,
            **sizes,
            seed=seed,
            bound=bound,
            min_cosine=min_cosine,
            keep_going=keep_going,
            progress=progress,
        )
    if as_json:
        print_json(_as_json(report))
    else:
        _print_report(report)
    _say_rest(report, quiet=quiet)
    first = report.first_divergent
    if first is None:
        within = f"{report.bound:g}" if report.bound is not None else "their bounds"
        say(f"all {len(report.differences)} outputs agree within {within}", quiet=quiet)
        return
    say(f"first beyond its bounds: {first.name} of {first.stage}: {first.reason}")
    raise typer.Exit(1)


def _write(bundle: Path, folder: Path, source: str, options: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    from intaglio.runtimes.golden_writing import write_golden

    with progress_bar(quiet=quiet) as progress:
        info = write_golden(bundle, folder, source=source, progress=progress, **options)
    if as_json:
        print_json(info.model_dump(mode="json"))
    say(f"wrote {folder}: {', '.join(info.stages)} by {info.source} ({info.runtime}), seed {info.seed}", quiet=quiet)


def _as_json(report: ParityReport) -> dict[str, Any]:
    first = report.first_divergent
    named = None if first is None else {"stage": first.stage, "name": first.name, "reason": first.reason}
    return {**asdict(report), "first_divergent": named}


def _print_report(report: ParityReport) -> None:
    for stage in dict.fromkeys(d.stage for d in report.differences):
        rows = [_row(d) for d in report.differences if d.stage == stage]
        columns = ("output", "cosine", "relative L2", "max abs", "at least", "at most", "agrees")
        print_table(f"{stage} on {report.target} against {report.against}", columns, rows)


def _row(difference: Difference) -> tuple[object, ...]:
    bounds = difference.bounds
    assert bounds is not None, "every row of a report has bounds"
    measures = (f"{difference.cosine:.9f}", f"{difference.relative_l2:.2e}", f"{difference.max_abs:.2e}")
    return (
        difference.name, *measures, f"{bounds.cosine:g}", f"{bounds.relative_l2:g}", difference.reason is None
    )  # fmt: skip


def _say_rest(report: ParityReport, *, quiet: bool) -> None:
    for note in report.notes:
        say(note)
    for each in report.large_activations:
        say(
            f"{each.stage}: {each.name!r}, which {each.op_type} {each.node!r} makes, comes to {each.max_abs:g}; "
            f"{each.dtype} ends at {each.maximum:g}, and other inputs may go beyond"
        )
    if report.not_compared:
        say(f"not compared, no file: {some_of(report.not_compared)}", quiet=quiet)
    if report.unmatched:
        say(f"files that match no output of the bundle: {some_of(report.unmatched)}")
