"""A saved .mlpackage, checked, as a :class:`Program`. Knows coremltools' protobuf classes and nothing else of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from intaglio.engines.coreml.evaluator.blobs import SUB_BYTE, unpack_bits
from intaglio.engines.coreml.evaluator.program import (
    NUMPY_TYPES,
    Binding,
    Block,
    Constant,
    Feature,
    Function,
    ListType,
    Operation,
    Program,
    Reference,
    StateType,
    TensorType,
    Value,
    ValueType,
)
from intaglio.engines.coreml.protobuf import model_class
from intaglio.errors import EngineError

_FORMAT_VERSION = "1.0.0"
_MODEL_PATH = "@model_path/"
# Core ML's element types of arrays, by the number in the description.
_ARRAY_TYPES = {65552: "FLOAT16", 65568: "FLOAT32", 65600: "FLOAT64", 131104: "INT32", 131080: "INT8"}
_AS_BYTES = frozenset({"FLOAT16", "INT8", "UINT8", "UINT32", "UINT64", *SUB_BYTE})


def read_program(path: str | Path) -> Program:
    """Reads a package. Raises EngineError for one that is damaged or is not an ML program."""
    path = Path(path)
    model_path = _model_file(path)
    spec = model_class()()
    try:
        spec.ParseFromString(model_path.read_bytes())
    except DecodeError as error:
        raise EngineError(f"{model_path} is damaged: {error}. Compile the model again.") from error
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise EngineError(f"{path} holds a model of type {kind}, expected mlProgram")
    reader = _Reader(model_path.parent)
    described = {function.name: function for function in spec.description.functions}
    functions = {}
    for name, function in spec.mlProgram.functions.items():
        description = described.get(name, spec.description)
        if described and name not in described:
            raise EngineError(f"{path}: the function {name!r} of the program is not described")
        functions[name] = reader.function(name, function, description)
    default = spec.description.defaultFunctionName or "main"
    return Program(path, spec.specificationVersion, default, functions)


def _model_file(path: Path) -> Path:
    """The root model of the package, after checking its manifest."""
    manifest_path = path / "Manifest.json"
    try:
        manifest = json.loads(manifest_path.read_bytes())
        items = {key: _item_path(path, entry["path"]) for key, entry in manifest["itemInfoEntries"].items()}
        version, root = manifest["fileFormatVersion"], manifest["rootModelIdentifier"]
    except OSError as error:
        raise EngineError(f"{path} is not a Core ML package: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{manifest_path} is damaged: {error!r}. Compile the model again.") from error
    if version != _FORMAT_VERSION:
        raise EngineError(f"{manifest_path} is of version {version!r}, expected {_FORMAT_VERSION!r}")
    if root not in items:
        raise EngineError(f"{manifest_path} names the root model {root!r}, which is not among its items")
    for item in items.values():
        if not item.exists():
            raise EngineError(f"{manifest_path} lists {item}, which does not exist. Compile the model again.")
    for file in sorted((path / "Data").rglob("*")):
        if file.is_file() and not any(file == item or item in file.parents for item in items.values()):
            raise EngineError(f"{file} is not listed in {manifest_path}")
    return items[root]


def _item_path(package: Path, relative: str) -> Path:
    item = package / "Data" / relative
    if ".." in Path(relative).parts or Path(relative).is_absolute():
        raise EngineError(f"{package}/Manifest.json lists {relative!r}, which is outside of the package")
    return item


class _Reader:
    """Protobuf messages of one package to the program's dataclasses."""

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder

    def function(self, name: str, message: Any, description: Any) -> Function:
        if message.opset not in message.block_specializations:
            raise EngineError(f"the function {name!r} has no block for its opset {message.opset!r}")
        return Function(
            name=name,
            opset=message.opset,
            parameters=tuple(Value(item.name, _type(item.type)) for item in message.inputs),
            inputs=_features(description.input),
            outputs=_features(description.output),
            states=_features(description.state),
            block=self.block(message.block_specializations[message.opset]),
        )

    def block(self, message: Any) -> Block:
        return Block(
            inputs=tuple(Value(item.name, _type(item.type)) for item in message.inputs),
            outputs=tuple(message.outputs),
            operations=tuple(self.operation(item) for item in message.operations),
        )

    def operation(self, message: Any) -> Operation:
        outputs = tuple(Value(item.name, _type(item.type)) for item in message.outputs)
        name = outputs[0].name if outputs else message.type
        arguments: dict[str, tuple[Binding, ...]] = {}
        for key, value in message.attributes.items():
            if key == "name":
                name = str(self.constant(value).value)
            elif message.type == "const" or message.type.startswith("constexpr_"):
                arguments[key] = (self.constant(value),)
        for key, argument in message.inputs.items():
            arguments[key] = tuple(self.binding(item) for item in argument.arguments)
        return Operation(message.type, name, arguments, outputs, tuple(self.block(item) for item in message.blocks))

    def binding(self, message: Any) -> Binding:
        if message.WhichOneof("binding") == "name":
            return Reference(message.name)
        return self.constant(message.value)

    def constant(self, message: Any) -> Constant:
        kind = _type(message.type)
        if message.WhichOneof("value") == "blobFileValue":
            file = message.blobFileValue.fileName
            if not file.startswith(_MODEL_PATH) or ".." in Path(file).parts:
                raise EngineError(f"a constant lies in the file {file!r}, expected one under {_MODEL_PATH!r}")
            return Constant(
                kind, file=self._folder / file.removeprefix(_MODEL_PATH), offset=message.blobFileValue.offset
            )
        return Constant(kind, _immediate(message.immediateValue, kind))


