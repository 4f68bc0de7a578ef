"""What the verbs share: where output goes, how progress looks, how errors end."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from intaglio.errors import InputError
from intaglio.progress import ProgressCallback, ProgressEvent

# The exit code of a command that SIGINT ended, as shells have it.
INTERRUPTED = 130
# stdout carries only the result; everything else goes to stderr.
err = Console(stderr=True, highlight=False, emoji=False)


class ReaderGoneError(Exception):
    """Whoever read stdout has gone. No OSError: the command line library ends those itself, as a failure."""


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Left to the entry point, which ends quietly: whoever read our output has read enough."""
        raise ReaderGoneError


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the result and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Config = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Set or override a configuration key (of a picture bundle transformer.KEY); repeatable.",
    ),
]
PackTernary = Annotated[
    bool,
    typer.Option(
        "--pack-ternary", help="Pack the dense matrices of the blocks into 2 bits, which must be exactly ternary."
    ),
]
Target = Annotated[str, typer.Option(help="What to compile for or run on: cpu, coreml, tensorrt-rtx, tensorrt, cuda.")]
Threads = Annotated[int, typer.Option(min=0, max=1024, help="Threads to run with; 0 takes one a core.")]


def say(text: str, *, quiet: bool = False) -> None:
    """One line on stderr."""
    if not quiet:
        # A model's file may have a say in a message: it gets no control of the terminal.
        plain = "".join(c if (c >= " " and c != "\x7f") or c == "\n" else repr(c)[1:-1] for c in text)
        err.print(plain, markup=False, soft_wrap=True)


def settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """The configuration keys that ``--config KEY=VALUE`` set; values are JSON, or else text. Raises InputError."""
    result: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InputError(f"--config {text!r}: expected KEY=VALUE")
        if key in result:
            raise InputError(f"--config {key} is given twice; expected one value")
        try:
            result[key] = json.loads(value)
        except (ValueError, RecursionError):
            result[key] = value
    return result


def adapter_file(text: str) -> tuple[str, float]:
    """``--lora FILE[:STRENGTH]``; a colon of the file's own name stays. Raises InputError."""
    path, colon, strength = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        return path, float(strength)
    except ValueError as error:
        if Path(path).exists():
            raise InputError(f"--lora {text}: the strength is {strength!r}, expected a number") from error
        return text, 1.0


def print_json(content: Any) -> None:
    """JSON on stdout."""
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
    write(text + "\n")


def write(text: str) -> None:
    """Text on stdout, at once. Raises ReaderGoneError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def _without_nan(content: Any) -> Any:
    """JSON has no word for what is not finite: null stands for it."""
    if isinstance(content, Mapping):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; numbers are set to the right. Nothing is cut where stdout is a file."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*[_cell(cell) for cell in row])
    console = _Stdout(highlight=False, emoji=False)
    if not console.is_terminal:
        console = _Stdout(highlight=False, emoji=False, width=200)
    console.print(table, markup=False)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[ProgressCallback | None]:
    """A callback that shows a bar with the time so far and the time left, once the work has run for a second.

    Where stderr is no terminal, a line every ten seconds. Notes are told at once.
    """
    if quiet:
        yield None
    elif err.is_terminal:
        yield from _live_bar()
    else:
        yield _log_lines()


class _TimeLeft(ProgressColumn):
    """From the mean of all units so far: the library's own needs several of them within seconds."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.total is None or task.elapsed is None:
            return Text("-:--")
        seconds = round(task.elapsed * (task.total - task.completed) / task.completed)
        return Text(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}")


def _live_bar() -> Iterator[ProgressCallback]:
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(), TextColumn("left"), _TimeLeft(), console=err, transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    # A clock and not the next event starts it: the first stage of a build may take long without one.
    clock = threading.Timer(1.0, bar.start)
    clock.daemon = True

    def show(event: ProgressEvent) -> None:
        if event.task not in tasks:
            tasks[event.task] = bar.add_task(event.task, total=event.total)
        bar.update(tasks[event.task], completed=event.done)
        if event.note:
            say(event.note)  # above the bar

    clock.start()
    try:
        yield show
    finally:
        clock.cancel()
        if bar.live.is_started:
            bar.stop()  # one that never started would leave an empty line


def _log_lines() -> ProgressCallback:
    begun: dict[str, float] = {}
    said: dict[str, float] = {}

    def show(event: ProgressEvent) -> None:
        if event.note:
            say(event.note)
        now = time.monotonic()
        start = begun.setdefault(event.task, now)
        if event.done and now - said.get(event.task, start) >= 10:
            said[event.task] = now
            left = (now - start) * (event.total - event.done) / event.done
            say(f"{event.task}: {100 * event.done // event.total} %, about {left:.0f} s left")

    return show


def human_bytes(count: int) -> str:
    """``93.4 MiB``."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
