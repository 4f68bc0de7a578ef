"""What an ONNX file that others wrote says of itself: inputs, dims, weights, operators. No external data is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from intaglio.engines.model_engine import NO_MAXIMUM, ModelTensor
from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim

_PROTOBUF_LIMIT = 2**31 - 1
# Exporters write these where they know no name. They say nothing, least of all that two dims are equal.
_NO_NAMES = frozenset({"", "?", "*", "-1", "None", "none", "unk", "unknown"})
_STANDARD_DOMAINS = frozenset({"", "ai.onnx"})


@dataclass(frozen=True)
class Weight:
    """A tensor of the file. ``location`` is its external file; ``constant``: it is the value of a Constant node."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    constant: bool
    location: str | None = None
    offset: int = 0

    @property
    def held_as(self) -> str:
        """Where the bytes are."""
        held = "constant node" if self.constant else "initializer"
        return held if self.location is None else f"{held}, external"


@dataclass(frozen=True)
class OnnxFile:
    """The description of one file. Operators are counted with those of subgraphs, as ``domain::op`` outside ONNX."""

    path: Path
    producer: str
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    dims: dict[str, Dim]
    weights: tuple[Weight, ...]
    operators: dict[str, int]
    functions: dict[str, int]

    @property
    def custom_domains(self) -> dict[str, list[str]]:
        """Operators outside the standard domains that no function of the file defines, by domain."""
        domains: dict[str, list[str]] = {}
        for name in self.operators:
            domain, separator, op_type = name.rpartition("::")
            if separator and name not in self.functions:
                domains.setdefault(domain, []).append(op_type)
        return domains

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def weight_count(self) -> int:
        """Values of all weights."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    def sizes_by_dtype(self) -> dict[tuple[str, str], list[int]]:
        """Bytes of each tensor, by dtype and by what holds it."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for weight in self.weights:
            sizes.setdefault((weight.dtype, weight.held_as), []).append(weight.nbytes)
        return sizes

    @property
    def external_files(self) -> dict[str, int]:
        """External data files by location, with the bytes that the file needs of each."""
        sizes: dict[str, int] = {}
        for weight in self.weights:
            if weight.location is not None:
                sizes[weight.location] = max(sizes.get(weight.location, 0), weight.offset + weight.nbytes)
        return sizes


def read_onnx(path: Path) -> OnnxFile:
    """Reads and describes the file. Raises CompileError for one that is broken, too large or says impossible things."""
    model = parse_onnx(path)
    graph = model.graph
    initialized = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    names = _DimNames(model)
    # Old files list initializers among the inputs, as defaults.
    inputs = tuple(_tensor(path, value, "input", names) for value in graph.input if value.name not in initialized)
    outputs = tuple(_tensor(path, value, "output", names) for value in graph.output)
    dims = {name: Dim(min=1, max=NO_MAXIMUM) for t in inputs for name in t.shape or () if isinstance(name, str)}
    operators = Counter(_operator(node.domain, node.op_type) for node in _nodes(model))
    functions = {_operator(f.domain, f.name): len(f.node) for f in model.functions}
    return OnnxFile(
        path=path,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets={opset.domain or "ai.onnx": opset.version for opset in model.opset_import},
        inputs=inputs,
        outputs=outputs,
        dims=dims,
        weights=tuple(_weight(path, tensor, name, constant) for tensor, name, constant in _weights(model)),
        operators=dict(operators.most_common()),
        functions=functions,
    )


def parse_onnx(path: Path) -> onnx.ModelProto:
    """The protobuf message in the file. Raises CompileError."""
    try:
        size = path.stat().st_size
        if size > _PROTOBUF_LIMIT:
            raise CompileError(
                f"{path}: has {size / 2**30:.1f} GiB, and a protobuf file ends at 2 GiB, so it is no whole ONNX file; "
                "save the model with its weights as external data"
            )
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise CompileError(f"{path}: cannot be read ({error.strerror}); expected an ONNX file") from error
    except DecodeError as error:
        raise CompileError(f"{path}: is no ONNX file, or is damaged or cut short ({error})") from error
    if not size:
        raise CompileError(f"{path}: is empty; expected an ONNX file")
    garbled = next(_garbled(model), None)
    if garbled is not None:
        raise CompileError(
            f"{path}: holds the text {garbled!r}, which is no UTF-8; the file is damaged, or rename it there"
        )
    return model


