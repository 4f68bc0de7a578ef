"""The converters by the op they convert. A file in ``ops/`` is found by being there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from intaglio.engines.coreml.coremltools_ import import_coremltools

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Var

    from intaglio.engines.coreml.node import Node

    Converter = Callable[[Node], Var | Sequence[Var | None]]

# The op, of our own domain, whose first input is a state: see ops/states.py.
UPDATE_STATE = "UpdateState"

# By domain ("" is ONNX's own) and op type.
CONVERTERS: dict[tuple[str, str], Converter] = {}


@overload
def converter(function: Converter, /) -> Converter: ...
@overload
def converter(name: str, /, *, domain: str = "") -> Callable[[Converter], Converter]: ...
def converter(function: Converter | str, /, *, domain: str = "") -> Converter | Callable[[Converter], Converter]:
    """Registers a function as the converter of the op whose name it bears, or of the one that is named.

    A converter makes MIL with coremltools' builder and returns one Var for each output of the node, or the only one.
    """
    if not isinstance(function, str):
        return _register(domain, function.__name__, function)
    name = function
    return lambda converts: _register(domain, name, converts)


def _register(domain: str, name: str, function: Converter) -> Converter:
    key = (domain, name)
    if key in CONVERTERS and CONVERTERS[key].__module__ != function.__module__:
        raise ValueError(f"{name} is converted in {CONVERTERS[key].__module__} and in {function.__module__}")
    CONVERTERS[key] = function
    return function


def load_converters() -> dict[tuple[str, str], Converter]:
    """All converters. Raises RuntimeMissingError where coremltools is not installed."""
    import_coremltools()
    from intaglio.engines.coreml import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    return CONVERTERS
