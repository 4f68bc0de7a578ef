"""An ordered pool: work goes to worker processes, results come back in the order of the work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Generic, TypeVar

from intaglio.errors import DataError
from intaglio.trainer.data.making import Made, Maker
from intaglio.trainer.data.order import Draw

Note = TypeVar("Note")
# Pieces of work for each worker that are begun before their results are wanted.
_AHEAD = 3


class OrderedPool(Generic[Note]):
    """Runs ``maker`` in ``workers`` processes, or in this one where there are none.

    The processes are spawned, not forked: this process has threads. They start with the first work, are kept from
    epoch to epoch, and end when the pool is closed or collected, or when this process ends however it does.
    """

    def __init__(self, maker: Maker, workers: int) -> None:
        self._maker, self._workers = maker, workers
        self._executor: ProcessPoolExecutor | None = None

    def run(self, work: Iterable[tuple[int, Sequence[Draw], Note]]) -> Iterator[tuple[Made, Note]]:
        """The result of each piece of work (epoch, draws, a note), with its note, in order.

        A few pieces are taken ahead. Raises DataError for a record that cannot be used and a worker that died.
        """
        if not self._workers:
            for epoch, draws, note in work:
                yield self._maker(epoch, draws), note
            return
        executor = self._started()
        waiting: deque[tuple[Future[Made], Note]] = deque()
        try:
            for epoch, draws, note in work:
                with _signals_held():
                    future = executor.submit(_make, epoch, draws)
                waiting.append((future, note))
                if len(waiting) > self._workers * _AHEAD:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        except BrokenProcessPool as error:
            self._executor = None
            raise DataError(
                f"one of {self._workers} data workers died ({error}). It may have run out of memory: use fewer, or "
                "workers = 0 to see what happens"
            ) from error
        finally:
            for future, _ in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the processes; the next work starts others."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self._workers, _Context(), _start, (self._maker,))
            weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        return self._executor


class _Process(SpawnProcess):
    """A process that is ended by SIGKILL, since it never sees SIGTERM: the pool ends workers when one has died."""

    def terminate(self) -> None:
        self.kill()


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def _signals_held() -> Iterator[None]:
    """Workers that are started here never see SIGINT and SIGTERM, which reach all processes of a terminal or a job.

    Ending is this process's to decide, which still needs batches for its step. Ignoring them in the worker would be
    too late, while it imports. This process gets them at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(item: tuple[Future[Made], Note]) -> tuple[Made, Note]:
    future, note = item
    return future.result(), note


# --- In a worker ---------------------------------------------------------------------------------------------

_maker: Callable[[int, Sequence[Draw]], Made]


def _start(maker: Maker) -> None:
    global _maker
    _maker = maker
    # Each worker is one of several that share the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was spawned"
    parent.join()
    # A killed parent closes no queue, and the work would wait for ever.
    os._exit(1)


def _make(epoch: int, draws: Sequence[Draw]) -> Made:
    return _maker(epoch, draws)
