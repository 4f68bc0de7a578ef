"""What a package holds, in its metadata: functions with their inputs, outputs, states and sizes.

A package says its own names, dtypes and shapes. This says what they were in the ONNX graph, and how the functions of
one package belong together, for whoever runs it: on a Mac, in Swift, in the evaluator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from intaglio.engines.coreml.manifest import MODEL, write_manifest
from intaglio.engines.coreml.protobuf import model_class
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import DtypeName

if TYPE_CHECKING:
    import onnx_ir as ir

    from intaglio.engines.coreml.conversion import Converted, Port

# Under what name.
METADATA = "intaglio.functions"
SCHEMA_VERSION: Literal[1] = 1
# The function that runs where none is named.
MAIN = "main"
# What a package with a key-value cache calls the function of one token, and that of a chunk of them.
DECODE, PREFILL = "decode", "prefill"

PackageDtype = Literal["float32", "float16", "int32"]
Size = Annotated[int, Field(ge=1)]
_PACKAGE_DTYPES: dict[str, PackageDtype] = {"fp32": "float32", "fp16": "float16", "int32": "int32"}
_INT32 = np.iinfo(np.int32)


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorDescription(_Schema):
    """An input or output. ``name``, ``dtype`` (as NumPy spells it) and ``shape`` are the ONNX graph's.

    Strings in ``shape`` are dims that vary, bounded in the function's ``dims``. In the package it is called
    ``package_name`` and is of ``package_dtype``: integers are int32, booleans int32 of 0 and 1, and a scalar has the
    shape [1].
    """

    name: str
    package_name: str
    dtype: DtypeName
    package_dtype: PackageDtype
    shape: tuple[int | str, ...]

    def pack(self, array: np.ndarray) -> np.ndarray:
        """A value of the graph as the package takes it. Raises InputError for integers that do not fit."""
        array = np.atleast_1d(np.asarray(array))
        if self.package_dtype == "int32" and array.dtype.kind == "f":
            raise InputError(f"{self.name} is {array.dtype}, expected {self.dtype}")
        if self.package_dtype == "int32" and array.dtype.kind in "iu" and array.size:
            low, high = int(array.min()), int(array.max())
            if low < _INT32.min or high > _INT32.max:
                found = low if low < _INT32.min else high
                raise InputError(f"{self.name} holds {found}, and Core ML's integers end at {_INT32.max}")
        return np.ascontiguousarray(array, dtype=self.package_dtype)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        """A value that the package gave, as the graph's; bfloat16 comes as float32, which NumPy has."""
        array = np.asarray(array).reshape(()) if not self.shape else np.asarray(array)
        return array.astype("float32" if self.dtype == "bfloat16" else self.dtype, copy=False)


class StateDescription(_Schema):
    """A buffer that outlives a run: ``package_name``, float16 of a fixed shape, zero at first.

    ``past`` and ``present`` are the ONNX graph's input and output that it stands for.
    """

    package_name: str
    shape: tuple[Size, ...]
    past: str
    present: str


class DimRange(_Schema):
    """Least and greatest size of a dim that varies."""

    min: Size
    max: Size


class CacheDescription(_Schema):
    """A key-value cache that is kept in states of ``context`` tokens each.

    A call appends ``tokens`` tokens behind those that are there; ``position`` is the ONNX name of the input, int64
    ``[1]``, that says how many there are. What is behind a query's own position is never seen.
    """

    context: Size
    tokens: Size
    position: str


