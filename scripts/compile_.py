"""``intaglio compile``. Named so as not to shadow the built-in function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.engines.report import Report, StageReport
from intaglio.scripts.console import Json, Quiet, Target, human_bytes, print_json, print_table, progress_bar


def compile_(
    source: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE|MODEL.onnx", help="A bundle, or an ONNX file that others wrote."),
    ],
    target: Target = "cpu",
    accuracy: Annotated[
        str,
        typer.Option(
            help="exact: float32 activations and accumulation. fast: activations rounded to 8 bits, by row and group."
        ),
    ] = "exact",
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE|MIN:OPT:MAX,…",
            help="Override sizes of the dims table, which `inspect` shows. Repeatable: coreml has a function for each, "
            "tensorrt and tensorrt-rtx an optimisation profile.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="All but cpu: float16 (of tensorrt and tensorrt-rtx also bfloat16) narrows a float32 bundle or model. "
            "Default: as the graph has it."
        ),
    ] = None,
    deployment_target: Annotated[
        str | None, typer.Option(help="coreml: the oldest system to run on, iOS18 (the default) or iOS26.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="coreml: how ternary weights are stored: lut (the default), lut-compact, lut-fp16 or int4."),
    ] = None,
    sm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SM,…",
            help="tensorrt-rtx: compute capabilities, as 86,89,120. Repeatable. Default: a portable engine, Ampere "
            "and on.",
        ),
    ] = None,
    provider: Annotated[
        str | None, typer.Option(help="cuda: which provider of onnxruntime runs it, cuda (the default) or tensorrt.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="tensorrt: let LoRA exchange weights of the engine while it is loaded.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="For an ONNX file: the engines' folder. Default: MODEL.engines beside it."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the engine of a bundle or an ONNX file for one target. What was built before comes from the cache."""
    with progress_bar(quiet=quiet) as progress:
        report = intaglio.compile(
            source,
            target,
            output=output,
            accuracy=accuracy,
            shapes=shapes,
            dtype=dtype,
            deployment_target=deployment_target,
            weights=weights,
            sm=None if sm is None else ",".join(sm),
            provider=provider,
            refit=refit,
            progress=progress,
        )
    if as_json:
        print_json(report.model_dump())
    elif not quiet:
        print_report(report)


_COLUMNS: dict[str, Callable[[StageReport], object]] = {
    "dtype": lambda stage: stage.dtype,
    "accuracy": lambda stage: stage.accuracy,
    "weights": lambda stage: human_bytes(stage.weight_bytes),
    "bits/weight": lambda stage: stage.bits_per_weight,
    "attention fused": lambda stage: f"{stage.attention_fused} of {stage.attention_total}",
    "without a kernel": lambda stage: ", ".join(f"{op} x{n}" for op, n in stage.fallbacks.items()) or "none",
    "seconds": lambda stage: "cached" if stage.from_cache else f"{stage.seconds:.1f}",
    "peak": lambda stage: human_bytes(stage.peak_rss_bytes),
}
_PACKAGE_COLUMNS: dict[str, Callable[[StageReport], object]] = {
    "dtype": _COLUMNS["dtype"],
    "weights": _COLUMNS["weights"],
    "bits/weight": _COLUMNS["bits/weight"],
    "of packed ones": lambda stage: stage.quantized_bits_per_weight or "none packed",
    "attention fused": _COLUMNS["attention fused"],
    "functions": lambda stage: ", ".join(stage.functions),
    "seconds": _COLUMNS["seconds"],
    "peak": _COLUMNS["peak"],
}
# Of these nothing is known but what TensorRT was given.
_HANDED_COLUMNS: dict[str, Callable[[StageReport], object]] = {
    "dtypes": _COLUMNS["dtype"],
    "weights": _COLUMNS["weights"],
    "bits/weight": _COLUMNS["bits/weight"],
    "of packed ones": _PACKAGE_COLUMNS["of packed ones"],
    "attention as one op": _COLUMNS["attention fused"],
    "profiles": lambda stage: stage.profiles,
    "engine": lambda stage: human_bytes(stage.package_bytes),
    "seconds": _COLUMNS["seconds"],
    "peak": _COLUMNS["peak"],
}


def print_report(report: Report) -> None:
    """The report as a table on stdout."""
    stages = report.stages.values()
    columns = _PACKAGE_COLUMNS if any(stage.package_bytes for stage in stages) else _COLUMNS
    columns = _HANDED_COLUMNS if any(stage.profiles for stage in stages) else columns
    rows = [(name, *(cell(stage) for cell in columns.values())) for name, stage in report.stages.items()]
    sets = {stage.instruction_set for stage in report.stages.values()} - {""}
    kernels = f"; kernels for {', '.join(sorted(sets))}" if sets else ""
    oldest = {stage.deployment_target for stage in report.stages.values()} - {""}
    systems = f"; for {', '.join(sorted(oldest))} and later" if oldest else ""
    title = f"engine for {report.target} ({report.compiler}{kernels}{systems})"
    print_table(title, ("stage", *columns), rows)
    exact = [(name, *kind) for name, stage in report.stages.items() for kind in stage.exact_products.items()]
    if exact:
        print_table("\nexact for want of a fast kernel", ("stage", "weights", "products"), exact)
    trials = [
        (name, ", ".join(f"{dim}={size}" for dim, size in stage.trial_sizes.items()))
        for name, stage in report.stages.items()
        if stage.trial_sizes
    ]
    if trials:
        print_table("\ntrial run", ("stage", "at"), trials)
    notes = [(name, note) for name, stage in report.stages.items() for note in stage.notes]
    notes += [("all", note) for note in report.notes]
    if notes:
        print_table("\nnotes", ("stage", "note"), notes)
