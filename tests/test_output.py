"""Files that appear in one step, and progress that can be cancelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from intaglio.errors import CancelledError, OutputError
from intaglio.output import replaced_file, replaced_folder
from intaglio.progress import Progress


def test_a_file_appears_at_the_end_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 251 + ".png")  # as long as a name may be
    target.write_bytes(b"old")

    def write_half() -> None:
        with replaced_file(target) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_bytes() == b"old"
    with replaced_file(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    with replaced_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "there" / "file").read_bytes() == b"new"


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(OutputError, match="there: is a file; expected a folder"), replaced_folder(tmp_path / "there"):
        pass
    assert (tmp_path / "there").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with replaced_file(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"), replaced_file(tmp_path / "none" / "file"):
        pass


@pytest.mark.parametrize("answer", [False, np.False_])
def test_false_cancels(answer: object) -> None:
    with pytest.raises(CancelledError, match="0 of 3"):
        Progress(lambda event: answer, "task", 3, "steps")


@pytest.mark.parametrize("answer", [None, 0, "", True, np.True_])
def test_anything_else_goes_on(answer: object) -> None:
    Progress(lambda event: answer, "task", 3, "steps").advance(1)
