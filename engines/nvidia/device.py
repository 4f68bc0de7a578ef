"""One GPU: its memory, copies to and from it, and recorded work. All of CUDA that sessions call goes through here."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np

from intaglio.engines.nvidia.driver import call, check, error_name, open_driver
from intaglio.errors import EngineError, InputError

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# Kernels may read past what they were given, up to a whole vector, and nothing is of no size.
_ALIGNMENT = 256


class Device:
    """The first GPU that CUDA shows (CUDA_VISIBLE_DEVICES chooses), in its primary context, with a stream.

    ``used`` counts the bytes that engines and buffers of this process hold on it; the context itself, some hundred MiB,
    is not among them. ``lock`` is held by whoever works: there is one stream, and all that is put on it while it
    records is recorded.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        handle = self._call("cuDeviceGet", 0)
        name: bytes = self._call("cuDeviceGetName", 256, handle)
        attributes = driver.CUdevice_attribute
        major, minor = (
            self._call(
                "cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), handle
            )
            for part in ("MAJOR", "MINOR")
        )
        self.name, self.capability = name.split(b"\0")[0].decode(), 10 * major + minor
        self._context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxSetCurrent", self._context)
        self.stream = int(self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.used, self.lock = 0, threading.RLock()
        # Finalizers count as well, in whichever thread they run.
        self._counting = threading.RLock()
        # The thread that records, which may not free memory meanwhile, and what a collection of garbage would have.
        self._recorder: int | None = None
        self._postponed: list[Callable[[], None]] = []

    def _call(self, function: str, *arguments: Any) -> Any:
        return call(self._driver, function, *arguments)

    def make_current(self) -> None:
        """Must come before other calls in a thread: contexts are a thread's own."""
        self._call("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> tuple[int, int]:
        """What is free on the GPU, and all of it."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def count(self, nbytes: int) -> None:
        """Counts what was allocated, or with a minus given back."""
        with self._counting:
            self.used += nbytes

    def check_budget(self, nbytes: int, what: str, budget: int | None) -> None:
        """Raises InputError where ``nbytes`` more would be beyond the ``budget``."""
        if budget is not None and self.used + nbytes > budget:
            raise InputError(
                f"the memory budget is {mib(budget)} MiB of the GPU, and {what} needs {mib(nbytes)} MiB beside the "
                f"{mib(self.used)} MiB that are held; allow {mib(self.used + nbytes)} MiB, or make smaller sizes"
            )

    def allocate(self, nbytes: int, what: str, budget: int | None = None) -> Memory:
        """Memory on the GPU, not set to anything.

        Raises InputError beyond the ``budget``, EngineError where the GPU is full.
        """
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self.check_budget(size, what, budget)
        code, address = self._driver.cuMemAlloc(size)
        if int(code) == _OUT_OF_MEMORY:
            free, total = self.free_bytes()
            raise EngineError(
                f"the GPU ({self.name}) has not enough memory: {what} needs {mib(size)} MiB, and {mib(free)} of "
                f"{mib(total)} MiB are free. Make smaller sizes, close other programs, or give a memory budget"
            )
        if int(code) != 0:
            raise EngineError(
                f"CUDA's cuMemAlloc failed with {int(code)} ({error_name(self._driver, code)}) for {what}, {size} bytes"
            )
        self.count(size)
        return Memory(self, int(address), size)

    def free(self, address: int, size: int) -> None:
        """Gives memory back, once the work before has been done."""

        def give_back() -> None:
            self._call("cuMemFree", address)
            self.count(-size)

        self._outside_recordings(give_back)

    def write(self, address: int, array: np.ndarray) -> None:
        """Copies a contiguous array to the GPU; it may be changed after."""
        if array.nbytes:
            self._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self.stream)
            # Memory that the system may page out is staged before the call returns, but not everywhere.
            self.wait()

    def read(self, address: int, array: np.ndarray) -> None:
        """Copies from the GPU into a contiguous array, after the work before."""
        if array.nbytes:
            self._call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self.stream)
        self.wait()

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copies on the GPU, after the work before."""
        if nbytes:
            self._call("cuMemcpyDtoDAsync", target, source, nbytes, self.stream)

    def clear(self, address: int, nbytes: int) -> None:
        """Sets bytes to zero, after the work before."""
        if nbytes:
            self._call("cuMemsetD8Async", address, 0, nbytes, self.stream)

    def wait(self) -> None:
        """Until all work is done. Raises EngineError if it failed."""
        self._call("cuStreamSynchronize", self.stream)

    def record(self, work: Callable[[], None]) -> Recording:
        """Records what ``work`` puts on the stream, which does not run yet. Raises EngineError if it cannot be."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with ExitStack() as after:
            after.callback(self._give_back_postponed)
            # Before it begins, since garbage may be collected at any time.
            self._recorder = threading.get_ident()
            self._call("cuStreamBeginCapture", self.stream, mode)
            try:
                work()
            finally:
                # Whatever came of it: a stream that goes on recording would be of no use.
                code, graph = self._driver.cuStreamEndCapture(self.stream)
                if int(code) == 0:
                    after.callback(self._call, "cuGraphDestroy", graph)
            check(self._driver, "cuStreamEndCapture", code)
            return Recording(self, self._call("cuGraphInstantiate", graph, 0))

    def _give_back_postponed(self) -> None:
        self._recorder = None
        postponed, self._postponed = self._postponed, []
        for end in postponed:
            self._outside_recordings(end)

    def launch(self, executable: Any) -> None:
        """Runs what was recorded."""
        self._call("cuGraphLaunch", executable, self.stream)

    def destroy(self, executable: Any) -> None:
        """Lets a recording go."""
        self._outside_recordings(lambda: self._call("cuGraphExecDestroy", executable))

    def _outside_recordings(self, end: Callable[[], None]) -> None:
        """Calls ``end`` now, or once what this thread records has been recorded."""
        if self._recorder == threading.get_ident():
            self._postponed.append(end)
            return
        try:
            self.make_current()
            end()
        except EngineError as error:  # at the end of the process the driver may have gone first
            _log.debug("%s", error)


class Memory:
    """Bytes on the GPU, which are given back with the object."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self._free = weakref.finalize(self, device.free, address, nbytes)

    def free(self) -> None:
        """Gives it back now."""
        self._free()


class Recording:
    """Work of a stream (a CUDA graph), which costs one call to run again."""

    def __init__(self, device: Device, executable: Any) -> None:
        self._device, self._executable = device, executable
        self._end = weakref.finalize(self, device.destroy, executable)

    def run(self) -> None:
        """Puts it on the stream."""
        self._device.launch(self._executable)


class DeviceArray:
    """An array that stays on the GPU: what a run gives that is ``resident``, for the next run to take.

    ``dtype`` is what the stage says, ``stored`` what the engine has.
    """

    def __init__(self, device: Device, memory: Memory, shape: tuple[int, ...], dtype: str, stored: np.dtype) -> None:
        self._device, self.memory, self.shape, self.dtype, self.stored = device, memory, shape, dtype, stored

    def numpy(self) -> np.ndarray:
        """A copy of it as NumPy has it. Raises EngineError."""
        array = np.empty(self.shape, self.stored)
        # Another thread may record, and would record this.
        with self._device.lock:
            self._device.make_current()
            self._device.read(self.memory.address, array)
        return array.astype(self.dtype, copy=False)


@cache
def open_device() -> Device:
    """The GPU. Raises EngineError that says what was looked for where there is none, RuntimeMissingError."""
    device = Device(open_driver())
    _OPENED.append(device)
    return device


_OPENED: list[Device] = []


def used_bytes() -> int:
    """What engines and buffers of this process hold on the GPU; 0 where none was opened."""
    return sum(device.used for device in _OPENED)


def mib(size: int) -> int:
    """Bytes in MiB, rounded up."""
    return -(-size >> 20)
