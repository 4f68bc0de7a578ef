"""The key-value cache of a decoder as buffers of a fixed length, written in place by TensorScatter (opset 24).

Shape suffixes: B batch, K key heads, S new tokens, C context, E numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from intaglio.engines.kv_cache import MASK, POSITION
from intaglio.engines.lowering.cache_appends import TOKENS, Append, append_of, readers
from intaglio.engines.lowering.fuse_nodes import attribute, is_standard
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.errors import CompileError

OPSET = 24
_INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class CacheBuffer:
    """An input of a cache and the output that it becomes: on a device one buffer ``[B, K, C, E]``."""

    past: str
    present: str


class ScatterCachePass(ir.passes.InPlacePass):
    """Replaces each Concat of a cache by ``TensorScatter(past, new, position)`` into a buffer of ``context`` tokens.

    1. ``past_key_values.N.*`` and ``present.N.*`` are ``[B, K, C, E]``, meant to be the same memory. A new input, int64
       ``[1]``, called ``position``, says behind how many tokens the new ones are written, in all rows of a batch.
    2. ``attention_mask`` is ``[B, C]``, with zeros behind the tokens so far. What lies in a buffer behind the new
       tokens, the graph's own causal mask hides; it has to be finite, zeros at the start, since zero times NaN is NaN.
    3. A buffer has the dtype in which tokens are appended, where that is the narrower one: else the whole of it would
       be cast at every token.

    A graph without such a cache is left alone. After the call ``caches`` are the buffers. Raises CompileError for a
    past that is read in another way, or where no mask hides what is not written yet.
    """

    def __init__(self, context: int) -> None:
        super().__init__()
        self._context = context
        self.caches: tuple[CacheBuffer, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [append for value in graph.inputs if (append := append_of(value)) is not None]
        if not found:
            return ir.passes.PassResult(model, modified=False)
        self._lengthen(graph, found)
        position = ir.Value(name=POSITION, type=ir.TensorType(_INT64), shape=ir.Shape([1]))
        graph.inputs.append(position)
        indices_B = self._indices(graph, found[0].past, position)
        named = [(str(append.past.name), str(append.output.name)) for append in found]
        for append in found:
            self._check(append)
            _answer_lengths(append.past, position)
            self._replace(graph, _narrowed(graph, append), indices_B)
        self.caches = tuple(CacheBuffer(*names) for names in named)
        graph.opset_imports[""] = max(OPSET, graph.opset_imports.get("", OPSET))
        return ir.passes.PassResult(model, modified=True)

    def _lengthen(self, graph: ir.Graph, found: list[Append]) -> None:
        """Gives the dims of the cache and of its mask their size, wherever they occur."""
        mask = next((value for value in graph.inputs if value.name == MASK), None)
        if mask is None or mask.shape is None or mask.shape.rank() != 2:
            raise CompileError(
                f"{graph.name}: has a key-value cache but no {MASK} [batch, tokens]; buffers that are not full need it"
            )
        if any(value.name == POSITION for value in graph.inputs):
            raise CompileError(f"{graph.name}: has an input {POSITION!r} already, which a cache in buffers adds")
        dims = {mask.shape[1]}
        for append in found:
            for value in (append.past, append.output, append.concat.outputs[0]):
                if value.shape is not None:
                    dims.add(value.shape[TOKENS])
        names = {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None}
        values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
        for value in values:
            if value.shape is not None:
                value.shape = ir.Shape(
                    [self._context if isinstance(d, ir.SymbolicDim) and d.value in names else d for d in value.shape]
                )

    def _indices(self, graph: ir.Graph, past: ir.Value, position: ir.Value) -> ir.Value:
        """``[B]``: the position, once a row."""
        shape = ir.node("Shape", [past], {"start": 0, "end": 1}, name="cache.rows")
        indices = ir.node("Expand", [position, shape.outputs[0]], name="cache.indices")
        batch = past.shape[0] if past.shape is not None else None
        for node, size in ((shape, 1), (indices, batch)):
            value = node.outputs[0]
            value.name, value.type, value.shape = node.name, ir.TensorType(_INT64), ir.Shape([size])
        graph.insert_before(graph[0], [shape, indices])
        return indices.outputs[0]

    def _check(self, append: Append) -> None:
        known = readers(append.past)
        for reader in known:
            for node, _ in reader.uses():
                if node is append.concat or is_standard(node, "Shape") or node.outputs[0] in known:
                    continue
                raise CompileError(
                    f"{append.past.name!r} is read by {node.op_type} {node.name!r} as well as appended to, which a "
                    "buffer that is longer than its tokens cannot answer"
                )

    def _replace(self, graph: ir.Graph, append: Append, indices_B: ir.Value) -> None:
        past, output = append.concat.inputs[0], append.concat.outputs[0]
        build = GraphBuilder(graph, str(output.name))
        written = build("TensorScatter", [past, append.new, indices_B], output.dtype, output.shape, axis=TOKENS)
        build.replace(append.concat, written)


def _narrowed(graph: ir.Graph, append: Append) -> Append:
    """The same with a past and a present of the dtype in which tokens are appended, if that is the narrower one."""
    past, held, joined = append.past, append.concat.inputs[0], append.concat.outputs[0]
    assert past.dtype is not None and held is not None and held.dtype is not None
    if held.dtype.bitwidth >= past.dtype.bitwidth:
        return append
    past.dtype = held.dtype
    for node, _ in list(past.uses()):
        if is_standard(node, "Cast") and node.outputs[0].dtype == held.dtype:
            node.outputs[0].replace_all_uses_with(past)
            graph.remove(node, safe=True)
    if joined is append.output:
        return append
    cast = append.output.producer()
    assert cast is not None, "an output that is a cast of what was joined has a node"
    joined.name, append.output.name = append.output.name, joined.name
    append.output.replace_all_uses_with(joined, replace_graph_outputs=True)
    graph.remove(cast, safe=True)
    return Append(past, append.concat, joined)


def _answer_lengths(past: ir.Value, position: ir.Value) -> None:
    """Nodes that ask how many tokens the past has are told the position; other dims are its own."""
    for reader in readers(past):
        for node, _ in list(reader.uses()):
            if not is_standard(node, "Shape"):
                continue
            start, end = attribute(node, "start", None), attribute(node, "end", None)
            axes = list(range(*slice(start, end).indices(4)))
            if TOKENS not in axes:
                continue
            if axes != [TOKENS]:
                raise CompileError(f"{node.name}: asks for more dims of {past.name!r} than its tokens")
            node.outputs[0].replace_all_uses_with(position, replace_graph_outputs=True)
