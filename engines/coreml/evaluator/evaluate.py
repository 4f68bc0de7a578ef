"""Runs a saved Core ML package with NumPy, independently of the builder that wrote it.

It checks what was written, not Apple's compiler. Values have the types that the program declares: an op on float16
computes in float32 and its result is rounded to float16, int32 wraps around. A result whose shape is not the declared
one is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Importing the module registers the ops.
import intaglio.engines.coreml.evaluator.ops  # noqa: F401
from intaglio.engines.coreml.evaluator.blobs import Blobs
from intaglio.engines.coreml.evaluator.package import read_program
from intaglio.engines.coreml.evaluator.program import (
    NUMPY_TYPES,
    Binding,
    Block,
    Constant,
    Feature,
    Function,
    Operation,
    StateType,
    TensorType,
    Value,
)
from intaglio.engines.coreml.evaluator.registry import OPS, Call, State
from intaglio.errors import EngineError

_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "U": "string"}


class Evaluator:
    """A package, ready to run."""

    def __init__(self, path: str | Path) -> None:
        """Reads the package. Raises EngineError if it is damaged, RuntimeMissingError without coremltools."""
        self.program = read_program(path)
        self._blobs: dict[Path, Blobs] = {}

    def make_state(self, function: str | None = None) -> dict[str, np.ndarray]:
        """Zeroed buffers for the states of a function, by name, in their declared shapes and dtypes.

        Functions of one package that name a state alike share it. None is the default function.
        """
        return {
            feature.name: np.zeros(feature.shape, NUMPY_TYPES[feature.dtype])
            for feature in self._function(function).states
        }

    def run(
        self,
        feeds: Mapping[str, np.ndarray],
        function: str | None = None,
        state: Mapping[str, np.ndarray] | None = None,
        taps: Iterable[str] = (),
    ) -> dict[str, np.ndarray]:
        """Runs ``function``, or the default one, and returns its outputs by name, then the values named in ``taps``.

        ``state`` (from :meth:`make_state`) is changed in place. Integers and floats of other widths than declared are
        converted where they fit. Raises EngineError for feeds that do not fit and for ops that are not supported.
        """
        chosen = self._function(function)
        for operation in chosen.block.all_operations():
            if operation.type not in OPS:
                what = f"the op {operation.type!r} ({operation.name!r})"
                raise EngineError(f"{self.program.path}: {what} is not supported by the evaluator")
        values = self._inputs(chosen, feeds)
        buffers = self._states(chosen, state)
        values.update(buffers)
        taps = tuple(taps)
        kept = {*chosen.block.outputs, *taps}
        with np.errstate(all="ignore"):
            self._run_block(chosen.block, values, kept)
        if unknown := [name for name in taps if name not in values]:
            raise EngineError(f"{self.program.path}: the function {chosen.name!r} has no value {unknown[0]!r} to tap")
        return {name: values[name] for name in (*chosen.block.outputs, *taps)}

    def _function(self, name: str | None) -> Function:
        name = self.program.default_function if name is None else name
        if name not in self.program.functions:
            raise EngineError(f"{self.program.path} has no function {name!r}; it has {sorted(self.program.functions)}")
        return self.program.functions[name]

    def _inputs(self, function: Function, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        names = [feature.name for feature in function.inputs]
        if unknown := sorted(set(feeds) - set(names)):
            raise EngineError(f"{self.program.path}: there is no input {unknown[0]!r}; the inputs are {names}")
        values: dict[str, Any] = {}
        for feature in function.inputs:
            if feature.name in feeds:
                values[feature.name] = _fed(feature, np.asarray(feeds[feature.name]))
            elif feature.optional:
                values[feature.name] = np.full(feature.shape, feature.default, NUMPY_TYPES[feature.dtype])
            else:
                raise EngineError(f"{self.program.path}: the input {feature.name!r} is missing; the inputs are {names}")
        for parameter in function.parameters:
            if isinstance(parameter.type, TensorType):
                where = f"the input {parameter.name!r}"
                if parameter.name not in values:
                    raise EngineError(f"{self.program.path}: {where} of the program is not described")
                values[parameter.name] = _declared(values[parameter.name], parameter, where)
        return values

    def _states(self, function: Function, state: Mapping[str, np.ndarray] | None) -> dict[str, State]:
        buffers = {}
        for parameter in function.parameters:
            if not isinstance(parameter.type, StateType):
                continue
            if state is None or parameter.name not in state:
                raise EngineError(
                    f"{self.program.path}: the state {parameter.name!r} was not given; make it with make_state()"
                )
            array, expected = state[parameter.name], parameter.type.tensor
            if array.shape != expected.shape or array.dtype != NUMPY_TYPES[expected.dtype]:
                raise EngineError(
                    f"{self.program.path}: the state {parameter.name!r} is {array.dtype} {list(array.shape)}, "
                    f"expected {expected.dtype} {list(expected.shape or ())}"
                )
            buffers[parameter.name] = State(array)
        return buffers

    def _run_block(self, block: Block, values: dict[str, Any], kept: set[str]) -> None:
        """Adds the values of a block to ``values``, dropping those that nothing needs any more, ``kept`` excepted."""
        last_use = {name: i for i, operation in enumerate(block.operations) for name in operation.references()}
        for i, operation in enumerate(block.operations):
            values.update(self._run_operation(operation, values))
            names = (*operation.references(), *(output.name for output in operation.outputs))
            for name in names:
                if last_use.get(name, i) <= i and name not in kept:
                    values.pop(name, None)

    def _run_operation(self, operation: Operation, values: Mapping[str, Any]) -> dict[str, Any]:
        def run_block(block: Block, inputs: Sequence[Any]) -> list[Any]:
            inner = {**values, **{value.name: given for value, given in zip(block.inputs, inputs, strict=True)}}
            self._run_block(block, inner, set(inner) | set(block.outputs))
            return [inner[name] for name in block.outputs]

        where = f"{self.program.path}: {operation.type} {operation.name!r}"
        arguments = {
            name: [self._bound(binding, values, where) for binding in bindings]
            for name, bindings in operation.arguments.items()
        }
        try:
            results = OPS[operation.type](arguments, Call(operation, run_block))
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError) as error:
            shapes = {name: [_describe(value) for value in bound] for name, bound in arguments.items()}
            raise EngineError(f"{where} {error}. Its arguments: {shapes}") from error
        if len(results) != len(operation.outputs):
            raise EngineError(f"{where} gives {len(results)} values, the program declares {len(operation.outputs)}")
        return {
            output.name: _declared(result, output, where)
            for output, result in zip(operation.outputs, results, strict=True)
        }

    def _bound(self, binding: Binding, values: Mapping[str, Any], where: str) -> Any:
        if isinstance(binding, Constant):
            return self._constant(binding, where)
        if binding.name not in values:
            raise EngineError(f"{where} needs {binding.name!r}, which no operation before it gives")
        return values[binding.name]

    def _constant(self, constant: Constant, where: str) -> Any:
        if constant.file is None:
            return constant.value
        if not isinstance(constant.type, TensorType) or constant.type.shape is None or None in constant.type.shape:
            raise EngineError(f"{where}: a constant of the weight file has no fixed shape")
        if constant.file not in self._blobs:
            self._blobs[constant.file] = Blobs(constant.file)
        shape = tuple(size for size in constant.type.shape if size is not None)
        return self._blobs[constant.file].read(constant.offset, constant.type.dtype, shape)


def _fed(feature: Feature, array: np.ndarray) -> np.ndarray:
    """A feed in the described dtype and one of the described shapes."""
    if not feature.allows(array.shape):
        raise EngineError(f"the input {feature.name!r} has shape {list(array.shape)}, expected {feature.expected()}")
    dtype = np.dtype(NUMPY_TYPES[feature.dtype])
    kinds = _KINDS.get(array.dtype.kind), _KINDS[dtype.kind]
    if kinds[0] != kinds[1]:
        raise EngineError(f"the input {feature.name!r} is {array.dtype}, expected {dtype}")
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise EngineError(f"the input {feature.name!r} holds integers that {dtype} cannot")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _declared(result: Any, output: Value, where: str) -> Any:
    """A result in its declared dtype. Raises EngineError if its kind or shape is another than declared."""
    if not isinstance(output.type, TensorType) or isinstance(result, str):
        return result
    if isinstance(result, list):
        return result
    array = np.asarray(result)
    dtype = np.dtype(NUMPY_TYPES[output.type.dtype])
    kinds = _KINDS.get(array.dtype.kind), _KINDS[dtype.kind]
    if kinds[0] != kinds[1]:
        raise EngineError(f"{where} computes {array.dtype}, the program declares {dtype} for {output.name!r}")
    shape = output.type.shape
    if shape is not None and (
        len(shape) != array.ndim
        or any(known is not None and known != size for known, size in zip(shape, array.shape, strict=True))
    ):
        raise EngineError(
            f"{where} gives shape {list(array.shape)}, the program declares "
            f"{[-1 if size is None else size for size in shape]} for {output.name!r}"
        )
    return array if array.dtype == dtype else array.astype(dtype)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, State):
        return f"state {value.array.dtype}{list(value.array.shape)}"
    return repr(value) if isinstance(value, str) else type(value).__name__
