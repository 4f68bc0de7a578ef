"""Kernels as TensorRT embeds them in an engine: PTX that every GPU since Ampere compiles, one kernel a plugin.

TensorRT passes the inputs, then int32 numbers, then the outputs. Triton appends two pointers to scratch memory, which
nothing passes: they are taken off, after a check that the kernel reads neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from intaglio.errors import CompileError
from intaglio.kernels.cuda.ahead_of_time import PORTABLE_SHARED_BYTES, PORTABLE_SM, Variant, compile_kernel

# PTX 8.0, of CUDA 12.0: Triton's own choice would ask for the newest drivers.
PTX_VERSION = 80
# What Triton appends: pointers to global and to profiling memory.
_SCRATCH = 2
_ENTRY = re.compile(r"(\.visible \.entry (?P<name>\w+)\()(?P<parameters>[^)]*?)(\s*\))")
_PARAMETER = re.compile(r"\.param [^,]*?(?P<name>\w+)\s*(?:,|$)")


@dataclass(frozen=True)
class PluginKernel:
    """``ptx`` of one kernel, launched with ``threads`` threads and ``shared_bytes`` of shared memory a block."""

    name: str
    ptx: str
    threads: int
    shared_bytes: int


def plugin_kernel(variant: Variant) -> PluginKernel:
    """Compiles a kernel for a plugin, and keeps it: layers of one shape share it.

    Raises CompileError for one that asks for more shared memory than TensorRT launches it with.
    """
    key = (
        variant.kernel.__name__,
        tuple(sorted(variant.types.items())),
        tuple(sorted(variant.constants.items())),
        tuple(sorted(variant.aligned)),
        variant.warps,
        variant.stages,
    )
    if key not in _COMPILED:
        _COMPILED[key] = _compile(variant)
    return _COMPILED[key]


_COMPILED: dict[tuple[object, ...], PluginKernel] = {}


def _compile(variant: Variant) -> PluginKernel:
    made = compile_kernel(variant, PORTABLE_SM, ptx_version=PTX_VERSION)
    if made.shared_bytes > PORTABLE_SHARED_BYTES:
        raise CompileError(
            f"{made.name}: asks for {made.shared_bytes} bytes of shared memory a block, but a plugin gets at most "
            f"{PORTABLE_SHARED_BYTES}; take smaller tiles or fewer stages"
        )
    arguments = sum(name not in variant.constants for name in variant.kernel.arg_names)
    return PluginKernel(made.name, without_scratch(made.ptx, arguments), made.warps * 32, made.shared_bytes)


def without_scratch(ptx: str, arguments: int) -> str:
    """``ptx`` of one kernel with its first ``arguments`` parameters alone.

    Raises CompileError where it does not have just two more, or reads them.
    """
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1:
        raise CompileError(f"PTX with {len(entries)} kernels, expected one")
    entry = entries[0]
    parameters = list(_PARAMETER.finditer(entry["parameters"]))
    if len(parameters) != arguments + _SCRATCH:
        raise CompileError(
            f"{entry['name']}: has {len(parameters)} parameters, expected {arguments} and two to scratch memory; this "
            "version of Triton passes others than the plugins know"
        )
    kept, taken = parameters[:arguments], parameters[arguments:]
    body = ptx[entry.end() :]
    if read := [each["name"] for each in taken if re.search(rf"\b{each['name']}\b", body)]:
        raise CompileError(
            f"{entry['name']}: reads {read[0]}, a pointer to scratch memory, which a plugin is not given"
        )
    listed = ",".join(f"\n\t{each[0].rstrip(',').strip()}" for each in kept)
    return f"{ptx[: entry.start()]}{entry[1]}{listed}\n){body}"
