"""What a build for TensorRT for RTX needs: types that the GPUs have, memory that the machine has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from intaglio.engines.memory import free_bytes
from intaglio.errors import CompileError

# The first compute capability that has the type.
_SINCE = {
    ir.DataType.INT4: 80,
    ir.DataType.UINT4: 80,
    ir.DataType.BFLOAT16: 80,
    ir.DataType.FLOAT8E4M3FN: 89,
    ir.DataType.FLOAT4E2M1: 120,
}
_PORTABLE_SINCE = 80
# Of the building process, measured with 1.7.1: a byte of weights takes up to 2.7, one of them for a copy at the end; a
# node takes up to 0.24 MiB, and more for each further profile. The number of GPUs changes nothing. Where pages of the
# mapped file are not given back, a byte takes 3.1.
_PEAK, _PEAK_BASE, _PEAK_NODE = 2.7 if sys.platform == "linux" else 3.1, 300 << 20, 240 << 10
_PROFILE_NODE = 50 << 10
# What cannot be had back, at the least.
_OWN, _OWN_BASE, _OWN_NODE = 2.0, 100 << 20, 60 << 10


@dataclass(frozen=True)
class BuildSize:
    """What a build is of: bytes of weights, nodes, optimisation profiles."""

    weight_bytes: int
    nodes: int = 0
    profiles: int = 1

    @property
    def peak_bytes(self) -> int:
        """The largest resident set that the building process is expected to come to."""
        a_node = _PEAK_NODE + _PROFILE_NODE * (self.profiles - 1)
        return int(_PEAK * self.weight_bytes) + _PEAK_BASE + a_node * self.nodes

    @property
    def least_bytes(self) -> int:
        """What it takes at the least, without pages of files."""
        return int(_OWN * self.weight_bytes) + _OWN_BASE + _OWN_NODE * self.nodes

    def fraction(self, taken: int) -> float:
        """How far a build is that has ``taken`` so many bytes: weights come one by one, work on nodes more and more."""
        by_nodes = _PEAK_NODE * self.nodes
        total = self.weight_bytes + by_nodes
        part = min(max(taken / max(total, 1), 0.0), 1.0)
        bent = by_nodes / max(total, 1)
        return bent * part**2 + (1 - bent) * part


def check_capabilities(name: str, model: ir.Model, sm: Sequence[int]) -> list[str]:
    """Notes of the types that a lowered model holds. Raises CompileError for one that a capability in ``sm`` lacks."""
    notes = []
    for dtype, since in _SINCE.items():
        if dtype not in _dtypes(model):
            continue
        called = dtype.name.lower()
        if older := [each for each in sm if each < since]:
            raise CompileError(
                f"{name}: holds {called}, which compute capability {_listed(older, 10)} lacks; it begins at "
                f"{since / 10}. Leave {_listed(older)} out of --sm, or compile for another target, such as cpu"
            )
        if not sm and since > _PORTABLE_SINCE:
            notes.append(f"holds {called}: the portable engine runs from compute capability {since / 10} on")
    return notes


def check_memory(name: str, size: BuildSize) -> str:
    """What is said up front of the memory that a build takes. Raises CompileError where it cannot be had."""
    free = free_bytes()
    if free is not None and size.least_bytes > free:
        raise CompileError(
            f"{name}: building takes at least {_gib(size.least_bytes)} of memory, and {_gib(free)} are free, swap "
            "included. End other programs, or build where there is more: it needs no GPU, and the engine can be copied"
        )
    tight = f", and {_gib(free)} are free: it will be slow" if free is not None and size.peak_bytes > free else ""
    return f"{name}: building takes about {_gib(size.peak_bytes)} of memory{tight}"


def _dtypes(model: ir.Model) -> set[ir.DataType]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [output for node in model.graph.all_nodes() for output in node.outputs]
    return {value.dtype for value in values if value.dtype is not None}


def _listed(capabilities: Sequence[int], divisor: int = 1) -> str:
    return ", ".join(str(each / divisor if divisor > 1 else each) for each in capabilities)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
