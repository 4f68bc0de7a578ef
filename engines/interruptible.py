"""Native calls that Ctrl-C can stop.

Python handles a signal only between its own instructions, and only in the main thread: a native call there that takes a
minute would make Ctrl-C wait as long. So the main thread has another one make the call and waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

_Result = TypeVar("_Result")
# A waiting thread wakes up for a signal only if that was delivered to it, and on Windows not at all.
_POLL_SECONDS = 0.1


@cache
def _worker() -> ThreadPoolExecutor:
    # One is enough: only the main thread hands work over.
    return ThreadPoolExecutor(1, "intaglio-run")


def call_interruptibly(call: Callable[[], _Result], stop: Callable[[], object]) -> _Result:
    """What ``call()`` returns or raises.

    If an exception reaches the waiting main thread meanwhile (KeyboardInterrupt, or what a signal handler raises),
    ``stop`` is told, the call is waited for, and the exception goes on. Other threads make the call themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    # Its own, made before anything runs: an interrupt may come before a pool's `submit` has returned.
    future: Future[_Result] = Future()
    try:
        _worker().submit(_fulfil, future, call)
        while not future.done():
            wait([future], _POLL_SECONDS)
        return future.result()
    except BaseException:
        if not future.cancel() and not future.done():
            stop()
            wait([future])
        raise


def _fulfil(future: Future[_Result], call: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
