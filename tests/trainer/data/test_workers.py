"""Worker processes: order, errors, a worker that dies, an interrupt, a job that is ended, and a run that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import training_data as data

from intaglio.errors import DataError
from intaglio.trainer.data.loader import Loader

_RUN = """
import sys
from pathlib import Path
from intaglio.trainer.data.settings import build_source, parse_settings

if __name__ == "__main__":
    table = {"format": "image-folder", "folder": sys.argv[1], "batch_size": 1, "workers": 2, "examples": {"size": 8}}
    source = build_source(parse_settings(table), seed=0)
    while True:
        for batch in source:
            print(*source._pool._executor._processes, flush=True)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids: list[int]) -> bool:
    """Whether all processes end; waits as long as a loaded machine may take."""
    for _ in range(600):
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _source(build: Callable[..., Loader], root: Path, workers: int) -> Loader:
    table = {**data.TABLES["image-folder"], "batch_size": 2, "workers": workers}
    return build(root, table)


def test_a_worker_that_dies_is_an_error_and_others_can_start(build: Callable[..., Loader], corpora: Path) -> None:
    source = _source(build, corpora, 2)
    expected = list(_source(build, corpora, 0))
    stream = iter(source)
    first = next(stream)
    executor = source._pool._executor
    assert executor is not None
    os.kill(next(iter(executor._processes)), signal.SIGKILL)
    with pytest.raises(DataError, match=r"one of 2 data workers died .* may have run out of memory"):
        list(stream)
    assert torch.equal(first["pixel_values"], expected[0]["pixel_values"])
    state = source.state_dict()
    done = state["order"]["position"] // 2
    rest = list(source)
    assert len(rest) == len(expected) - done
    assert torch.equal(rest[0]["pixel_values"], expected[done]["pixel_values"])
    source.close()


def test_a_bad_record_in_a_worker_names_its_place(build: Callable[..., Loader], tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{i}.png").write_bytes(data.png(data.picture(i)) if i != 4 else b"")
    source = build(
        tmp_path, {"format": "image-folder", "folder": ".", "batch_size": 1, "workers": 1, "examples": {"size": 4}}
    )
    with pytest.raises(DataError, match=r"a/4\.png: the picture does not decode"):
        list(source)
    source.close()


def _in_its_own_group(folder: Path, program: str, *arguments: Path) -> subprocess.Popen[str]:
    """A process that runs ``program``, which signals to its group reach with its children, and this one not."""
    script = folder / "run.py"
    script.write_text(program)
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_run(how: signal.Signals, corpora: Path, tmp_path: Path) -> None:
    """SIGINT reaches the whole group, as from a terminal; the others the main process alone."""
    process = _in_its_own_group(tmp_path, _RUN, corpora / "classes")
    assert process.stdout is not None
    assert process.stderr is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids = [int(pid) for pid in line.split()]
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == -how
    if how == signal.SIGINT:
        assert stderr.count("KeyboardInterrupt") == 1
    assert _gone(pids)


_TRAINING = """
import sys
from pathlib import Path

import torch

from intaglio.trainer.data.settings import build_source, parse_settings
from intaglio.trainer.loop import Trainer
from intaglio.trainer.recipe import Recipe
from intaglio.trainer.tasks.task import Losses, Task

TABLE = {"format": "image-folder", "folder": sys.argv[1], "batch_size": 1, "workers": 2, "examples": {"size": 8}}


class Mean(Task):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch, generator):
        return Losses((batch["pixel_values"].mean() - self.value).square(), {})


if __name__ == "__main__":
    table = {"steps": 1000000, "log_every": 1, "plot": False}
    recipe = Recipe.model_validate({"task": {}, "data": TABLE, "train": table})
    source = build_source(parse_settings(TABLE), seed=0)
    say = lambda row: print(*source._pool._executor._processes, flush=True)
    result = Trainer(Mean(), source, recipe, Path(sys.argv[2]), report=say).run()
    print(result.stopped, result.step, flush=True)
"""


def test_a_job_that_is_ended_as_a_whole_ends_with_a_checkpoint(corpora: Path, tmp_path: Path) -> None:
    """SIGTERM to all processes: the workers go on for the main process, which ends after its step."""
    process = _in_its_own_group(tmp_path, _TRAINING, corpora / "classes", tmp_path / "run")
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    pids = [int(pid) for pid in line.split()]
    os.killpg(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    stopped, step = stdout.splitlines()[-1].split()
    assert stopped == "SIGTERM"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{int(step):08}"]
    assert _gone(pids)


def test_closing_ends_the_processes(build: Callable[..., Loader], corpora: Path) -> None:
    source = _source(build, corpora, 1)
    next(iter(source))
    executor = source._pool._executor
    assert executor is not None
    pids = list(executor._processes)
    source.close()
    assert _gone(pids)
    assert len(list(source)) == 29
    source.close()
