"""Stands in for CUDA's driver, over NumPy memory: what ``gpu_stand_in`` runs on.

Work on the stream is done when it is waited for, so that what does not wait finds nothing; memory is filled with what
is no number, so that what nobody wrote is seen.
"""

from __future__ import annotations

import ctypes
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

POISON = 0xFF
_OUT_OF_MEMORY, _INVALID = 2, 1
Work = Callable[[], None]


class Code(int):
    """A result code."""


_DRIVERS: list[weakref.ref[Driver]] = []


def check_nothing_is_left() -> Iterator[None]:
    """The body of a fixture: after a test, no driver holds memory, graphs or a recording that was begun."""
    yield
    gc.collect()
    for driver in filter(None, (each() for each in _DRIVERS)):
        assert (driver.memory, driver.graphs, driver.recorded) == ({}, {}, None)


@dataclass(eq=False)
class Driver:
    """``cuda.bindings.driver`` of one GPU of ``total`` bytes. What it was asked for is counted."""

    capability: tuple[int, int] = (8, 6)
    total: int = 8 << 30
    init_code: int = 0
    count: int = 1
    memory: dict[int, np.ndarray] = field(default_factory=dict)
    queue: list[Work] = field(default_factory=list)
    recorded: list[Work] | None = None
    graphs: dict[int, list[Work]] = field(default_factory=dict)
    launches: int = 0
    recordings: int = 0
    destroyed: int = 0
    most_bytes: int = 0
    fails_to_record: bool = False
    # Raised by the next wait, as Ctrl-C is.
    interrupt: type[BaseException] | None = None
    _next: int = 0x7F0000000000

    def __post_init__(self) -> None:
        _DRIVERS.append(weakref.ref(self))

    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    @property
    def used(self) -> int:
        return sum(map(len, self.memory.values()))

    def at(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes there, which must be of one allocation that has not been given back."""
        for start, content in self.memory.items():
            if start <= address and address + nbytes <= start + len(content):
                return content[address - start : address - start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are no memory of the GPU")

    def put(self, work: Work) -> tuple[Code]:
        (self.queue if self.recorded is None else self.recorded).append(work)
        return (Code(0),)

    def cuInit(self, flags: int) -> tuple[Code]:
        return (Code(self.init_code),)

    def cuGetErrorName(self, code: int) -> tuple[Code, bytes]:
        return Code(0), {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE"}.get(int(code), b"CUDA_ERROR")

    def cuDeviceGetCount(self) -> tuple[Code, int]:
        return Code(0), self.count

    def cuDeviceGet(self, ordinal: int) -> tuple[Code, int]:
        return Code(0), ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Code, bytes]:
        return Code(0), b"Stand-in GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Code, int]:
        return Code(0), self.capability[attribute - 75]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Code, str]:
        return Code(0), "context"

    def cuCtxSetCurrent(self, context: str) -> tuple[Code]:
        return (Code(0 if context == "context" else _INVALID),)

    def cuStreamCreate(self, flags: int) -> tuple[Code, int]:
        return Code(0), 7

    def cuStreamSynchronize(self, stream: int) -> tuple[Code]:
        assert stream == 7 and self.recorded is None, "a stream that records cannot be waited for"
        if self.interrupt is not None:
            raised, self.interrupt = self.interrupt, None
            raise raised
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        return (Code(0),)

    def cuMemGetInfo(self) -> tuple[Code, int, int]:
        return Code(0), self.total - self.used, self.total

    def cuMemAlloc(self, nbytes: int) -> tuple[Code, int]:
        assert self.recorded is None, "no memory while the stream records"
        if self.used + nbytes > self.total:
            return Code(_OUT_OF_MEMORY), 0
        address, self._next = self._next, self._next + nbytes + 4096
        self.memory[address] = np.full(nbytes, POISON, np.uint8)
        self.most_bytes = max(self.most_bytes, self.used)
        return Code(0), address

    def cuMemFree(self, address: int) -> tuple[Code]:
        if self.recorded is not None:
            return (Code(900),)
        # As the real one, it waits for what may use the memory.
        self.cuStreamSynchronize(7)
        del self.memory[int(address)]
        return (Code(0),)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Code]:
        return self.put(lambda: _copy(self.at(target, nbytes), host_bytes(source, nbytes)))

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Code]:
        return self.put(lambda: _copy(host_bytes(target, nbytes), self.at(source, nbytes)))

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Code]:
        return self.put(lambda: _copy(self.at(target, nbytes), self.at(source, nbytes)))

    def cuMemsetD8Async(self, target: int, value: int, count: int, stream: int) -> tuple[Code]:
        return self.put(lambda: self.at(target, count).fill(value))

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Code]:
        self.recorded = []
        return (Code(0),)

    def cuStreamEndCapture(self, stream: int) -> tuple[Code, list[Work] | None]:
        recorded, self.recorded = self.recorded, None
        return (Code(901), None) if self.fails_to_record else (Code(0), recorded)

    def cuGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Code, int]:
        self.recordings += 1
        self.graphs[self.recordings] = graph
        return Code(0), self.recordings

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Code]:
        self.launches += 1
        self.queue.extend(self.graphs[graph])
        return (Code(0),)

    def cuGraphDestroy(self, graph: list[Work]) -> tuple[Code]:
        self.destroyed += 1
        return (Code(0),)

    def cuGraphExecDestroy(self, graph: int) -> tuple[Code]:
        del self.graphs[graph]
        return (Code(0),)


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """Those at an address of the machine's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    target[...] = source
