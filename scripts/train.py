"""``intaglio train``."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import intaglio
from intaglio.scripts.console import INTERRUPTED, Quiet, progress_bar, say

_SECONDS_BETWEEN_LINES = 10.0


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; recipes/ has ready ones.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of checkpoints, log and model (runs/ and the recipe's name)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Set a key of the recipe (train.steps=10); repeatable."),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave damaged records of the training data out and count them, not stop."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model: checkpoints, a log, and at the end the model as it is published, ready to export.

    On several processes: torchrun --nproc-per-node 2 --no-python intaglio train RECIPE.
    """
    is_first = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes speaks
    quiet = quiet or not is_first
    folder = output if output is not None else Path("runs") / recipe.stem
    overrides = [*(set_ or ()), *(["data.skip_bad=true"] if skip_bad else [])]
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.train(
            recipe, folder, resume=resume, overrides=overrides, progress=progress, report=None if quiet else _lines()
        )
    left_out = f", damaged records left out: {result.skipped}" if result.skipped else ""
    if result.stopped is not None and result.stopped != "patience":
        again = _resuming(recipe, folder, set_ or (), skip_bad=skip_bad)
        say(f"stopped by {result.stopped} after step {result.step}{left_out}; to go on: {again}", quiet=not is_first)
        raise typer.Exit(INTERRUPTED)
    why = " (the evaluation got no better)" if result.stopped else ""
    best = f"; the best, of step {result.best_step}, in {folder / 'best'}" if result.best_step is not None else ""
    say(f"trained {result.step} steps{why}{left_out}: {folder / 'model'}{best}", quiet=quiet)


def _resuming(recipe: Path, folder: Path, overrides: Sequence[str], *, skip_bad: bool) -> str:
    """The command that goes on with this run, as a shell takes it."""
    words = ["intaglio", "train", str(recipe), "-o", str(folder), "--resume"]
    for text in overrides:
        words += ["--set", text]
    if skip_bad:
        words.append("--skip-bad")
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    if processes is None:
        return shlex.join(words)
    launcher = ["torchrun", "--nproc-per-node", processes, "--no-python"]
    return f"{shlex.join([*launcher, *words])} (torchrun's other options as before)"


def _lines() -> Callable[[Mapping[str, float]], None]:
    """Says a row of the log every ten seconds, and every one with an evaluation."""
    last = 0.0

    def show(row: Mapping[str, float]) -> None:
        nonlocal last
        if time.monotonic() - last < _SECONDS_BETWEEN_LINES and "evaluation_loss" not in row:
            return
        last = time.monotonic()
        speed = next((name for name in row if name.endswith("_per_second")), None)
        texts = [f"loss {row['loss']:.4f}"]
        texts += [
            f"{name.replace('_', ' ')} {value:.4f}" for name, value in row.items() if name.startswith("evaluation_")
        ]
        if speed is not None:
            texts.append(f"{row[speed]:,.0f} {speed.replace('_per_second', '')}/s")
        if row.get("skipped"):
            texts.append(f"damaged records left out: {row['skipped']:.0f}")
        say(f"step {row['step']:.0f}: {', '.join(texts)}")

    return show
