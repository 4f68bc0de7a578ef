"""What TensorRT says while it builds and runs, handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_logger(trt: Any, on_error: Callable[[str], object], on_message: Callable[[str], object] | None = None) -> Any:
    """A logger of TensorRT's that hands errors, each in one line, to ``on_error`` and all that it says to
    ``on_message``.
    """

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                on_error(" ".join(message.split()))
            if on_message is not None:
                on_message(message)

    return Logger()
