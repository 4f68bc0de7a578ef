"""Pages that were read leave memory, and hold what they held when they are read again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from intaglio.engines.nvidia.mapped_pages import release_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")

SIZE = 32 << 20


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssFile"))


@pytest.mark.parametrize("name", ["weights.data", "with a space.data"])
def test_pages_leave_and_come_back(tmp_path: Path, name: str) -> None:
    content = np.random.default_rng().integers(0, 256, SIZE, np.uint8)
    path = tmp_path / name
    path.write_bytes(content.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        seen = np.frombuffer(mapped, np.uint8)
        total = int(seen.sum(dtype=np.int64))
        before = resident_file_bytes()
        assert release_pages(path) == SIZE
        assert before - resident_file_bytes() > SIZE * 3 // 4
        assert int(seen.sum(dtype=np.int64)) == total
        np.testing.assert_array_equal(seen, content)
        del seen


def test_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights.data"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:4] = b"kept"
        assert release_pages(path) == 0
        assert mapped[:4] == b"kept"


def test_a_file_that_nobody_mapped(tmp_path: Path) -> None:
    (tmp_path / "weights.data").write_bytes(b"0")
    assert release_pages(tmp_path / "weights.data") == 0
