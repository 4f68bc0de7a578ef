"""Compiling a Triton kernel to PTX and machine code on a machine that needs no GPU and no driver."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intaglio.errors import CompileError, RuntimeMissingError

# What the kernels are compiled for. Code for 90 and above runs on that architecture only.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# PTX of it runs on all that are newer; that of 90 and above only on its own architecture.
PORTABLE_SM = 80
# What a launcher may ask for without opting in to more.
PORTABLE_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one architecture, ``sm`` 80, 86 or so: ``ptx`` is text, ``cubin`` machine code for exactly this one.

    ``registers`` are of a thread, ``stack_bytes`` what a thread keeps in memory for want of them (0: no spills), and
    ``shared_bytes`` what a block of ``warps`` warps asks for. ``tensor_ops`` counts its matrix instructions.
    """

    name: str
    sm: int
    ptx: str
    cubin: bytes
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_ops: int


@dataclass(frozen=True)
class Variant:
    """A kernel of this package with all that its compiler must know.

    ``types`` gives each argument's (``*fp16``, ``i32``, …), ``constants`` the values of those that are constexpr, and
    ``aligned`` names those that will be multiples of 16 (pointers: of 16 bytes).
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    aligned: frozenset[str] = frozenset()


def require_triton() -> None:
    """Raises RuntimeMissingError where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise RuntimeMissingError(
            "Triton is not installed, which the CUDA kernels are written in; install it with "
            "`pip install 'intaglio[triton]'`"
        )


def compile_kernel(variant: Variant, sm: int, ptx_version: int | None = None) -> CompiledKernel:
    """Compiles for one architecture, 80 for compute capability 8.0; ``ptx_version`` is that of its PTX, 80 for 8.0.

    Raises RuntimeMissingError without Triton, and CompileError where it runs as an interpreter or refuses the kernel.
    """
    require_triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile  # noqa: A004
    from triton.runtime.jit import JITFunction

    kernel = variant.kernel
    if not isinstance(kernel, JITFunction):
        raise CompileError(
            "Triton interprets its kernels here, as TRITON_INTERPRET=1 says, and cannot compile them; "
            "unset it before Python starts"
        )
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in variant.constants else variant.types[name] for name in names}
    values = {(names.index(name),): value for name, value in variant.constants.items()}
    hints: Any = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    options: dict[str, Any] = {"num_warps": variant.warps, "num_stages": variant.stages}
    if ptx_version is not None:
        options["ptx_version"] = ptx_version
    try:
        compiled = compile(ASTSource(kernel, signature, values, hints), GPUTarget("cuda", sm, 32), options)
    except Exception as error:
        raise CompileError(f"{kernel.__name__} for sm_{sm}: Triton cannot compile it: {error}") from error
    return CompiledKernel(
        name=compiled.metadata.name,
        sm=sm,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        warps=variant.warps,
        shared_bytes=compiled.metadata.shared,
        **_resources(compiled.asm["cubin"]),
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack of the one kernel of a cubin, and its matrix instructions, as Triton's copies of NVIDIA's
    tools tell them.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "-res-usage", file.name])
        code = _output([str(tools / "nvdisasm"), "-c", file.name])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise CompileError(f"cuobjdump names no registers of a kernel that was just compiled: {usage!r}")
    tensor_ops = len(re.findall(r"\s(?:HMMA|IMMA|HGMMA|IGMMA|QGMMA|UTCHMMA|UTCIMMA|UTCQMMA)[. ]", code))
    return {"registers": int(found[1]), "stack_bytes": int(found[2]), "tensor_ops": tensor_ops}


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
