"""The key-value cache of a decoder as states: buffers of a fixed length that a call changes in place.

The portable graph appends new keys and values to inputs, ``past_key_values.N.key|value``, by a Concat whose output is
an output of the graph, ``present.N.key|value``. Here each of these becomes a buffer of ``context`` tokens, into which
the new ones are written at a position. The mask and the rotary positions stay the graph's own: it sees a past as long
as the position, and keys to the end of the buffer, of which its causal mask hides those behind a query.

Shape suffixes: B batch, K key heads, S new tokens, C context, E numbers of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.coreml.conversion import Converted, convert
from intaglio.engines.coreml.description import CacheDescription, FunctionDescription, StateDescription, describe
from intaglio.engines.coreml.registry import UPDATE_STATE
from intaglio.engines.lowering.cache_appends import TOKENS, Append, append_of, readers
from intaglio.engines.lowering.fuse_nodes import is_standard
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim
from intaglio.kernels.grouped_quant import DOMAIN

_WAY_OUT = "compile another stage, or for another target, such as cpu"


@dataclass(frozen=True)
class CacheTensor:
    """An input that a state takes the place of, and the output that it grew into."""

    past: str
    present: str
    shape: tuple[int, ...]


def has_cache(model: ir.Model) -> bool:
    """Whether a graph appends to a key-value cache."""
    return any(append_of(value) is not None for value in model.graph.inputs)


def depends_on_call_length(model: ir.Model) -> bool:
    """Whether a graph looks at the greatest position of a call, as dynamic rotary embeddings do.

    Its numbers then depend on how a text is divided into calls.
    """
    positions = [v for v in model.graph.inputs if v.dtype == ir.DataType.INT64]
    return any(is_standard(node, "ReduceMax") for value in positions for node, _ in value.uses())


def convert_with_cache(
    model: ir.Model,
    where: str,
    *,
    context: int,
    tokens: int,
    dims: Mapping[str, int | Dim] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> tuple[Converted, FunctionDescription]:
    """Makes a MIL program of a decoder that appends ``tokens`` tokens a call to states of ``context`` tokens.

    The model is changed on the way. ``dims`` are those of its bundle, of which the batch is 1 unless it is fixed to
    another size. Raises CompileError.
    """
    if not 1 <= tokens <= context:
        raise CompileError(f"{where}: a call of {tokens} tokens does not fit a context of {context}")
    lowering = CacheStatesPass(where, context, tokens, dims)
    lowering(model)
    fixed = {name: dim for name, dim in (dims or {}).items() if isinstance(dim, int)}
    fixed = {**fixed, **lowering.sizes}
    converted = convert(model, where, dims={**(dims or {}), **fixed}, constants=constants)
    names = {port.name: port.mil_name for port in converted.states}
    states = tuple(
        StateDescription(package_name=names[each.past], shape=each.shape, past=each.past, present=each.present)
        for each in lowering.caches
    )
    cache = CacheDescription(context=context, tokens=tokens, position=lowering.position)
    return converted, describe(converted, fixed, cache).model_copy(update={"states": states})


class CacheStatesPass(ir.passes.InPlacePass):
    """Replaces each Concat of a cache by ``UpdateState(past, new, begin, end)``, which gives the whole buffer.

    ``past`` is an input of the shape of the buffer, which conversion makes a state of; the output goes. A new input
    says at which position to write. After the call ``position`` is its name, ``caches`` are the buffers, and ``sizes``
    the named dims that are fixed by all this.

    Casts between the graph's dtype and the interface's are looked through. Raises CompileError for a past that is read
    in another way, or whose dims are not known.
    """

    def __init__(self, where: str, context: int, tokens: int, dims: Mapping[str, int | Dim] | None = None) -> None:
        super().__init__()
        self._where, self._context, self._tokens, self._dims = where, context, tokens, dims or {}
        self.position = ""
        self.caches: tuple[CacheTensor, ...] = ()
        self.sizes: dict[str, int] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [append for value in graph.inputs if (append := append_of(value)) is not None]
        if not found:
            raise CompileError(
                f"{self._where}: no key-value cache is found: no input of the graph is appended to along axis 2, with "
                f"an output of what comes of it; {_WAY_OUT}"
            )
        self._check_batch(found)
        position = self._position(graph)
        gone = {append.output for append in found}
        kept = [value for value in graph.outputs if value not in gone]
        graph.outputs.clear()
        graph.outputs.extend(kept)
        begin, end = self._bounds(graph, position)
        self.caches = tuple(self._replace(graph, append, begin, end) for append in found)
        for append in found:
            self._answer_shapes(graph, append.past, position)
        model.opset_imports.setdefault(DOMAIN, 1)
        return ir.passes.PassResult(model, modified=True)

    def _check_batch(self, found: list[Append]) -> None:
        for append in found:
            past = append.past.shape
            assert past is not None
            batch, grown = past[0], append.output.shape
            if isinstance(batch, ir.SymbolicDim) and batch.value is not None:
                given = self._dims.get(batch.value)
                self.sizes[batch.value] = given if isinstance(given, int) else 1
            new = append.new.shape
            self._fix(new[TOKENS] if new is not None else ir.SymbolicDim("sequence"), self._tokens)
            self._fix(grown[TOKENS] if grown is not None else ir.SymbolicDim(None), self._context)

    def _fix(self, dim: int | ir.SymbolicDim, size: int) -> None:
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            self.sizes[dim.value] = size

    def _position(self, graph: ir.Graph) -> ir.Value:
        taken = {value.name for value in graph.inputs}
        self.position = "position" if "position" not in taken else "cache_position"
        position = ir.Value(name=self.position, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
        graph.inputs.append(position)
        return position

    def _bounds(self, graph: ir.Graph, position: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Where the new tokens begin and end in a buffer: on the axis of tokens; the others are taken whole."""
        zeros, zero, tokens = (
            _constant(graph, f"{self.position}.{name}", value)
            for name, value in (("zeros", [0, 0]), ("zero", [0]), ("tokens", [self._tokens]))
        )
        last = ir.node("Add", [position, tokens])
        begin = ir.node("Concat", [zeros, position, zero], {"axis": 0}, name="cache_begin")
        end = ir.node("Concat", [zeros, last.outputs[0], zero], {"axis": 0}, name="cache_end")
        for made in (last, begin, end):
            made.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.insert_before(graph[0], [last, begin, end])
        return begin.outputs[0], end.outputs[0]

    def _replace(self, graph: ir.Graph, append: Append, begin: ir.Value, end: ir.Value) -> CacheTensor:
        past, concat = append.past, append.concat
        shape = self._shape(past)
        past.shape = ir.Shape(shape)
        update = ir.node(UPDATE_STATE, [past, append.new, begin, end], domain=DOMAIN, name=concat.name)
        concat.outputs[0].shape = ir.Shape(shape)
        _replace(graph, concat, update)
        return CacheTensor(str(past.name), str(append.output.name), shape)

    def _shape(self, past: ir.Value) -> tuple[int, ...]:
        dims: list[int] = []
        assert past.shape is not None
        for axis, dim in enumerate(past.shape):
            size = self._context if axis == TOKENS else dim
            if isinstance(size, ir.SymbolicDim):
                size = self.sizes.get(size.value or "", 0)
            if size < 1:
                raise CompileError(
                    f"{self._where}: axis {axis} of {past.name!r} has no size that is known, and a state of Core ML is "
                    f"of a fixed one; fix it: --shapes {dim}=N"
                )
            dims.append(size)
        return tuple(dims)

    def _answer_shapes(self, graph: ir.Graph, past: ir.Value, position: ir.Value) -> None:
        """Nodes that ask how long the past is are told the position; what else reads it is refused."""
        for reader in readers(past):
            for node, _ in list(reader.uses()):
                if (node.domain, node.op_type) == (DOMAIN, UPDATE_STATE) or is_standard(node, "Cast"):
                    continue
                if not is_standard(node, "Shape"):
                    raise CompileError(
                        f"{self._where}: {past.name!r} is read by {node.op_type} {node.name!r} as well as appended to, "
                        f"which a state cannot answer; {_WAY_OUT}"
                    )
                self._answer_shape(graph, node, past, position)

    def _answer_shape(self, graph: ir.Graph, node: ir.Node, past: ir.Value, position: ir.Value) -> None:
        start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
        assert past.shape is not None
        axes = range(*slice(start, end).indices(len(past.shape)))
        parts = [
            position if axis == TOKENS else _constant(graph, f"{past.name}.axis{axis}", [int(past.shape[axis])])  # type: ignore[arg-type]
            for axis in axes
        ]
        attributes = {"axis": 0} if len(parts) > 1 else {}
        answer = ir.node("Concat" if attributes else "Identity", parts, attributes, name=node.name)
        _replace(graph, node, answer)


def _replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs, new.outputs)


def _constant(graph: ir.Graph, name: str, value: list[int]) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(value, np.int64), name=name)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(value)]), const_value=tensor)
        )
    return graph.initializers[name]
