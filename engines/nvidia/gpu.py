"""The NVIDIA GPU of this machine, as its driver tells: no package of CUDA's is needed for that."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from intaglio.engines.nvidia.driver import LIBRARY as _DRIVER
from intaglio.errors import EngineError

# Of CUdevice_attribute.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """``capability`` is 86 for 8.6, ``driver`` the newest version of CUDA that the driver runs, as 13.0."""

    name: str
    capability: int
    memory_bytes: int
    driver: str


def find_gpu() -> Gpu:
    """The first GPU. Raises EngineError saying what was looked for and what would do."""
    try:
        cuda = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise _absent(f"the driver's library {_DRIVER} cannot be loaded ({error})") from error
    count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise _absent("its driver is there and lists none")
    _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(name.value.decode(errors="replace"), 10 * numbers[0] + numbers[1], memory.value, driver)


def _call(cuda: Any, function: str, *arguments: Any) -> None:
    code = getattr(cuda, function)(*arguments)
    if code:
        raise _absent(f"{function} of {_DRIVER} gives the error {code}")


def _absent(why: str) -> EngineError:
    return EngineError(
        f"no NVIDIA GPU was found: {why}. Engines of the target tensorrt are built and run where the GPU is; "
        "tensorrt-rtx builds on any machine, and cpu runs on any"
    )
