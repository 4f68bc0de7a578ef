"""What a build needs, before it begins: the memory of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from intaglio.engines import memory
from intaglio.engines.nvidia import limits
from intaglio.errors import CompileError

GIB = 1 << 30


@pytest.mark.parametrize("free", [None, 100 * GIB])
def test_the_memory_of_a_build_is_told(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: free)
    assert limits.check_memory("stage", limits.BuildSize(2 * GIB)) == "stage: building takes about 5.7 GiB of memory"


def test_little_memory_is_told_and_too_little_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 5 * GIB)
    assert limits.check_memory("stage", limits.BuildSize(2 * GIB)).endswith(
        "5.7 GiB of memory, and 5.0 GiB are free: it will be slow"
    )
    monkeypatch.setattr(limits, "free_bytes", lambda: 4 * GIB)
    with pytest.raises(CompileError, match=r"stage: building takes at least 4\.1 GiB of memory, and 4\.0 GiB are free"):
        limits.check_memory("stage", limits.BuildSize(2 * GIB))


def test_free_memory_is_at_most_that_of_the_machine() -> None:
    free = memory.free_bytes()
    if free is None:
        pytest.skip("this system does not say")
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("utf-8").splitlines())
    whole = sum(int(lines[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    assert 0 < free <= whole


@pytest.mark.parametrize("version", ["", "memory"])
def test_limits_of_control_groups_count(tmp_path: Path, version: str) -> None:
    kind = memory._GROUPS[version]
    (tmp_path / kind.limit).write_text(f"{8 * GIB}\n")
    (tmp_path / kind.used).write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"file {3 * GIB}\n{kind.cached} {2 * GIB}\n")
    assert memory._left(tmp_path, kind) == 5 * GIB
    (tmp_path / kind.used).write_text(f"{11 * GIB}\n")
    assert memory._left(tmp_path, kind) == 0
    if not version:
        (tmp_path / kind.limit).write_text("max\n")
        assert memory._left(tmp_path, kind) > 1000 * GIB


def test_progress_by_memory_rises_to_the_end() -> None:
    for size in (limits.BuildSize(GIB), limits.BuildSize(GIB, 5000), limits.BuildSize(0, 10), limits.BuildSize(0)):
        parts = [size.fraction(taken) for taken in range(-GIB, 4 * GIB, GIB // 8)]
        assert parts == sorted(parts)
        assert parts[0] == 0
        assert parts[-1] == (1 if size.weight_bytes or size.nodes else pytest.approx(1))
