"""Compiles what the launchers of `trainer/ops` would launch, for a GPU that is not there.

Triton's own path from a call to machine code is taken, with its specializations (sizes of 1 are constants, multiples
of 16 are told); the driver is one that knows an architecture and launches nothing. Tensors are torch's, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compiled:
    """Bytes of shared memory of each kernel that was compiled, by name."""

    shared_bytes: dict[str, list[int]] = field(default_factory=dict)


class _Driver:
    """What Triton asks of a driver before a launch."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(sm: int, work: Callable[[], Any], shared_limit: int) -> Compiled:
    """Calls ``work``, whose launches compile for ``sm`` and do no more.

    Raises AssertionError for a kernel that asks for more than ``shared_limit`` bytes of shared memory, and whatever
    the compiler raises.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found = Compiled()
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        assert kernel.metadata.shared <= shared_limit, f"{kernel.metadata.name}: {kernel.metadata.shared} bytes shared"
        found.shared_bytes.setdefault(kernel.metadata.name, []).append(kernel.metadata.shared)
        return kernel

    from intaglio.trainer.ops import attention, ternary
    from intaglio.trainer.ops import launch as launching

    def architecture(device: Any) -> tuple[int, int]:
        return sm, 132

    modules = (attention, ternary, launching)
    before = [module.architecture for module in modules]
    before_driver = driver._active
    driver.set_active(_Driver(sm))
    JITFunction.run = run
    for module in modules:
        module.architecture = architecture
    try:
        work()
    finally:
        JITFunction.run = launch
        driver._active = before_driver
        for module, function in zip(modules, before, strict=True):
            module.architecture = function
    return found