def _garbled(message: Message) -> Iterator[bytes]:
    """Texts that are no UTF-8, which protobuf gives as bytes."""
    for field, value in message.ListFields():
        values = [value] if isinstance(value, (str, bytes, Message)) else value
        if field.type == field.TYPE_STRING:
            yield from (each for each in values if isinstance(each, bytes))
        elif field.type == field.TYPE_MESSAGE:
            for each in values:
                yield from _garbled(each)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the message, those of subgraphs, functions and attributes included."""
    for graph in _graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in _nodes(model):
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for value in [*sparse, *attribute.sparse_tensors]:
        yield from (value.values, value.indices)


def _weights(model: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, str, bool]]:
    for graph in _graphs(model):
        for tensor in graph.initializer:
            yield tensor, tensor.name, False
        for sparse in graph.sparse_initializer:
            yield sparse.values, sparse.values.name, False
            yield sparse.indices, f"{sparse.values.name}.indices", False
    for node in _nodes(model):
        for attribute in node.attribute:
            name = node.output[0] if node.op_type == "Constant" and node.output else f"{node.name}.{attribute.name}"
            for tensor in _attribute_tensors(attribute):
                yield tensor, name, True


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield model.graph
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs:
                waiting.extend(graph.node)


def _operator(domain: str, op_type: str) -> str:
    return op_type if domain in _STANDARD_DOMAINS else f"{domain}::{op_type}"


def _weight(path: Path, tensor: onnx.TensorProto, name: str, constant: bool) -> Weight:
    dtype = _data_type(path, name, tensor.data_type)
    shape = tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise CompileError(f"{path}: the tensor {name!r} has the shape {list(shape)}")
    count = 1
    for size in shape:
        count *= size
    nbytes = (count * dtype.bitwidth + 7) // 8 if dtype != ir.DataType.STRING else sum(map(len, tensor.string_data))
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return Weight(name, _numpy_name(dtype), shape, nbytes, constant)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
    except ValueError as error:
        raise CompileError(f"{path}: the external data of {name!r} has no number as offset or length") from error
    if offset < 0 or length != nbytes:
        raise CompileError(
            f"{path}: the tensor {name!r} takes {nbytes} bytes, but its external data has offset {offset}, "
            f"length {length}"
        )
    location = _checked_location(path, name, entries.get("location", ""))
    return Weight(name, _numpy_name(dtype), shape, nbytes, constant, location, offset)


def _checked_location(path: Path, name: str, location: str) -> str:
    inner = PurePosixPath(location)
    # A backslash or a colon leads elsewhere on another system.
    if not inner.parts or inner.is_absolute() or ".." in inner.parts or re.search(r"[\\:\0]", location):
        raise CompileError(
            f"{path}: the external data of {name!r} lies at {location!r}, which is no path inside the model's folder"
        )
    return str(inner)


def _data_type(path: Path, name: str, number: int) -> ir.DataType:
    try:
        dtype = ir.DataType(number)
    except ValueError as error:
        raise CompileError(f"{path}: {name!r} has the data type {number}, which is unknown") from error
    if dtype == ir.DataType.UNDEFINED:
        raise CompileError(f"{path}: {name!r} has no data type")
    return dtype


def _numpy_name(dtype: ir.DataType) -> str:
    return "string" if dtype == ir.DataType.STRING else str(dtype.numpy())


class _DimNames:
    """Names for dims: the file's own, or made from the input and the axis where it has none."""

    def __init__(self, model: onnx.ModelProto) -> None:
        values = [*model.graph.input, *model.graph.output]
        self._taken = {d.dim_param for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}

    def size(self, value: str, axis: int, dim: onnx.TensorShapeProto.Dimension) -> int | str:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            return dim.dim_value
        name = dim.dim_param.strip()
        # Names with these could not be said in --shapes.
        if name not in _NO_NAMES and not re.search("[,=]", name):
            return name
        made = re.sub(r"[^\w.]", "_", f"{value}_dim{axis}")
        while made in self._taken:
            made += "_"
        self._taken.add(made)
        return made


def _tensor(path: Path, value: onnx.ValueInfoProto, what: str, names: _DimNames) -> ModelTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "untyped value").removesuffix("_type")
        raise CompileError(f"{path}: the {what} {value.name!r} is a {found}; only tensors can be fed and returned")
    tensor = value.type.tensor_type
    dtype = _numpy_name(_data_type(path, value.name, tensor.elem_type))
    if not tensor.HasField("shape"):
        return ModelTensor(name=value.name, dtype=dtype, shape=None)
    shape = tuple(names.size(value.name, axis, dim) for axis, dim in enumerate(tensor.shape.dim))
    return ModelTensor(name=value.name, dtype=dtype, shape=shape)
