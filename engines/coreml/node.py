"""What a converter sees of an ONNX node."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import onnx_ir as ir

from intaglio.errors import CompileError

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Var

    from intaglio.engines.coreml.conversion import Conversion, Stored


# 1 GiB of float32, and more than any shape or mask needs.
_MOST_ELEMENTS = 1 << 28

# Node has methods of these names.
_Int: TypeAlias = int
_Float: TypeAlias = float


class NotConstantError(CompileError):
    """A value that Core ML must know at conversion is known only when the model runs.

    ``value`` is its name in the graph, ``inputs`` are those of the model that it follows from: it becomes known when
    they are bound at conversion.
    """

    def __init__(self, message: str, value: str, inputs: tuple[str, ...]) -> None:
        super().__init__(message)
        self.value = value
        self.inputs = inputs


class Node:
    """An ONNX node with its inputs as MIL Vars.

    Integers of all widths are int32 in MIL, float64 and bfloat16 are float32; ``dtype`` and ``output_dtype`` say what
    the graph calls them. ``name`` is unique in the program and safe as a MIL name.
    """

    def __init__(self, node: ir.Node, conversion: Conversion, name: str) -> None:
        self._node = node
        self._conversion = conversion
        self.name = name
        self.op_type = node.op_type
        self.domain = "" if node.domain == "ai.onnx" else node.domain
        self.opset = conversion.opset(node)
        self.outputs = [value.name or "" for value in node.outputs]

    @property
    def inputs(self) -> list[Var | None]:
        """All inputs; None where an optional one is left out."""
        return [self.optional(i) for i in range(len(self._node.inputs))]

    def input(self, i: _Int) -> Var:
        """The input, which must be there. Raises CompileError."""
        var = self.optional(i)
        if var is None:
            self.fail(f"lacks its input {i}, which the op needs")
        return var

    def optional(self, i: _Int) -> Var | None:
        """The input, or None where it is left out."""
        value = self._value(i)
        return None if value is None else self._conversion.var(value, self)

    def has_input(self, i: _Int) -> bool:
        """Whether an optional input is given."""
        return self._value(i) is not None

    def constant(self, i: _Int) -> np.ndarray:
        """The value of an input, which must be known at conversion; in the graph's own dtype where it is a weight.

        Raises NotConstantError.
        """
        value = self._value(i)
        if value is None:
            self.fail(f"lacks its input {i}, which the op needs")
        found = self._conversion.constant(value, self)
        if found is None:
            inputs = self._conversion.inputs_of(value)
            raise NotConstantError(
                self._message(
                    f"needs the value of {value.name!r} (input {i}) at conversion, and it is known only when the model "
                    "runs",
                    f"bind what it follows from ({', '.join(inputs[:8])}), or make it an initializer",
                ),
                value.name or "",
                inputs,
            )
        return found

    def stored(self, i: _Int) -> Stored | None:
        """An input that is a weight of the graph, which is not read yet; None for any other."""
        value = self._value(i)
        return None if value is None else self._conversion.stored(value)

    def shared(self, inputs: Iterable[_Int], key: Hashable, make: Callable[[], Var]) -> Var:
        """What ``make`` gives, or what it gave before for the same inputs and key."""
        return self._conversion.shared((*(self._value(i) for i in inputs), key), make)

    def constant_or(self, i: _Int, default: Any) -> Any:
        """As ``constant``, or the default where the input is left out."""
        return default if self._value(i) is None else self.constant(i)

    def is_constant(self, i: _Int) -> bool:
        """Whether the value of an input is known at conversion."""
        value = self._value(i)
        return value is not None and self._conversion.constant(value, self) is not None

    def dtype(self, i: _Int) -> ir.DataType:
        """The dtype that the graph gives an input."""
        value = self._value(i)
        if value is None:
            self.fail(f"lacks its input {i}, which the op needs")
        return self._conversion.dtype(value)

    def output_dtype(self, i: _Int = 0) -> ir.DataType | None:
        """The dtype that the graph gives an output; None where its type inference does not say."""
        return self._node.outputs[i].dtype

    def has(self, name: str) -> bool:
        """Whether the attribute is given."""
        return name in self._node.attributes

    def int(self, name: str, default: _Int | None = None) -> _Int:
        """An integer attribute. Raises CompileError where it is left out and has no default."""
        return int(self._attribute(name, default, ir.AttributeType.INT))

    def ints(self, name: str, default: Sequence[Any] | None = None) -> list[Any]:
        """A list of integers."""
        return [int(v) for v in self._attribute(name, default, ir.AttributeType.INTS)]

    def float(self, name: str, default: _Float | None = None) -> _Float:
        """A float attribute."""
        return float(self._attribute(name, default, ir.AttributeType.FLOAT))

    def floats(self, name: str, default: Sequence[Any] | None = None) -> list[Any]:
        """A list of floats."""
        return [float(v) for v in self._attribute(name, default, ir.AttributeType.FLOATS)]

    def string(self, name: str, default: str | None = None) -> str:
        """A text attribute."""
        return str(self._attribute(name, default, ir.AttributeType.STRING))

    def strings(self, name: str, default: Sequence[str] | None = None) -> list[str]:
        """A list of texts."""
        return [str(v) for v in self._attribute(name, default, ir.AttributeType.STRINGS)]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor attribute."""
        return np.asarray(self._attribute(name, None, ir.AttributeType.TENSOR).numpy())

    def graph(self, name: str) -> ir.Graph:
        """A subgraph."""
        return self._attribute(name, None, ir.AttributeType.GRAPH)

    def inline(self, graph: ir.Graph, inputs: Sequence[Var] = ()) -> list[Var]:
        """Converts a subgraph in place, with these as its inputs; its outputs."""
        return self._conversion.inline(graph, inputs, self)

    def nested(self) -> AbstractContextManager[None]:
        """While a block inside the current one is filled: what is made in it is not seen outside."""
        return self._conversion.nested()

    def check_size(self, shape: Sequence[_Int]) -> None:
        """Refuses a constant of more elements than are worth writing. Raises CompileError."""
        if prod(shape) > _MOST_ELEMENTS:
            self.fail(f"makes a constant of the shape {list(shape)}; up to {_MOST_ELEMENTS} elements are written")

    def fail(self, what: str, way_out: str = "") -> NoReturn:
        """Raises CompileError: the node, its op and opset, what is wrong with it and what can be done."""
        raise CompileError(self._message(what, way_out))

    def _message(self, what: str, way_out: str) -> str:
        where = self._conversion.describe(self._node)
        hint = way_out or "change the graph before compiling, or compile for another target, such as cpu"
        return f"{where} {what}; {hint}"

    def _value(self, i: _Int) -> ir.Value | None:
        value = self._node.inputs[i] if i < len(self._node.inputs) else None
        # An empty name is how protobuf leaves an input out.
        return value if value is not None and value.name != "" else None

    def _attribute(self, name: str, default: Any, kind: ir.AttributeType) -> Any:
        attribute = self._node.attributes.get(name)
        if attribute is None:
            if default is None:
                self.fail(f"lacks the attribute {name!r}, which the op needs")
            return default
        if attribute.type != kind:
            self.fail(f"has an attribute {name!r} that is {attribute.type.name}; expected {kind.name}")
        return attribute.value
