"""What a build for TensorRT for RTX needs: types that the GPUs have, memory that the machine has."""

from __future__ import annotations

from collections.abc import Sequence

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
# Of the building process, measured with 1.7.1 from 0.1 to 0.8 GB of weights in float32, float16, int8 and int4: what it
# comes to a byte of weights, half of it pages of files, and what is its own and cannot be had back.
_PEAK, _PEAK_BASE = 3.1, 300 << 20
_OWN, _OWN_BASE = 2.0, 100 << 20


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


def check_memory(name: str, weight_bytes: int) -> str:
    """What is said up front of the memory that a build takes. Raises CompileError where it cannot be had."""
    peak, own, free = peak_bytes(weight_bytes), int(_OWN * weight_bytes) + _OWN_BASE, free_bytes()
    if free is not None and own > free:
        raise CompileError(
            f"{name}: building takes at least {_gib(own)} of memory, and {_gib(free)} are free, swap included. End "
            "other programs, or build on a machine with more: it needs no GPU, and the engine can be copied"
        )
    tight = f", and {_gib(free)} are free: it will be slow" if free is not None and peak > free else ""
    return f"{name}: building takes about {_gib(peak)} of memory{tight}"


def peak_bytes(weight_bytes: int) -> int:
    """The largest resident set that a build of so many bytes of weights is expected to come to."""
    return int(_PEAK * weight_bytes) + _PEAK_BASE


def _dtypes(model: ir.Model) -> set[ir.DataType]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [output for node in model.graph.all_nodes() for output in node.outputs]
    return {value.dtype for value in values if value.dtype is not None}


def _listed(capabilities: Sequence[int], divisor: int = 1) -> str:
    return ", ".join(str(each / divisor if divisor > 1 else each) for each in capabilities)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