class FunctionDescription(_Schema):
    """One function. ``sizes`` are the dims of the graph that are fixed in it, ``dims`` those that vary."""

    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    states: tuple[StateDescription, ...] = ()
    sizes: dict[str, Size] = {}
    dims: dict[str, DimRange] = {}
    cache: CacheDescription | None = None

    def pack(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Feeds by their ONNX names as the package takes them, by its names. Raises InputError."""
        names = [tensor.name for tensor in self.inputs]
        missing, unknown = sorted(set(names) - set(feeds)), sorted(set(feeds) - set(names))
        if missing or unknown:
            raise InputError(f"inputs are missing: {missing}; or unknown: {unknown}; there are {names}")
        return {tensor.package_name: tensor.pack(feeds[tensor.name]) for tensor in self.inputs}

    def unpack(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the package gave, by ONNX names and in ONNX dtypes."""
        return {tensor.name: tensor.unpack(outputs[tensor.package_name]) for tensor in self.outputs}

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes of named dims are among its own."""
        fixed = all(sizes.get(name, size) == size for name, size in self.sizes.items())
        return fixed and all(d.min <= sizes.get(name, d.min) <= d.max for name, d in self.dims.items())


class PackageDescription(_Schema):
    """All functions of a package."""

    schema_version: Literal[1] = SCHEMA_VERSION
    default_function: str = MAIN
    functions: dict[str, FunctionDescription]

    @model_validator(mode="after")
    def _check(self) -> PackageDescription:
        if self.default_function not in self.functions:
            raise ValueError(f"the default function {self.default_function!r} is not among {sorted(self.functions)}")
        return self

    def function_for(self, sizes: Mapping[str, int]) -> str:
        """The first function that has these sizes of named dims. Raises InputError with those that there are."""
        for name, function in self.functions.items():
            if function.allows(sizes):
                return name
        raise InputError(
            f"the package has no function for the sizes {_listed(sizes)}; it has {'; '.join(self._in_words())}. "
            "Compile it with these: --shapes may be given several times"
        )

    def _in_words(self) -> Iterator[str]:
        for name, function in self.functions.items():
            ranges = {dim: f"{bounds.min}..{bounds.max}" for dim, bounds in function.dims.items()}
            yield f"{name} ({_listed({**function.sizes, **ranges})})"


def write_description(package: Path, description: PackageDescription) -> None:
    """Puts the description into the metadata of a package, the same to the byte every time."""
    spec = _read_model(package)
    spec.description.metadata.userDefined[METADATA] = description.model_dump_json()
    (package / "Data" / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    write_manifest(package)


def read_description(package: Path) -> PackageDescription:
    """Reads it from the metadata of a package. Raises EngineError if it is missing or damaged."""
    found = _read_model(package).description.metadata.userDefined
    if METADATA not in found:
        raise EngineError(
            f"{package} was not written by Intaglio: its metadata lack {METADATA}. Compile the model again."
        )
    try:
        return PackageDescription.model_validate_json(found[METADATA])
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise EngineError(f"{package} is damaged: {at}: {first['msg']}. Compile the model again.") from error


def _read_model(package: Path) -> Any:
    file = package / "Data" / MODEL
    try:
        return model_class().FromString(file.read_bytes())
    except OSError as error:
        raise EngineError(f"cannot read {file}: {error}. Compile the model again.") from error
    except DecodeError as error:
        raise EngineError(f"{file} is damaged: {error}. Compile the model again.") from error


def describe(
    converted: Converted, sizes: Mapping[str, int] | None = None, cache: CacheDescription | None = None
) -> FunctionDescription:
    """The description of a converted model's function. ``sizes`` are the named dims that were fixed."""
    varying = {
        size: DimRange(min=low, max=high)
        for port in converted.inputs
        for size, (low, high) in zip(port.shape, port.bounds, strict=True)
        if isinstance(size, str) and high is not None
    }
    return FunctionDescription(
        inputs=tuple(map(_tensor, converted.inputs)),
        outputs=tuple(map(_tensor, converted.outputs)),
        sizes={name: size for name, size in (sizes or {}).items() if size},
        dims=varying,
        cache=cache,
    )


def _tensor(port: Port) -> TensorDescription:
    return TensorDescription(
        name=port.name,
        package_name=port.mil_name,
        dtype=_numpy_name(port.dtype),
        package_dtype=_PACKAGE_DTYPES[port.mil_dtype],
        shape=port.shape,
    )


def _numpy_name(dtype: ir.DataType) -> str:
    # Integers and floats of fewer bits than a bundle's tensors have come as those that hold them.
    name = str(dtype.numpy())
    if re.fullmatch("bool|b?float16|float(32|64)|u?int(8|16|32|64)", name):
        return name
    return "int32" if dtype.is_integer() else "float32"


def _listed(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "of the graph"