def _immediate(message: Any, kind: ValueType) -> Any:
    if message.WhichOneof("value") == "list":
        return [_immediate(item.immediateValue, _type(item.type)) for item in message.list.values]
    if message.WhichOneof("value") != "tensor" or not isinstance(kind, TensorType):
        raise EngineError(f"a constant holds a {message.WhichOneof('value')}, expected a tensor or a list")
    field = message.tensor.WhichOneof("value")
    values: Any = getattr(message.tensor, field).values if field else ()
    shape = tuple(size or 0 for size in kind.shape or ())
    count = math.prod(shape)
    if kind.dtype == "STRING":
        return values[0] if not shape else list(values)
    dtype = np.dtype(NUMPY_TYPES[kind.dtype])
    if field == "bytes":
        if kind.dtype not in _AS_BYTES:
            raise EngineError(f"a constant of {kind.dtype} is stored as bytes")
        packed = np.frombuffer(values, np.uint8)
        array = unpack_bits(packed, kind.dtype, count) if kind.dtype in SUB_BYTE else packed.view(dtype)
    else:
        array = np.array(values, dtype)
    if array.size != count:
        raise EngineError(f"a constant of shape {list(shape)} has {array.size} values")
    return array.reshape(shape)


def _type(message: Any) -> ValueType:
    kind = message.WhichOneof("type")
    if kind == "tensorType":
        return _tensor_type(message.tensorType)
    if kind == "stateType":
        return StateType(_tensor_type(message.stateType.wrappedType.tensorType))
    if kind == "listType":
        return ListType(_tensor_type(message.listType.type.tensorType))
    raise EngineError(f"a value of the program is a {kind}; tensors, lists of tensors and states are known")


def _tensor_type(message: Any) -> TensorType:
    dtype = type(message).DESCRIPTOR.fields_by_name["dataType"].enum_type.values_by_number[message.dataType].name
    if dtype not in NUMPY_TYPES:
        raise EngineError(f"a value of the program has the data type {dtype}, which is not known here")
    dims: list[int | None] = []
    for dim in message.dimensions:
        if dim.WhichOneof("dimension") == "unknown" and dim.unknown.variadic:
            return TensorType(dtype, None)
        dims.append(dim.constant.size if dim.WhichOneof("dimension") == "constant" else None)
    return TensorType(dtype, tuple(dims))


def _features(messages: Iterable[Any]) -> tuple[Feature, ...]:
    return tuple(_feature(message) for message in messages)


def _feature(message: Any) -> Feature:
    kind = message.type.WhichOneof("Type")
    if kind not in ("multiArrayType", "stateType"):
        raise EngineError(f"{message.name!r} is described as {kind}, only arrays are evaluated")
    array = message.type.multiArrayType if kind == "multiArrayType" else message.type.stateType.arrayType
    if array.dataType not in _ARRAY_TYPES:
        raise EngineError(f"{message.name!r} is described with the element type {array.dataType}, which is not known")
    flexible = array.WhichOneof("ShapeFlexibility")
    enumerated = tuple(tuple(shape.shape) for shape in array.enumeratedShapes.shapes)
    ranges = tuple(
        (size.lowerBound, None if size.upperBound < 0 else size.upperBound) for size in array.shapeRange.sizeRanges
    )
    default = array.WhichOneof("defaultOptionalValue")
    return Feature(
        name=message.name,
        dtype=_ARRAY_TYPES[array.dataType],
        shape=tuple(array.shape),
        ranges=ranges if flexible == "shapeRange" else None,
        enumerated=enumerated if flexible == "enumeratedShapes" else None,
        optional=message.type.isOptional,
        default=float(getattr(array, default)) if default else 0.0,
    )
