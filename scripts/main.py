"""``intaglio``: gathers the verbs."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import sys
from typing import Annotated

import typer

from intaglio.errors import IntaglioError
from intaglio.scripts import bench, compile_, convert, export, inspect_, parity, run, train
from intaglio.scripts.console import INTERRUPTED, ReaderGoneError, say, write

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
app.command("train")(train.train)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        write(f"intaglio {importlib.metadata.version('intaglio')}\n")
        raise typer.Exit
    _set_log_level(os.environ.get("INTAGLIO_DEBUG", "0"))


def _set_log_level(level: str) -> None:
    if level not in ("", "0"):
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("intaglio").setLevel(logging.DEBUG if level > "1" else logging.INFO)


def main() -> None:
    """Runs the command line. Exit codes: 0, 2 for bad input, 1 for anything unforeseen, 130 when interrupted."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed stdout: the result goes nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # some versions of Typer end a KeyboardInterrupt so
            say("interrupted")
        return code if isinstance(code, int) else 0
    except ReaderGoneError:
        # What was read is whole; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except IntaglioError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        name = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        say(f"error: {name}{error.strerror or error}")
        return 2
    except Exception as error:
        # Typer brings its own copy of click, or not, depending on its version: told by what they can do.
        if type(error).__name__ == "Abort":
            say("interrupted")
            return INTERRUPTED
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            return int(error.exit_code)
        raise
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
