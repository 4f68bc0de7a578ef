"""Computes a float32 graph in float16 or bfloat16, but for what needs more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)

from intaglio.engines.lowering.fold_constants import MOVES, evaluate
from intaglio.engines.lowering.fuse_nodes import constant_of, is_standard, modulates, only_consumer, same_shape
from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.engines.lowering.narrow_islands import FOLLOWS, Islands, Kind, forget
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
_DTYPES = (_HALF, ir.DataType.BFLOAT16)
_MAX = 65504.0
# What is computed of constants and has no more elements is made a constant.
_FOLDED_ELEMENTS = 2**16
# Names in one line of a report.
_LISTED = 3


class NarrowDtypePass(ir.passes.InPlacePass):
    """Turns the float32 of a graph into ``dtype``, float16 or bfloat16: weights and activations.

    1. The dtypes of inputs and outputs stay as they are: what is inside is cast at the border.
    2. Float32 islands: softmax (that of an Attention by ``softmax_precision``), the statistics of norms and all other
       sums over many values, what follows from integers alone (positions, angles, masks), what integers are made of, a
       quantized product that makes an output of the graph (logits).
    3. A residual sum whose branch is gated is clipped to finite values, as our float16 graphs clip it.
    4. What reads a constant that the dtype does not hold, and what reads that, stays float32 up to where a softmax, a
       norm or the like makes it small again, or a sum large. ``kept`` has such nodes, and those whose op does not take
       the dtype, by name with the reason. An Attention takes such a mask in float32 and is narrow otherwise.

    ``broken`` has what a graph's own float16 constants have lost already: see :func:`broken_constants`. Functions other
    than ours are inlined. Raises CompileError where a dtype is not known.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            raise ValueError(f"graphs are narrowed to float16 and bfloat16; found {dtype.name.lower()}")
        self._dtype = dtype
        self.kept: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What a report is to say of ``kept``: nodes by name, those that only follow from others by their number."""
        followers = [name for name, reason in self.kept.items() if reason.endswith(FOLLOWS)]
        found = [f"{name} stays float32: {reason}" for name, reason in self.kept.items() if name not in followers]
        if followers:
            listed = ", ".join(followers[:_LISTED]) + (", …" if len(followers) > _LISTED else "")
            found.append(f"{len(followers)} more stay float32, since they read what such nodes give: {listed}")
        return found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        _prepare(model)
        self.broken = broken_constants(model.graph)
        opsets = {**model.opset_imports}
        opsets.setdefault("", opsets.get("ai.onnx", 1))
        _complete_dtypes(model.graph)
        _fold_floats(model.graph, opsets[""])
        outputs = [i for i, output in enumerate(model.graph.outputs) if output.dtype == _FLOAT]
        residuals = [node for node in model.graph if _is_gated_sum(node)]
        islands = Islands(model.graph, opsets, self._dtype)
        narrowed = _Narrowing(model.graph, islands, self._dtype).run()
        self.kept = dict(islands.kept)
        for node in residuals:
            if node.outputs[0].dtype == self._dtype == _HALF:
                _clip(model.graph, node.outputs[0])
        _cast_outputs(model.graph, outputs, self._dtype)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=narrowed)


def broken_constants(graph: ir.Graph) -> dict[str, str]:
    """What a float16 graph has lost of its constants before it came here: by the name of the node that reads it."""
    found = {}
    for node in graph:
        for value in node.inputs:
            if value is None or value.dtype != _HALF or node.op_type not in ("Add", "Sub", "Mul", "Where"):
                continue
            array = constant_of(value)
            if array is None or array.size > 1:
                continue
            where = node.name or str(node.outputs[0].name)
            if np.isinf(array).any() and node.op_type == "Mul":
                found[where] = f"Mul by {value.name!r}, which is infinite in float16: zero times it is NaN"
            elif np.isinf(array).any():
                found[where] = (
                    f"{node.op_type} with {value.name!r}, which is infinite in float16: a row that is masked as a "
                    "whole becomes NaN"
                )
            elif node.op_type == "Add" and not array.any() and _is_rooted(node):
                found[where] = f"Add of {value.name!r}, an epsilon that is 0 in float16: what it kept from 0 is not"
    return found


def _is_rooted(node: ir.Node) -> bool:
    return any(use.node.op_type in ("Sqrt", "Reciprocal", "Pow", "Log") for use in node.outputs[0].uses())


def _prepare(model: ir.Model) -> None:
    try:
        InlinePass(criteria=lambda function: function.domain != DOMAIN)(model)
        RemoveInitializersFromInputsPass()(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    except Exception as error:  # onnx_ir's own, and recursion
        raise CompileError(f"the graph cannot be prepared for narrowing: {type(error).__name__}: {error}") from error
    infer_shapes(model)  # what it cannot is inferred below, or asked for


def _complete_dtypes(graph: ir.Graph) -> None:
    """Gives outputs of ops that type inference does not know their dtype: that of the first float they read."""
    for node in graph:
        for value in node.outputs:
            if value.dtype is not None:
                continue
            read: list[ir.DataType] = [v.dtype for v in node.inputs if v is not None and v.dtype is not None]
            floats = [dtype for dtype in read if dtype.is_floating_point()]
            if not read:
                raise CompileError(
                    f"the dtype of {value.name!r}, which {node.op_type} makes, is not known, and only what is known to "
                    "be float32 is narrowed; run onnx.shape_inference on the model, or compile without --dtype"
                )
            value.dtype = floats[0] if floats else read[0]


def _fold_floats(graph: ir.Graph, opset: int) -> None:
    """Makes small float32 constants of what follows from such constants, for its parts may fit float16 where it does
    not, and the other way round. What follows from integers stays: it is no activation."""
    for node in list(graph):
        floats = [v for v in node.inputs if v is not None and v.dtype == _FLOAT]
        if not floats or any(v.dtype != _FLOAT or v.is_graph_output() for v in node.outputs):
            continue
        # No arithmetic, and a weight that stays under its name may be exchanged.
        if is_standard(node, "Transpose"):
            continue
        if any(v is not None and not _is_small_constant(v) for v in node.inputs):
            continue
        made = evaluate(node, [constant_of(v) for v in node.inputs], opset, _FOLDED_ELEMENTS)
        for output, array in zip(node.outputs, made or [], strict=False):
            tensor = ir.tensor(array, name=output.name)
            folded = ir.Value(name=output.name, type=ir.TensorType(_FLOAT), shape=ir.Shape(array.shape))
            folded.const_value = tensor
            output.name = f"{output.name}.computed"
            output.replace_all_uses_with(folded)
            graph.register_initializer(folded)
        if made is not None:
            graph.remove(node, safe=True)


def _is_small_constant(value: ir.Value) -> bool:
    known = value.const_value if value.is_initializer() and not value.is_graph_input() else None
    return known is not None and known.size <= _FOLDED_ELEMENTS


class _Narrowing:
    """The rewriting of one graph."""

    def __init__(self, graph: ir.Graph, islands: Islands, dtype: ir.DataType) -> None:
        self._graph, self._islands, self._dtype = graph, islands, dtype
        self._suffix = dtype.numpy().name
        # By the value as it was: its narrow form and, where its node gives that now, its float32.
        self._halves: dict[ir.Value, ir.Value] = {}
        self._floats: dict[ir.Value, ir.Value] = {}

    def run(self) -> bool:
        """Whether anything was narrowed."""
        modified = False
        for node in list(self._graph):
            if node in self._islands.wide:
                self._widen(node)
            elif self._narrow(node):
                modified = True
        return modified

    def _narrow(self, node: ir.Node) -> bool:
        inputs, outputs = self._islands.signature(node)
        changed = False
        for i, value in enumerate(node.inputs):
            if value is None or not self._is_float(value):
                continue
            if inputs[i]:
                node.replace_input_with(i, self._half(value))
                changed = True
            elif self._halves.get(value) is value:
                node.replace_input_with(i, self._wide(value))
        if not changed:
            return False
        for output, narrows in zip(node.outputs, outputs, strict=True):
            if narrows and output.dtype == _FLOAT:
                output.dtype = self._dtype
                self._halves[output] = output
        if is_standard(node, "Attention"):
            node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", _FLOAT)
        return True

    def _is_float(self, value: ir.Value) -> bool:
        return value.dtype == _FLOAT or value in self._halves

    def _widen(self, node: ir.Node) -> None:
        for i, value in enumerate(node.inputs):
            if value is not None and self._halves.get(value) is value:
                node.replace_input_with(i, self._wide(value))
        for attribute in node.attributes.values():
            graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else []
            graphs = list(attribute.value) if attribute.type == ir.AttributeType.GRAPHS else graphs
            for graph in graphs:
                self._widen_captured(graph, node)

    def _widen_captured(self, graph: ir.Graph, outer: ir.Node) -> None:
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for i, value in enumerate(inner.inputs):
                if value is not None and self._halves.get(value) is value:
                    inner.replace_input_with(i, self._wide(value))
        for i, value in enumerate(graph.outputs):
            if self._halves.get(value) is value:
                graph.outputs[i] = self._wide(value)

    def _wide(self, value: ir.Value) -> ir.Value:
        if value not in self._floats:
            self._floats[value] = self._cast(value, _FLOAT, "float32")
        return self._floats[value]

    def _half(self, value: ir.Value) -> ir.Value:
        if value not in self._halves:
            self._halves[value] = self._made_half(value)
        return self._halves[value]

    def _made_half(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        if value.is_initializer() and value.const_value is not None:
            return self._weight(value)
        if node is not None and self._islands.kind(value) is Kind.CONSTANT and len(node.outputs) == 1:
            return self._constant(value, node)
        return self._cast(value, self._dtype, self._suffix)

    def _constant(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """What follows from weights: a transposed one is made of the narrowed weight, a product is rounded after."""
        takes, _ = self._islands.signature(node)
        if node.op_type not in (*MOVES, "Cast") or not all(
            takes[i] for i, v in enumerate(node.inputs) if v is not None and v.dtype == _FLOAT
        ):
            return self._cast(value, self._dtype, self._suffix)
        inputs = [self._half(v) if v is not None and v.dtype == _FLOAT else v for v in node.inputs]
        attributes = {name: a for name, a in node.attributes.items() if not (node.op_type == "Cast" and name == "to")}
        if node.op_type == "Cast":
            attributes["to"] = ir.AttrInt64("to", self._dtype)
        made = ir.Node(node.domain, node.op_type, inputs, attributes=list(attributes.values()))
        self._graph.insert_before(node, made)
        return _named(made.outputs[0], value, self._dtype, self._suffix)

    def _weight(self, value: ir.Value) -> ir.Value:
        held = value.const_value
        assert held is not None
        dtype = self._dtype
        half = ir.Value(name=f"{value.name}.{self._suffix}", type=ir.TensorType(dtype), shape=value.shape)
        half.const_value = ir.LazyTensor(
            lambda: ir.tensor(_rounded(held, dtype), name=half.name),
            dtype,
            ir.Shape(held.shape.numpy()),
            name=half.name,
        )
        self._graph.register_initializer(half)
        return half

    def _cast(self, value: ir.Value, dtype: ir.DataType, suffix: str) -> ir.Value:
        cast = ir.node("Cast", [value], {"to": dtype})
        node = value.producer()
        if node is None or node.graph is not self._graph:
            self._graph.insert_before(self._graph.node(0), cast)
        else:
            self._graph.insert_after(node, cast)
        return _named(cast.outputs[0], value, dtype, suffix)


def _rounded(tensor: ir.TensorProtocol, dtype: ir.DataType) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):  # a bound that is none; small weights among larger ones
        rounded = tensor.numpy().astype(dtype.numpy())
    forget(tensor)
    return rounded


def _named(made: ir.Value, like: ir.Value, dtype: ir.DataType, suffix: str) -> ir.Value:
    made.name, made.dtype, made.shape = f"{like.name}.{suffix}", dtype, like.shape
    return made


def _cast_outputs(graph: ir.Graph, indices: Sequence[int], dtype: ir.DataType) -> None:
    """Of these outputs those that became narrow are cast back, under their names."""
    for i in indices:
        output = graph.outputs[i]
        if output.dtype != dtype:
            continue
        cast = ir.node("Cast", [output], {"to": _FLOAT})
        graph.append(cast)
        wide = cast.outputs[0]
        wide.dtype, wide.shape, wide.name = _FLOAT, output.shape, output.name
        output.name = f"{output.name}.{dtype.numpy().name}"
        graph.outputs[i] = wide


def _is_gated_sum(node: ir.Node) -> bool:
    """Whether a node adds to a residual stream what a gate ``[B, 1, D]`` let through."""
    if not is_standard(node, "Add"):
        return False
    for x, gated in (node.inputs, node.inputs[::-1]):
        multiply = gated.producer() if gated is not None else None
        if x is None or gated is None or not is_standard(multiply, "Mul") or only_consumer(gated) is not node:
            continue
        for gate, z in (multiply.inputs, multiply.inputs[::-1]):
            if x.dtype == _FLOAT and z is not None and modulates(gate, x) and same_shape(x, z):
                return True
    return False


def _clip(graph: ir.Graph, value: ir.Value) -> None:
    bounds: Sequence[ir.Value] = [_bound(graph, sign) for sign in (-1, 1)]
    clip = ir.node("Clip", [value, *bounds])
    node = value.producer()
    assert node is not None
    clipped = clip.outputs[0]
    clipped.dtype, clipped.shape = _HALF, value.shape
    value.replace_all_uses_with(clipped, replace_graph_outputs=True)
    clip.replace_input_with(0, value)
    clipped.name, value.name = value.name, f"{value.name}.unclipped"
    graph.insert_after(node, clip)


def _bound(graph: ir.Graph, sign: int) -> ir.Value:
    name = f"float16.{'largest' if sign > 0 else 'least'}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(sign * _MAX, np.float16), name=name)
        value = ir.Value(name=name, type=ir.TensorType(_HALF), shape=ir.Shape([]), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
