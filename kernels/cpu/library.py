"""The compiled custom-op library: where it lies, and what it says of itself."""

from __future__ import annotations

import ctypes
import pathlib
from functools import cache

import intaglio.kernels.cpu as package
from intaglio.errors import EngineError

INSTRUCTION_SETS = ("portable", "neon", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx")
_NAMES = ("intaglio_cpu.so", "intaglio_cpu.dylib", "intaglio_cpu.dll")


def library_path() -> pathlib.Path:
    """The custom-op library, to give to ``SessionOptions.register_custom_ops_library``.

    Raises EngineError if it is not installed.
    """
    # An editable install redirects imports to the sources and leaves what was compiled in
    # site-packages: both are entries of the package's path.
    folders = [pathlib.Path(entry) for entry in package.__path__]
    for folder in folders:
        for name in _NAMES:
            if (folder / name).is_file():
                return folder / name
    raise EngineError(
        f"the CPU kernels are not installed: found none of {', '.join(_NAMES)} in "
        f"{', '.join(map(str, folders))}; install them with `pip install --force-reinstall intaglio`"
    )


@cache
def load_library() -> ctypes.CDLL:
    """The library as ctypes sees it. Raises EngineError if it is not installed or cannot be loaded."""
    path = library_path()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"{path}: cannot be loaded ({error}); install it again with `pip install`") from error


def instruction_set() -> str:
    """The name of the instruction set that the kernels use in this process: amx, avx512_vnni, portable, …

    The environment variable INTAGLIO_CPU_ISA chooses a lesser one. Raises EngineError if it names one that is missing.
    """
    name = ctypes.create_string_buffer(256)
    found = load_library().intaglio_instruction_set(name, ctypes.c_size_t(len(name)))
    if not found:
        raise EngineError(name.value.decode())
    return name.value.decode()


def instruction_sets() -> list[str]:
    """The names of those that the kernels may use on this machine, the best last."""
    return [name for name in INSTRUCTION_SETS if load_library().intaglio_has_instruction_set(name.encode())]


def has_fast_matmul(group_size: int, width: int) -> bool:
    """Whether the kernels have ``GroupedQuantMatMul`` in the accuracy ``fast`` for groups of this size in rows of this
    width, with codes of any number of bits.
    """
    return bool(load_library().intaglio_has_fast_matmul(*map(ctypes.c_int64, (group_size, width))))
