"""NVIDIA's driver and its bindings, which are an extra; why there is no GPU where there is none."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

from intaglio.errors import EngineError, RuntimeMissingError

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_DEVICES = Path("/dev")
_WHAT_WOULD_DO = (
    "Install NVIDIA's driver, give a container its GPUs (docker run --gpus all), or look whether CUDA_VISIBLE_DEVICES "
    "hides them. `intaglio compile` and `intaglio parity` need none, and the target cpu runs everywhere"
)


def import_driver() -> Any:
    """``cuda.bindings.driver``. Raises RuntimeMissingError saying how to install it."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeMissingError(
            f"cuda-bindings cannot be imported ({error}). Install it with pip install cuda-bindings, or intaglio with "
            "its extra `tensorrt-rtx`: from a checkout, pip install '.[tensorrt-rtx]'"
        ) from error


def open_driver() -> Any:
    """The driver's bindings, ready. Raises EngineError that says what was looked for, RuntimeMissingError."""
    check_gpu()
    driver = import_driver()
    call(driver, "cuInit", 0)
    return driver


def check_gpu() -> None:
    """Raises EngineError where there is no GPU that CUDA shows, which says what was looked for. Needs no bindings."""
    none = "there is no NVIDIA GPU to run on"
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise EngineError(
            f"{none}: the driver's library {LIBRARY} cannot be loaded ({error}), and {device_files()}. {_WHAT_WOULD_DO}"
        ) from error
    code = library.cuInit(0)
    if code != 0:
        name = ctypes.c_char_p()
        known = library.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value is not None
        said = name.value.decode() if known and name.value else "unknown"
        raise EngineError(
            f"{none}: {LIBRARY} is there, but its cuInit gives {code} ({said}), and {device_files()}. {_WHAT_WOULD_DO}"
        )
    count = ctypes.c_int()
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value < 1:
        raise EngineError(f"{none}: the driver counts {count.value}, and {device_files()}. {_WHAT_WOULD_DO}")


def device_files() -> str:
    """What the system has of device files, in words."""
    if sys.platform == "win32":
        return "device files are not looked for on Windows"
    found = sorted(file.name for file in _DEVICES.glob("nvidia*"))
    return (
        f"of device files there are /dev/{', /dev/'.join(found)}" if found else "there is no device file /dev/nvidia*"
    )


def call(driver: Any, function: str, *arguments: Any) -> Any:
    """What a function of the driver gives besides its code. Raises EngineError naming function and code."""
    code, *results = getattr(driver, function)(*arguments)
    check(driver, function, code)
    return results[0] if len(results) == 1 else tuple(results) or None


def check(driver: Any, function: str, code: Any) -> None:
    """Raises EngineError naming function and code, where that is one of an error."""
    if int(code) != 0:
        raise EngineError(f"CUDA's {function} failed with {int(code)} ({error_name(driver, code)})")


def error_name(driver: Any, code: Any) -> str:
    """What the driver calls one of its codes."""
    try:
        failed, name = driver.cuGetErrorName(code)
    except Exception:  # of a driver that cannot be loaded
        return getattr(code, "name", "unknown")
    return name.decode() if int(failed) == 0 and name else getattr(code, "name", "unknown")
