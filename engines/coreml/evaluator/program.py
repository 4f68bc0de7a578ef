"""A Core ML program as plain data: functions, their inputs, outputs and states, blocks, operations, constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# How values of MIL's data types are held. Those of less than a byte take one byte each.
NUMPY_TYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "FLOAT16": np.float16,
    "FLOAT32": np.float32,
    "FLOAT64": np.float64,
    "INT4": np.int8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT1": np.uint8,
    "UINT2": np.uint8,
    "UINT3": np.uint8,
    "UINT4": np.uint8,
    "UINT6": np.uint8,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "STRING": np.str_,
}


@dataclass(frozen=True)
class TensorType:
    """``dtype`` is the name of MIL's data type; an unknown dim is None, an unknown rank a ``shape`` of None."""

    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class StateType:
    """The type of a state: a buffer that outlives the run."""

    tensor: TensorType


@dataclass(frozen=True)
class ListType:
    """The type of a list of tensors."""

    element: TensorType


ValueType = TensorType | StateType | ListType


@dataclass(frozen=True)
class Value:
    """A named value of the program."""

    name: str
    type: ValueType


@dataclass(frozen=True)
class Constant:
    """A constant: its value (an array, a string, or a list of them), or where its blob lies in the weight file."""

    type: ValueType
    value: Any = None
    file: Path | None = None
    offset: int = 0


@dataclass(frozen=True)
class Reference:
    """An argument that is the value of this name."""

    name: str


Binding = Constant | Reference


@dataclass(frozen=True)
class Operation:
    """One operation. The attributes of ``const`` and of iOS 16's ``constexpr`` ops are among its arguments."""

    type: str
    name: str
    arguments: Mapping[str, tuple[Binding, ...]]
    outputs: tuple[Value, ...]
    blocks: tuple[Block, ...] = ()

    def references(self) -> Iterator[str]:
        """Names of all values that it needs, those of its blocks included."""
        for bindings in self.arguments.values():
            yield from (binding.name for binding in bindings if isinstance(binding, Reference))
        for block in self.blocks:
            yield from block.references()


@dataclass(frozen=True)
class Block:
    """Operations in order; ``outputs`` are names of values."""

    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    def references(self) -> Iterator[str]:
        """Names of all values that its operations need or that it gives."""
        for operation in self.operations:
            yield from operation.references()
        yield from self.outputs

    def all_operations(self) -> Iterator[Operation]:
        """Its operations and those of nested blocks."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from block.all_operations()


@dataclass(frozen=True)
class Feature:
    """An input, output or state as the model describes it.

    ``shape`` is the default; ``ranges`` has the least and the greatest size of each dim (None: no limit) where they may
    vary, ``enumerated`` the allowed shapes. ``default`` fills an optional input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int | None], ...] | None = None
    enumerated: tuple[tuple[int, ...], ...] | None = None
    optional: bool = False
    default: float = 0.0

    def allows(self, shape: tuple[int, ...]) -> bool:
        """Whether a value may have this shape. A description without a shape allows any."""
        if self.enumerated is not None:
            return shape in self.enumerated
        if self.ranges is not None:
            return len(shape) == len(self.ranges) and all(
                least <= size and (most is None or size <= most)
                for size, (least, most) in zip(shape, self.ranges, strict=True)
            )
        return not self.shape or shape == self.shape

    def expected(self) -> str:
        """The allowed shapes in words."""
        if self.enumerated is not None:
            return "one of " + ", ".join(str(list(shape)) for shape in self.enumerated)
        if self.ranges is not None:
            return "[" + ", ".join(_range(least, most) for least, most in self.ranges) + "]"
        return str(list(self.shape))


def _range(least: int, most: int | None) -> str:
    return str(least) if least == most else f"{least}..{'' if most is None else most}"


@dataclass(frozen=True)
class Function:
    """One function of a model: what it declares to the outside and the block that computes it."""

    name: str
    opset: str
    parameters: tuple[Value, ...]
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    states: tuple[Feature, ...]
    block: Block


@dataclass(frozen=True)
class Program:
    """A saved package."""

    path: Path
    specification_version: int
    default_function: str
    functions: Mapping[str, Function]
