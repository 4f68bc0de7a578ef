"""Ctrl-C reaches a native call: it is told to stop and waited for, and the interrupt goes on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intaglio.engines import interruptible
from intaglio.engines.engine import open_engine
from intaglio.engines.interruptible import call_interruptibly


@pytest.fixture
def soon() -> Iterator[None]:
    """Ctrl-C in a moment, while the main thread waits."""
    # pytest's own handler is the default one; a shell may have started it with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    yield
    timer.cancel()
    signal.signal(signal.SIGINT, before)


def test_the_call_is_stopped_and_waited_for(soon: None) -> None:
    stop, events = threading.Event(), []

    def call() -> None:
        assert stop.wait(30)
        time.sleep(0.1)
        events.append("call ended")

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(call, stop.set)
    assert events == ["call ended"]


def test_an_interrupt_while_the_call_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stop = threading.Event(), threading.Event()
    pool = ThreadPoolExecutor(1)

    class Interrupted:
        def __init__(self, runs: bool) -> None:
            self.runs = runs

        def submit(self, *arguments: Any) -> None:
            if self.runs:
                pool.submit(*arguments)
                assert begun.wait(30)
            raise KeyboardInterrupt

    def call() -> None:
        begun.set()
        assert stop.wait(30)
        ended.append(True)

    ended: list[bool] = []
    monkeypatch.setattr(interruptible, "_worker", lambda: Interrupted(True))
    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(call, stop.set)
    assert ended == [True]
    # Before it was handed over there is nothing to stop, nor to wait for.
    monkeypatch.setattr(interruptible, "_worker", lambda: Interrupted(False))
    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(call, lambda: pytest.fail("nothing runs"))


def test_results_and_errors_go_through() -> None:
    def fail() -> None:
        raise ValueError("of its own")

    assert call_interruptibly(lambda: 7, fail) == 7
    with pytest.raises(ValueError, match="of its own"):
        call_interruptibly(fail, lambda: pytest.fail("nothing is left to stop"))


def test_other_threads_make_the_call_themselves() -> None:
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.append(call_interruptibly(threading.current_thread, lambda: None)))
    thread.start()
    thread.join()
    assert found == [thread]
    assert call_interruptibly(threading.current_thread, lambda: None) is not threading.main_thread()


def test_a_session_ends_its_run(klein: Path, soon: None) -> None:
    session = open_engine(klein).load("text_encoder")
    seen = []

    class Endless:
        def run_with_ort_values(self, names: list[str], values: Any, options: Any) -> None:
            for _ in range(3000):
                if options.terminate:
                    seen.append(names)
                    raise RuntimeError("terminated, as onnxruntime says it")
                time.sleep(0.01)

    session._session = Endless()
    tokens = np.ones((1, 4), np.int64)
    with pytest.raises(KeyboardInterrupt):
        session.run({"input_ids": tokens, "attention_mask": tokens}, ["prompt_embeds"])
    assert seen == [["prompt_embeds"]]


def test_onnxruntime_heeds_the_flag(klein: Path) -> None:
    session = open_engine(klein).load("text_encoder")
    options = session._ort.RunOptions()
    options.log_severity_level = 4
    options.terminate = True
    tokens = session._ort.OrtValue.ortvalue_from_numpy(np.ones((1, 4), np.int64))
    with pytest.raises(Exception, match="terminate"):
        session._session.run_with_ort_values(
            ["prompt_embeds"], {"input_ids": tokens, "attention_mask": tokens}, options
        )
