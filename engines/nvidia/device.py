"""One GPU: its memory, copies to and from it, and recorded work. All of CUDA that sessions call goes through here."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from intaglio.engines.nvidia.driver import call, open_driver
from intaglio.errors import EngineError, InputError

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# Kernels may read past what they were given, up to a whole vector, and nothing is of no size.
_ALIGNMENT = 256


class Device:
    """The first GPU that CUDA shows (CUDA_VISIBLE_DEVICES chooses), in its primary context, with a stream.

    ``used`` counts the bytes that engines and buffers of this process hold on it; the context itself, some hundred MiB,
    is not among them.
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
        self.used = 0

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
        """Counts what others allocated, or with a minus gave back."""
        self.used += nbytes

    def check_budget(self, nbytes: int, what: str, budget: int | None) -> None:
        """Raises InputError where ``nbytes`` more would be beyond the ``budget``."""
        if budget is not None and self.used + nbytes > budget:
            raise InputError(
                f"the memory budget is {_mib(budget)} MiB of the GPU, and {what} needs {_mib(nbytes)} MiB beside the "
                f"{_mib(self.used)} MiB that are held; allow {_mib(self.used + nbytes)} MiB, or make smaller sizes"
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
                f"the GPU ({self.name}) has not enough memory: {what} needs {_mib(size)} MiB, and {_mib(free)} of "
                f"{_mib(total)} MiB are free. Make smaller sizes, close other programs, or give a memory budget"
            )
        if int(code) != 0:
            raise EngineError(f"CUDA's cuMemAlloc failed with {int(code)}")
        self.used += size
        return Memory(self, int(address), size)

    def free(self, address: int, size: int) -> None:
        """Gives memory back, once the work before has been done."""
        try:
            self.make_current()
            self._call("cuMemFree", address)
        except EngineError as error:  # at the end of the process the driver may have gone first
            _log.debug("%s", error)
        self.used -= size

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
        self._call("cuStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # Whatever came of it: a stream that goes on recording would be of no use.
            self._driver.cuStreamEndCapture(self.stream)
            raise
        graph = self._call("cuStreamEndCapture", self.stream)
        try:
            executable = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        return Recording(self, executable)

    def launch(self, executable: Any) -> None:
        """Runs what was recorded."""
        self._call("cuGraphLaunch", executable, self.stream)

    def destroy(self, executable: Any) -> None:
        """Lets a recording go."""
        try:
            self.make_current()
            self._call("cuGraphExecDestroy", executable)
        except EngineError as error:
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


def _mib(size: int) -> int:
    return -(-size >> 20)
