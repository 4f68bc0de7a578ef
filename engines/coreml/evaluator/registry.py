"""The table of MIL ops that the evaluator knows, and how a function declares what it takes.

``@op`` registers a function under its own name (a trailing underscore is dropped: ``abs_`` is ``abs``). Its parameters
are the op's arguments, its defaults those of MIL, and its annotations say what arrives:

- ``Tensor``: an array, float16 widened to float32; with ``@op(widen=False)``, for ops that only move values, as it is.
- ``int``, ``float``, ``bool``, ``str``: a scalar argument. ``list[int]``, ``list[bool]``: a vector.
- ``list[Tensor]``: the variadic argument. ``State``, ``list``: a state, a list of MIL. ``Call``: the operation itself.

The evaluator rounds what is returned to the types that the program declares. What a function cannot do it says with
``ValueError``; the evaluator adds the op's and the operation's name.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from intaglio.engines.coreml.evaluator.program import Block, Operation

Tensor = np.ndarray


@dataclass
class State:
    """A state's buffer, which ``write_state`` changes in place."""

    array: np.ndarray


@dataclass(frozen=True)
class Call:
    """What an op that has blocks needs. ``run_block(block, inputs)`` gives the values of the block's outputs."""

    operation: Operation
    run_block: Callable[[Block, Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Op:
    """A registered op. ``kinds`` says for each parameter how its argument is converted."""

    name: str
    function: Callable[..., Any]
    kinds: Mapping[str, Any]
    required: frozenset[str]
    takes_call: bool
    widen: bool

    def __call__(self, arguments: Mapping[str, Sequence[Any]], call: Call) -> tuple[Any, ...]:
        """Runs the op. ``arguments`` has the values of each argument. Raises ValueError for ones that do not fit."""
        if unknown := sorted(set(arguments) - set(self.kinds)):
            raise ValueError(f"has an argument {unknown[0]!r}, which is not known here; known are {sorted(self.kinds)}")
        if missing := sorted(self.required - set(arguments)):
            raise ValueError(f"lacks its argument {missing[0]!r}")
        converted = {name: self._convert(name, values) for name, values in arguments.items()}
        result = self.function(call, **converted) if self.takes_call else self.function(**converted)
        if result is None:
            return ()
        return result if isinstance(result, tuple) else (result,)

    def _convert(self, name: str, values: Sequence[Any]) -> Any:
        kind = self.kinds[name]
        if kind == list[Tensor]:
            return [self._array(value) for value in values]
        if kind in (list[int], list[bool]):
            flat = np.concatenate([np.ravel(value) for value in values]) if values else np.zeros(0, np.int32)
            return [typing.get_args(kind)[0](value) for value in flat]
        if len(values) != 1:
            raise ValueError(f"has {len(values)} values for its argument {name!r}, expected one")
        (value,) = values
        if kind is Tensor:
            return self._array(value)
        if kind in (State, list):
            if not isinstance(value, kind):
                raise ValueError(f"expects a {kind.__name__.lower()} as {name!r}, found {type(value).__name__}")
            return value
        return _scalar(kind, name, value)

    def _array(self, value: Any) -> Tensor:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expects a tensor, found {type(value).__name__}")
        return value.astype(np.float32) if self.widen and value.dtype == np.float16 else value


def _scalar(kind: Any, name: str, value: Any) -> Any:
    if kind is Any:
        return value
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise ValueError(f"expects one value as {name!r}, found shape {list(value.shape)}")
        value = value.reshape(()).item()
    if kind is str and not isinstance(value, str):
        raise ValueError(f"expects a string as {name!r}, found {value!r}")
    return kind(value)


OPS: dict[str, Op] = {}


def op(function: Callable[..., Any] | None = None, *, widen: bool = True) -> Callable[..., Any]:
    """Registers a function as the op of its name; see the module."""
    if function is None:
        return lambda wrapped: op(wrapped, widen=widen)
    parameters = dict(inspect.signature(function).parameters)
    hints = typing.get_type_hints(function)
    takes_call = next(iter(hints.values()), None) is Call and "call" in parameters
    if takes_call:
        parameters.pop("call")
    name = function.__name__.rstrip("_")
    if name in OPS:
        raise ValueError(f"the op {name} is registered twice")
    OPS[name] = Op(
        name=name,
        function=function,
        kinds={parameter: _without_none(hints[parameter]) for parameter in parameters},
        required=frozenset(key for key, value in parameters.items() if value.default is inspect.Parameter.empty),
        takes_call=takes_call,
        widen=widen,
    )
    return function


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    return hint
