"""Walks an ONNX graph and makes a MIL program of it, node by node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)

from intaglio.engines.coreml.axes import check_axes
from intaglio.engines.coreml.constants import to_mil
from intaglio.engines.coreml.deferred import large
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.opsets import check_opset
from intaglio.engines.coreml.registry import UPDATE_STATE, load_converters
from intaglio.engines.lowering.fold_constants import evaluate
from intaglio.engines.lowering.fuse_dequantize import FuseDequantizePass
from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim
from intaglio.kernels.grouped_quant import DOMAIN

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program, Var

    from intaglio.engines.coreml.registry import Converter

MAX_RANK = 5
# How the note ends where integers of more bits are computed.
WRAPS = "is computed in int32: what leaves its range is wrong"
# What follows from constants alone is computed in its own dtype where Core ML has a smaller one, up to this size.
_WIDE = (ir.DataType.INT64, ir.DataType.UINT64, ir.DataType.UINT32, ir.DataType.DOUBLE)
_FOLDED_ELEMENTS = 2**16
# What may leave the range of int32 where its inputs are within.
_COUNTING = frozenset(
    {"Abs", "Add", "BitShift", "Cast", "CumSum", "MatMul", "Mul", "Neg", "Pow", "ReduceProd", "ReduceSum", "Sub", "Sum"}
)
# Names that coremltools changes when it writes a program.
_RESERVED = frozenset(
    {
        "any", "bf16", "bool", "dict", "false", "fp16", "fp32", "fp64", "func", "int16", "int32", "int64", "int8",
        "list", "program", "state", "string", "tensor", "true", "tuple", "uint16", "uint32", "uint64", "uint8",
    }
)  # fmt: skip
_WIDE_NUMPY = tuple(dtype.numpy() for dtype in _WIDE)
_TINY_FLOATS = frozenset(d for d in ir.DataType if d.is_floating_point() and d.bitwidth <= 8)
# Other floats are taken and given as float32, and all else as int32.
_INTERFACE = {ir.DataType.FLOAT16: "fp16"}


@dataclass(frozen=True)
class Port:
    """An input or output: its ONNX name, dtype and shape, and what the package calls it.

    ``shape`` is the graph's, with names for dims that vary; a scalar has the shape [1] in the package. ``mil_dtype`` is
    fp32, fp16 or int32 (booleans are int32 that are 0 or 1). ``bounds`` gives least and greatest size of each dim,
    None for no greatest.
    """

    name: str
    mil_name: str
    dtype: ir.DataType
    mil_dtype: str
    shape: tuple[int | str, ...]
    bounds: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Stored:
    """A weight of the graph. ``read`` gives its bytes, uint8 of one dim, values of less than a byte without gaps."""

    shape: tuple[int, ...]
    dtype: ir.DataType
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Converted:
    """A MIL program with one function, ``main``. A package can be made of it once: coremltools changes it in that.

    Packed weights are read from the model's files then, so these must still be there. ``notes`` say what is computed in
    another way than the graph says. ``too_deep``: which nodes give more dims than Core ML's tensors have, by the MIL op
    that does; coremltools may do without it yet.
    """

    program: Program
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: int = field(default=0)
    states: tuple[Port, ...] = ()
    notes: tuple[str, ...] = ()
    too_deep: Mapping[str, str] = field(default_factory=dict)


def convert(
    model: ir.Model,
    where: str,
    dims: Mapping[str, int | Dim] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Converted:
    """Makes a MIL program for iOS 18 of an ONNX model, which is changed on the way.

    ``where`` is what errors call the model. ``dims`` fixes or bounds its named dims, ``constants`` binds inputs at
    conversion, which then are inputs no more. Raises CompileError, RuntimeMissingError.
    """
    converters = load_converters()
    check_opset(model, where)
    try:
        _prepare(model, where, converters)
        return Conversion(model, where, converters, dims or {}, constants or {}).run()
    except RecursionError as error:
        raise CompileError(
            f"{where}: its subgraphs or functions are nested too deeply to be converted; "
            "flatten the graph, or compile for another target, such as cpu"
        ) from error


def _prepare(model: ir.Model, where: str, converters: Mapping[tuple[str, str], Converter]) -> None:
    passes = (
        FuseGatherPass(),
        InlinePass(criteria=lambda function: (function.domain, function.name) not in converters),
        RemoveInitializersFromInputsPass(),
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        FuseDequantizePass(),
        RemoveUnusedNodesPass(),
    )
    try:
        for each in passes:
            each(model)
    except RecursionError:
        raise
    except Exception as error:
        raise CompileError(f"{where}: cannot be prepared for Core ML: {error}") from error
    infer_shapes(model)  # where it cannot, what MIL infers is taken


class Conversion:
    """The walk over one model: which Var stands for which value."""

    def __init__(
        self,
        model: ir.Model,
        where: str,
        converters: Mapping[tuple[str, str], Converter],
        dims: Mapping[str, int | Dim],
        constants: Mapping[str, np.ndarray],
    ) -> None:
        self._model, self._where, self._converters, self._dims = model, where, converters, dims
        self._vars: dict[ir.Value, Var] = {}
        self._shared: dict[Hashable, Var] = {}
        self._bound = {value: constants[str(value.name)] for value in model.graph.inputs if value.name in constants}
        # What was computed at conversion.
        self._known: dict[ir.Value, np.ndarray] = {}
        self._names: set[str] = set(_RESERVED)
        # What follows from sizes, which stay within int32, and from constants.
        self._sizes: set[ir.Value] = set()
        self._said: dict[str, None] = {}
        self._too_deep: dict[str, str] = {}
        self._symbols: dict[str, Any] = {}
        self._nodes = 0

    def run(self) -> Converted:
        """The whole model."""
        import coremltools as ct
        from coremltools.converters.mil.mil import Builder, Function, Program

        self._refuse_unknown_ops()
        # Names are numbered from a global counter, and a second conversion must give the same names.
        Builder.name_count.clear()
        graph = self._model.graph
        kept = _states(graph)
        # What has no elements is only asked for its type; where it is read, var() refuses it.
        taken = [v for v in graph.inputs if v not in self._bound and v not in kept and not _is_empty(v)]
        inputs = [self._input(value) for value in taken]
        states = [self._state(value) for value in kept]
        # Reserved before any op can take them.
        output_names = [self.unique_name(str(value.name)) for value in graph.outputs]
        placeholders = {port.mil_name: self._placeholder(port) for port in inputs}
        placeholders |= {port.mil_name: self._buffer(port) for port in states}
        with Function(placeholders, opset_version=ct.target.iOS18) as function:
            for value, port in zip(taken, inputs, strict=True):
                self._vars[value] = self._from_interface(function.inputs[port.mil_name], port)
            self._vars.update((v, function.inputs[p.mil_name]) for v, p in zip(kept, states, strict=True))
            self._walk(graph)
            pairs = [self._output(*pair) for pair in zip(graph.outputs, output_names, strict=True)]
            function.set_outputs([var for _, var in pairs])
        program = Program()
        program.add_function("main", function)
        return Converted(
            program,
            tuple(inputs),
            tuple(port for port, _ in pairs),
            self._nodes,
            tuple(states),
            self._notes(),
            self._too_deep,
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        graph = self._model.graph
        nodes = list(ir.traversal.RecursiveGraphIterator(graph))
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
        if any(value.dtype == ir.DataType.DOUBLE for value in values):
            notes.append("float64 is computed in float32")
        for node in nodes:
            made = self._vars.get(node.outputs[0])
            if node.op_type == "NonZero" and made is not None and made.val is None:
                notes.append(f"how much NonZero gives ({node.name or node.outputs[0].name!r}) depends on the data")
        return (*notes, *self._said)

    @property
    def nodes(self) -> int:
        """How many nodes were converted so far, those of a loop each time that it runs."""
        return self._nodes

    def note(self, what: str) -> None:
        """Says in the report, once, what is computed in another way than the graph says."""
        self._said[what] = None

    def var(self, value: ir.Value, node: Node | None = None) -> Var:
        """The Var of a value; that of a weight is made when it is first asked for."""
        if value not in self._vars:
            from coremltools.converters.mil.mil import Builder as mb

            array = self._weight(value)
            if self._weight_of(value) is None and _is_empty(value):
                self._fail(f"the input {value.name!r} has the shape {value.shape}, and Core ML holds no empty tensors")
            if array is None:
                who = f"{self._where}: an output" if node is None else self.describe(node._node)
                raise CompileError(f"{who} reads {value.name!r}, which nothing before it makes; repair the graph")
            self._vars[value] = mb.const(
                val=large(self._narrow(value, array, node)), name=self.unique_name(value.name or "const")
            )
        return self._vars[value]

    def constant(self, value: ir.Value, node: Node) -> np.ndarray | None:
        """The array of a value that is known at conversion, or None."""
        if value in self._vars and self._weight_of(value) is None:
            found = self._vars[value].val
            return None if found is None else np.asarray(found)
        array = self._weight(value)
        return self.constant_of(self.var(value, node)) if array is None else array

    def stored(self, value: ir.Value) -> Stored | None:
        """A weight that is not read yet; None for what is no initializer."""
        tensor = self._weight_of(value)
        if tensor is None or isinstance(tensor, np.ndarray):
            return None
        shape = tuple(int(size) for size in tensor.shape)
        return Stored(shape, tensor.dtype, lambda: np.frombuffer(self._read(value, lambda t: t.tobytes()), np.uint8))

    def shared(self, key: Hashable, make: Callable[[], Var]) -> Var:
        """What ``make`` gives, or what it gave before for an equal key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @staticmethod
    def constant_of(var: Var) -> np.ndarray | None:
        """The array of a Var that MIL's value inference knows, or None."""
        return None if var.val is None else np.asarray(var.val)

    def inputs_of(self, value: ir.Value) -> tuple[str, ...]:
        """The names of the model's inputs that a value follows from."""
        waiting, seen = [value], {value}
        while waiting:
            producer = waiting.pop().producer()
            for each in producer.inputs if producer is not None else ():
                if each is not None and each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return tuple(str(each.name) for each in self._model.graph.inputs if each in seen and each not in self._bound)

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The dtype that the graph gives the value, or that of its Var where type inference did not reach it."""
        if value.dtype is not None:
            return value.dtype
        if value.const_value is not None:
            return value.const_value.dtype
        return _dtype_of(self.var(value))

    def opset(self, node: ir.Node) -> int:
        """The version of the node's domain."""
        imports = self._model.graph.opset_imports
        if node.domain in ("", "ai.onnx"):
            return imports.get("") or imports.get("ai.onnx") or 1
        return imports.get(node.domain, 1)

    def unique_name(self, name: str) -> str:
        """A MIL name like this one that nothing in the program has yet."""
        safe = re.sub(r"\W", "_", name, flags=re.ASCII)
        safe = safe if re.match(r"[A-Za-z_]", safe) else f"_{safe}"
        unique, count = safe, 0
        while unique in self._names:
            count += 1
            unique = f"{safe}_{count}"
        self._names.add(unique)
        return unique

    def inline(self, graph: ir.Graph, inputs: Sequence[Var], node: Node) -> list[Var]:
        """Converts a subgraph into the current block."""
        if len(inputs) != len(graph.inputs):
            node.fail(f"gives {len(inputs)} inputs to a subgraph that takes {len(graph.inputs)}")
        self._vars.update(zip(graph.inputs, inputs, strict=True))
        self._walk(graph)
        return [self.var(value, node) for value in graph.outputs]

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """While a block inside the current one is filled: Vars made in it are not seen outside."""
        kept = dict(self._vars), dict(self._shared)
        try:
            yield
        finally:
            self._vars, self._shared = kept

    def describe(self, node: ir.Node) -> str:
        """The node as errors name it."""
        name = f"the node {node.name!r}" if node.name else f"the node that makes {node.outputs[0].name!r}"
        op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        source = node.metadata_props.get("namespace") or node.metadata_props.get("pkg.torch.onnx.class_hierarchy")
        came = f", from {source}" if source else ""
        return f"{self._where}: {name} ({op}, opset {self.opset(node)}{came})"

    def _walk(self, graph: ir.Graph) -> None:
        for node in graph:
            self._convert(node)

    def _convert(self, node: ir.Node) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if self._fold(node):
            return
        seen = Node(node, self, self.unique_name(node.name or node.op_type))
        try:
            check_axes(seen)
            made = self._converters[domain, node.op_type](seen)
        except (CompileError, RecursionError):
            raise
        except Exception as error:  # coremltools' own checks raise whatever comes
            raise CompileError(
                f"{self.describe(node)} cannot be built with {self._inputs(node)}: {type(error).__name__}: {error}; "
                "change the graph before compiling, or compile for another target, such as cpu"
            ) from error
        self._nodes += 1
        outputs: list[Any] = list(made) if isinstance(made, (list, tuple)) else [made]
        for value, var in zip(node.outputs, outputs, strict=False):
            if var is None or value.name == "":
                continue
            if var.val is None and 0 in var.shape:
                seen.fail(f"gives {value.name!r} the shape {list(var.shape)}, and Core ML holds no empty tensors")
            if any(isinstance(size, (int, np.integer)) and not 0 <= size < 2**31 for size in var.shape):
                seen.fail(f"gives {value.name!r} the shape {list(var.shape)}, and Core ML's sizes are of 31 bits")
            if var.rank > MAX_RANK and var.val is None and var.op is not None:
                gives = f"gives {value.name!r} {var.rank} dims"
                self._too_deep[var.op.name] = f"{self.describe(node)} {gives}, and Core ML's tensors end at {MAX_RANK}"
            self._vars[value] = var
        self._note_integers(node)
        for value in node.outputs[len(outputs) :]:
            if value.uses() or value.is_graph_output():
                seen.fail(f"gives a further output {value.name!r}, which is not converted")

    def _fold(self, node: ir.Node) -> bool:
        """Computes a node here if its inputs are known and MIL, which would, has smaller numbers."""
        outputs = node.outputs
        inputs = [None if value is None or value.name == "" else self._array(value) for value in node.inputs]
        given = [value for value in node.inputs if value is not None and value.name != ""]
        made = None
        if given and sum(array is not None for array in inputs) == len(given):
            wide = [array.dtype for array in inputs if array is not None]
            if any(dtype in wide for dtype in _WIDE_NUMPY) or any(value.dtype in _WIDE for value in outputs):
                made = evaluate(node, inputs, self.opset(node), _FOLDED_ELEMENTS)
        for i, value in enumerate(outputs):
            self._known.pop(value, None)
            if made is not None and i < len(made):
                self._vars.pop(value, None)  # of an earlier round of a loop
                self._known[value] = made[i]
        self._nodes += made is not None
        return made is not None

    def _array(self, value: ir.Value) -> np.ndarray | None:
        """A value that is known and not large, in the graph's dtype."""
        held = self._weight_of(value)
        if held is not None:
            return self._weight(value) if held.size <= _FOLDED_ELEMENTS else None
        var = self._vars.get(value)
        if var is None or var.val is None or np.size(var.val) > _FOLDED_ELEMENTS:
            return None
        return np.asarray(var.val).astype(self.dtype(value).numpy())

    def _note_integers(self, node: ir.Node) -> None:
        given = [value for value in node.inputs if value is not None and value.name != ""]
        of_sizes = bool(given) and all(v in self._sizes or self._weight_of(v) is not None for v in given)
        if node.op_type in ("Shape", "Size") or of_sizes:
            self._sizes.update(node.outputs)
        made = self._vars.get(node.outputs[0])
        dtype = node.outputs[0].dtype
        if node.op_type not in _COUNTING or made is None or dtype not in _WIDE or dtype == ir.DataType.DOUBLE:
            return
        source = node.inputs[0].dtype if node.op_type == "Cast" and node.inputs[0] is not None else None
        within = source is not None and source.is_integer() and dtype == ir.DataType.INT64
        if not within and made.val is None and node.outputs[0] not in self._sizes:
            name = "int64" if dtype == ir.DataType.INT64 else dtype.name.lower()
            self.note(f"{name} {WRAPS}")

    def _inputs(self, node: ir.Node) -> str:
        """The shapes and dtypes of a node's inputs, as far as they are known."""
        said = []
        for value in node.inputs:
            if value is not None and value in self._vars:
                var = self._vars[value]
                sizes = ", ".join(str(size) for size in var.shape)
                said.append(f"{value.name} {_dtype_of(var).name.lower()}[{sizes}]")
        return f"the inputs {', '.join(said)}" if said else "its inputs"

    def _refuse_unknown_ops(self) -> None:
        unknown: dict[str, ir.Node] = {}
        for node in ir.traversal.RecursiveGraphIterator(self._model.graph):
            domain = "" if node.domain == "ai.onnx" else node.domain
            if (domain, node.op_type) not in self._converters:
                unknown.setdefault(f"{domain}::{node.op_type}" if domain else node.op_type, node)
        if not unknown:
            return
        node = next(iter(unknown.values()))
        others = f"; the graph also has {', '.join(sorted(unknown)[:12])}" if len(unknown) > 1 else ""
        raise CompileError(
            f"{self.describe(node)} has no form in Core ML here{others}; "
            "replace it by ops of engines/coreml/supported_ops.txt, or compile for another target, such as cpu"
        )

    def _weight_of(self, value: ir.Value) -> Any:
        return self._known.get(value, self._bound.get(value, value.const_value))

    def _weight(self, value: ir.Value) -> np.ndarray | None:
        held = self._weight_of(value)
        if held is None and value.is_graph_input() and _is_empty(value) and value.dtype is not None:
            # Of no elements there is only one value.
            return np.zeros([d if isinstance(d, int) else 1 for d in value.shape or ()], value.dtype.numpy())
        if held is None or isinstance(held, np.ndarray):
            return held
        return self._read(value, lambda tensor: np.asarray(tensor.numpy()))

    def _read(self, value: ir.Value, how: Callable[[Any], Any]) -> Any:
        """Reads a weight, and keeps nothing of its file in memory."""
        tensor = self._weight_of(value)
        if isinstance(tensor, ir.ExternalTensor):
            # One of its own, since a tensor keeps the map of its file.
            tensor = ir.ExternalTensor(
                tensor.location,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                base_dir=tensor.base_dir,
            )
        try:
            return how(tensor)
        except Exception as error:  # external data that is missing or cut short
            raise CompileError(f"{self._where}: the weight {value.name!r} cannot be read: {error}") from error

    def _narrow(self, value: ir.Value, array: np.ndarray, node: Node | None) -> np.ndarray:
        try:
            return to_mil(array)
        except ValueError as error:
            if value in self._known and node is not None:
                node.fail(f"reads {value.name!r}, which follows from constants and {error}")
            self._fail(f"the {'value' if value in self._known else 'weight'} {value.name!r} {error}")

    def _input(self, value: ir.Value) -> Port:
        name, dtype = str(value.name), value.dtype
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            self._fail(f"the input {name!r} is no tensor but {value.type}, and Core ML has only tensors")
        if dtype is None or value.shape is None:
            self._fail(f"the input {name!r} has no dtype or no rank; Core ML must know both")
        if dtype in (ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) or dtype in _TINY_FLOATS:
            self._fail(f"the input {name!r} is {dtype.name.lower()}, which Core ML has no tensors of")
        shape, bounds = [], []
        for axis, dim in enumerate(value.shape):
            # Some exporters write -1 for a dim that varies.
            known = dim if isinstance(dim, int) and dim >= 0 else None
            size = (getattr(dim, "value", None) or f"{name}_dim{axis}") if known is None else known
            given = self._dims.get(size) if isinstance(size, str) else None
            low, high = (given.min, given.max) if isinstance(given, Dim) else (1, None)
            if isinstance(given, int) or (isinstance(given, Dim) and low == high):
                size = given if isinstance(given, int) else low
            if isinstance(size, int):
                low = high = size
            shape.append(size)
            bounds.append((max(low, 1), high))
        if len(shape) > MAX_RANK:
            self._fail(f"the input {name!r} has {len(shape)} dims, and Core ML's tensors end at {MAX_RANK}")
        mil_dtype = _INTERFACE.get(dtype, "fp32" if dtype.is_floating_point() else "int32")
        return Port(name, self.unique_name(name), dtype, mil_dtype, tuple(shape), tuple(bounds))

    def _placeholder(self, port: Port) -> Any:
        from coremltools.converters.mil.mil import Builder as mb
        from coremltools.converters.mil.mil import get_new_symbol, types

        for size in port.shape:
            if isinstance(size, str) and size not in self._symbols:
                self._symbols[size] = get_new_symbol()
        shape = [self._symbols[s] if isinstance(s, str) else s for s in port.shape]
        return mb.placeholder(shape=shape or [1], dtype=types.string_to_builtin(port.mil_dtype))

    def _state(self, value: ir.Value) -> Port:
        """A state: float16, of a fixed shape, which are all that Core ML keeps."""
        port = self._input(value)
        if any(isinstance(size, str) for size in port.shape):
            self._fail(f"the state {value.name!r} has the shape {list(port.shape)}, and a state's is fixed")
        return replace(port, mil_dtype="fp16")

    @staticmethod
    def _buffer(port: Port) -> Any:
        from coremltools.converters.mil.mil import Builder as mb
        from coremltools.converters.mil.mil import types

        return mb.state_tensor_placeholder(shape=port.shape, dtype=types.fp16)

    def _from_interface(self, var: Var, port: Port) -> Var:
        from coremltools.converters.mil.mil import Builder as mb

        if not port.shape:
            var = mb.squeeze(x=var, axes=[0])
        return mb.cast(x=var, dtype="bool") if port.dtype == ir.DataType.BOOL else var

    def _output(self, value: ir.Value, mil_name: str) -> tuple[Port, Var]:
        from coremltools.converters.mil.mil import Builder as mb
        from coremltools.converters.mil.mil import types

        var = self.var(value)
        dtype = value.dtype or _dtype_of(var)
        names = {symbol: name for name, symbol in self._symbols.items()}
        shape = tuple(int(s) if isinstance(s, (int, np.integer)) else names.get(s, str(s)) for s in var.shape)
        if 0 in shape:
            self._fail(f"the output {value.name!r} has the shape {list(shape)}, and Core ML holds no empty tensors")
        if len(shape) > MAX_RANK:
            self._fail(f"the output {value.name!r} has {len(shape)} dims, and Core ML's tensors end at {MAX_RANK}")
        if var.dtype == types.bool:
            var = mb.cast(x=var, dtype="int32")
        if not shape:
            var = mb.reshape(x=var, shape=[1])
        return Port(str(value.name), mil_name, dtype, types.builtin_to_string(var.dtype), shape), mb.identity(
            x=var, name=mil_name
        )

    def _fail(self, what: str) -> NoReturn:
        raise CompileError(f"{self._where}: {what}; change the graph, or compile for another target, such as cpu")


def _states(graph: ir.Graph) -> list[ir.Value]:
    """Inputs that a node changes in place."""
    updated = {node.inputs[0] for node in graph if (node.domain, node.op_type) == (DOMAIN, UPDATE_STATE)}
    return [value for value in graph.inputs if value in updated]


def _is_empty(value: ir.Value) -> bool:
    return value.shape is not None and 0 in value.shape.dims


def _dtype_of(var: Var) -> ir.DataType:
    from coremltools.converters.mil.mil import types

    name = types.builtin_to_string(var.dtype)
    return {
        "fp32": ir.DataType.FLOAT,
        "fp16": ir.DataType.FLOAT16,
        "bool": ir.DataType.BOOL,
        "int8": ir.DataType.INT8,
        "uint8": ir.DataType.UINT8,
    }.get(name, ir.DataType.INT64)
