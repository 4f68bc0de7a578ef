"""A competitor in a process of its own, which is asked in lines and answers in lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from intaglio.errors import RuntimeMissingError


class Competitor:
    """Starts a module of ``intaglio.runtimes.competitors`` with ``request`` as JSON on its command line.

    It says a line when it is ready, and one to each that it is sent. Raises RuntimeMissingError with its last words
    if it ends instead, and the extra that installs it.
    """

    def __init__(self, name: str, module: str, request: Mapping[str, Any]) -> None:
        self.name = name
        self.ended_with: int | None = None  # its exit code, once it has ended by itself
        # Its warnings go to a file: a pipe that nobody reads fills up and stops it.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, line: str = "") -> str:
        """Its answer to a line."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the answer says why
        return self._answer()

    def seconds(self, line: str = "") -> float:
        """Its answer to a line, which is a number of seconds."""
        return float(self.ask(line))

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self.ended_with = self._child.wait()
            self._stderr.seek(0)
            last = self._stderr.read().strip().splitlines()[-1:] or [f"it ended with {self.ended_with}"]
            missing = "No module named" in last[0]
            hint = "; install it with `pip install 'intaglio[bench]'`" if missing else ""
            raise RuntimeMissingError(f"{self.name} cannot be run beside ours: {last[0]}{hint}")
        return line.rstrip("\n")

    def close(self) -> None:
        """Ends it."""
        self._child.kill()
        self._child.communicate()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
