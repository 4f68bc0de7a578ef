"""How large the float16 and bfloat16 activations of a lowered graph become, in float32: what may overflow on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.nvidia.evaluation import open_lowered
from intaglio.errors import EngineError, InputError
from intaglio.kernels.grouped_quant import DOMAIN

# Nodes that run at once, and the bytes of what they give that a piece may hold before the next is made smaller.
_MOST_NODES, _MOST_BYTES = 64, 256 << 20
_FLOAT, _BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# What these give is not computed: a minus infinity comes of a constant, or of a node before.
_CHOOSING = frozenset(
    {
        *("Where", "Cast", "Concat", "Expand", "Gather", "Identity"),
        *("Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
    }
)


@dataclass(frozen=True)
class LargeActivation:
    """A tensor whose largest magnitude, ``max_abs``, is more than half of what its ``dtype`` holds, its ``maximum``.

    ``node`` and ``op_type`` are what makes it. ``max_abs`` is infinite where a value is not finite in float32 either.
    ``stage`` is the caller's.
    """

    name: str
    node: str
    op_type: str
    dtype: str
    max_abs: float
    maximum: float
    stage: str = ""


def large_activations(
    model: ir.Model, feeds: Mapping[str, np.ndarray], *, most_bytes: int = _MOST_BYTES
) -> list[LargeActivation]:
    """Runs a ``model``, which is used up, in float32, and names what in its own dtype comes within a factor of two of
    the end, in order of computation.

    Looked at is what the main graph computes of its inputs in float16 or bfloat16, and gives float32 islands to read;
    what is float32 itself is not, nor is what fused nodes hold inside. The graph runs piece by piece, each of so many
    nodes that what they give stays near ``most_bytes``, beside what later pieces read. Raises InputError for feeds that
    are missing, EngineError, RuntimeMissingError.
    """
    infer_shapes(model)
    seen = _activations(model.graph)
    missing = [str(value.name) for value in model.graph.inputs if value.name not in feeds]
    if missing:
        raise InputError(f"{model.graph.name}: the input {missing[0]!r} is missing, and its activations follow from it")
    for dtype in _HALVES:
        WidenDtypePass(dtype, [DOMAIN])(model)
    kinds = {str(value.name): _kind(value) for value in _values(model.graph)}
    found: list[LargeActivation] = []
    with tempfile.TemporaryDirectory(prefix="intaglio-ranges-") as folder:
        path = Path(folder) / "widened.onnx"
        write_graph(model, path)
        proto = onnx.load(path, load_external_data=False)
        for name, value in _run_in_pieces(proto, kinds, dict(feeds), seen, path.parent, most_bytes):
            node, op_type, narrow = seen[name]
            maximum = float(ml_dtypes.finfo(narrow).max)
            # Of a mask, that of hidden scores is chosen; one that is computed is named at the node that does.
            largest = _magnitude(value[value != -np.inf] if op_type in _CHOOSING else value)
            if largest > maximum / 2:
                found.append(LargeActivation(name, node, op_type, narrow, largest, maximum))
    return found


def _activations(graph: ir.Graph) -> dict[str, tuple[str, str, str]]:
    """Of each narrow value that follows from an input: its node, the op, the dtype, by name."""
    follows = set(graph.inputs)
    seen = {}
    for node in graph:
        if not any(value in follows for value in _read(node)):
            continue
        follows.update(node.outputs)
        for value in node.outputs:
            if value.dtype in _HALVES:
                assert value.dtype is not None
                seen[str(value.name)] = node.name or str(value.name), node.op_type, value.dtype.numpy().name
    return seen


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, in its subgraphs as well."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if isinstance(attribute, ir.Attr) and attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value
            for graph in graphs:
                for inner in ir.traversal.RecursiveGraphIterator(graph):
                    yield from (value for value in inner.inputs if value is not None)
                yield from graph.outputs


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _kind(value: ir.Value) -> int:
    return int(value.dtype) if value.dtype is not None else onnx.TensorProto.UNDEFINED


def _magnitude(array: np.ndarray) -> float:
    if not np.isfinite(array).all():
        return float("inf")
    return float(np.abs(array).max(initial=0))


def _run_in_pieces(
    model: onnx.ModelProto,
    kinds: Mapping[str, int],
    held: dict[str, np.ndarray],
    wanted: Mapping[str, object],
    folder: Path,
    most_bytes: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """The ``wanted`` values, each once. ``held`` has the inputs, and then what later nodes read."""
    held = {name: _as_fed(array, kinds[name]) for name, array in held.items() if name in kinds}
    nodes = list(model.graph.node)
    reads = [set(_names_read(node)) for node in nodes]
    last = {name: i for i, names in enumerate(reads) for name in names}
    start, count = 0, _MOST_NODES
    while start < len(nodes):
        piece = range(start, min(start + count, len(nodes)))
        made = [name for i in piece for name in nodes[i].output if name]
        outputs = [name for name in made if name in wanted or last.get(name, -1) >= piece.stop]
        inputs = {name for i in piece for name in reads[i]} & held.keys()
        results = _run_piece(model, [nodes[i] for i in piece], inputs, outputs, kinds, held, folder)
        given = sum(array.nbytes for array in results.values())
        for name in outputs:
            if name in wanted:
                yield name, results[name]
        held = {n: array for n, array in {**held, **results}.items() if last.get(n, -1) >= piece.stop}
        start = piece.stop
        # What the next nodes give is about what these gave.
        count = min(_MOST_NODES, max(1, len(piece) * most_bytes // max(given, 1)))


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            for inner in graph.node:
                yield from _names_read(inner)
            yield from (output.name for output in graph.output)


def _run_piece(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    inputs: set[str],
    outputs: Sequence[str],
    kinds: Mapping[str, int],
    held: Mapping[str, np.ndarray],
    folder: Path,
) -> dict[str, np.ndarray]:
    if not outputs:
        return {}
    read = {name for node in nodes for name in _names_read(node)}
    # NumPy has no bfloat16, of which rows of tables still are: float32 carries them from piece to piece.
    carried = {name: f"{name}.carried" for name in {*inputs, *outputs} if kinds[name] == _BFLOAT16}
    fed = [_cast(carried[name], name, _BFLOAT16) for name in inputs if name in carried]
    given = [_cast(name, carried[name], _FLOAT) for name in outputs if name in carried]
    piece = onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=onnx.GraphProto(
            name=model.graph.name or "piece",
            node=[*fed, *nodes, *given],
            input=[_described(carried.get(n, n), _FLOAT if n in carried else kinds[n]) for n in sorted(inputs)],
            # What inference does not know, the runtime does.
            output=[onnx.ValueInfoProto(name=carried.get(name, name)) for name in outputs],
            initializer=[tensor for tensor in model.graph.initializer if tensor.name in read],
        ),
    )
    session = open_lowered(piece.SerializeToString(), f"{model.graph.name}, from {nodes[0].name!r}", folder)
    try:
        found = session.run(
            [carried.get(name, name) for name in outputs], {carried.get(name, name): held[name] for name in inputs}
        )
    except Exception as error:  # onnxruntime's errors have no common base of their own
        ends = f"{nodes[0].name!r} to {nodes[-1].name!r}"
        raise EngineError(f"{model.graph.name}: onnxruntime cannot run {ends}: {error}") from error
    return dict(zip(outputs, found, strict=True))


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    to = onnx.AttributeProto(name="to", type=onnx.AttributeProto.INT, i=kind)
    return onnx.NodeProto(name=target, op_type="Cast", input=[source], output=[target], attribute=[to])


def _described(name: str, kind: int) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    info.type.tensor_type.elem_type = kind
    return info


def _as_fed(array: np.ndarray, kind: int) -> np.ndarray:
    return array.astype(np.float32) if kind == _FLOAT else array
