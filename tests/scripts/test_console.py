"""Progress on a terminal that is none."""

from __future__ import annotations

import pytest

from intaglio.progress import ProgressEvent
from intaglio.scripts.console import progress_bar


def test_notes_are_told_at_once_and_little_else(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with progress_bar(quiet=quiet) as show:
            if show is not None:
                show(ProgressEvent("build net", 0, 9, "steps", "net: building takes about 3 GiB of memory"))
                show(ProgressEvent("build net", 1, 9, "steps"))
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == ("" if quiet else "net: building takes about 3 GiB of memory\n")
