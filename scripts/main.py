"""``intaglio``: the entry point that gathers the verbs."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import Annotated

import typer

from intaglio.errors import IntaglioError
from intaglio.scripts import bench, compile_, convert, export, inspect_, parity, run
from intaglio.scripts.console import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Takes trained models to machines: export a checkpoint, compile it, run it.",
)
app.command("export")(export.export)
app.command("compile")(compile_.compile_)
app.command("convert")(convert.convert)
app.command("run")(run.run)
app.command("inspect")(inspect_.inspect_)
app.command("parity")(parity.parity)
app.command("bench")(bench.bench)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"intaglio {importlib.metadata.version('intaglio')}\n")
        raise typer.Exit
    _set_log_level(os.environ.get("INTAGLIO_DEBUG", "0"))


def _set_log_level(level: str) -> None:
    if level not in ("", "0"):
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("intaglio").setLevel(logging.DEBUG if level > "1" else logging.INFO)


def main() -> None:
    """Runs the command line. Exit codes: 0, 2 for bad input, 1 for anything unforeseen, 130 when interrupted."""
    try:
        app()
    except IntaglioError as error:
        say(f"error: {error}")
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has gone; what it read is whole.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
