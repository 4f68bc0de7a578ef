"""Arithmetic, rounding, casts and mathematical functions, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic

from intaglio.engines.coreml.mil import (
    cast,
    constant,
    is_float,
    mil_dtype,
    shape_vector,
    sizes,
    through,
    wrap,
)
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

_UNSIGNED = (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64)


@converter
def Add(node: Node) -> Var:
    return wrap(mb.add(x=node.input(0), y=node.input(1), name=node.name), node.dtype(0))


@converter
def Sub(node: Node) -> Var:
    return wrap(mb.sub(x=node.input(0), y=node.input(1), name=node.name), node.dtype(0))


@converter
def Mul(node: Node) -> Var:
    return wrap(mb.mul(x=node.input(0), y=node.input(1), name=node.name), node.dtype(0))


@converter
def Div(node: Node) -> Var:
    """Integers are divided towards zero."""
    x, y = node.input(0), node.input(1)
    if is_float(x):
        return mb.real_div(x=x, y=y, name=node.name)
    # Sizes are not negative, and a size that varies has no sign that MIL could follow.
    if node.dtype(0) in _UNSIGNED or any_symbolic(x.sym_val):
        return mb.floor_div(x=x, y=y, name=node.name)
    quotient = mb.floor_div(x=mb.abs(x=x), y=mb.abs(x=y))
    return mb.mul(x=quotient, y=mb.mul(x=mb.sign(x=x), y=mb.sign(x=y)), name=node.name)


@converter
def Mod(node: Node) -> Var:
    """The remainder has the sign of the divisor, with ``fmod`` that of the dividend."""
    x, y = node.input(0), node.input(1)
    if not node.int("fmod", 0):
        return mb.mod(x=x, y=y, name=node.name)
    return mb.mul(x=mb.mod(x=mb.abs(x=x), y=mb.abs(x=y)), y=mb.sign(x=x), name=node.name)


@converter
def Pow(node: Node) -> Var:
    """The result has the dtype of the base."""
    x, y = node.input(0), node.input(1)
    if not is_float(x) and is_float(y):
        return through("fp32", lambda base: mb.pow(x=base, y=cast(y, "fp32")), x)
    y = cast(y, types.builtin_to_string(x.dtype))
    return wrap(mb.pow(x=x, y=y, name=node.name), node.dtype(0))


@converter
def Neg(node: Node) -> Var:
    x = node.input(0)
    return wrap(mb.mul(x=x, y=constant(-1, x), name=node.name), node.dtype(0))


@converter
def Abs(node: Node) -> Var:
    return wrap(mb.abs(x=node.input(0), name=node.name), node.dtype(0))


@converter
def Sign(node: Node) -> Var:
    return mb.sign(x=node.input(0), name=node.name)


@converter
def Reciprocal(node: Node) -> Var:
    # mb.inverse adds an epsilon.
    x = node.input(0)
    return mb.real_div(x=constant(1, x), y=x, name=node.name)


@converter
def Log(node: Node) -> Var:
    # The default epsilon makes the logarithm of 0 finite.
    x = node.input(0)
    return mb.log(x=x, epsilon=constant(0, x), name=node.name)


@converter
def Asinh(node: Node) -> Var:
    """Near 0 as an atanh, which keeps its digits there; elsewhere as a logarithm."""
    x = node.input(0)
    size, one = mb.abs(x=x), constant(1, x)
    root = mb.sqrt(x=mb.add(x=mb.square(x=x), y=one))
    near = mb.atanh(x=mb.real_div(x=size, y=root))
    far = mb.log(x=mb.add(x=size, y=root), epsilon=constant(0, x))
    return mb.mul(x=mb.select(cond=mb.less(x=size, y=one), a=near, b=far), y=mb.sign(x=x), name=node.name)


@converter
def Acosh(node: Node) -> Var:
    x = node.input(0)
    one = constant(1, x)
    root = mb.mul(x=mb.sqrt(x=mb.sub(x=x, y=one)), y=mb.sqrt(x=mb.add(x=x, y=one)))
    return mb.log(x=mb.add(x=x, y=root), epsilon=constant(0, x), name=node.name)


def _function(name: str, build: Callable[..., Var], *, keeps_integers: bool = False) -> None:
    def convert(node: Node) -> Var:
        x = node.input(0)
        return x if keeps_integers and not is_float(x) else build(x=x, name=node.name)

    convert.__module__ = __name__
    converter(name)(convert)


_function("Sqrt", mb.sqrt)
_function("Exp", mb.exp)
_function("Erf", mb.erf)
_function("Sin", mb.sin)
_function("Cos", mb.cos)
_function("Tan", mb.tan)
_function("Asin", mb.asin)
_function("Acos", mb.acos)
_function("Atan", mb.atan)
_function("Sinh", mb.sinh)
_function("Cosh", mb.cosh)
_function("Atanh", mb.atanh)
_function("Floor", mb.floor, keeps_integers=True)
_function("Ceil", mb.ceil, keeps_integers=True)
_function("Round", mb.round, keeps_integers=True)


@converter
def Cast(node: Node) -> Var:
    return cast_to(node, node.input(0), ir.DataType(node.int("to")))


@converter
def CastLike(node: Node) -> Var:
    return cast_to(node, node.input(0), node.dtype(1))


def cast_to(node: Node, x: Var, dtype: ir.DataType) -> Var:
    """``x`` in the MIL dtype that holds ``dtype``. Floats lose their fraction, integers their upper bits."""
    name = mil_dtype(dtype)
    if name is None:
        node.fail(f"casts to {dtype.name.lower()}, which Core ML has no tensors of")
    if name == "bool" and is_float(x):
        return mb.not_equal(x=x, y=constant(0, x), name=node.name)
    return wrap(cast(x, name), dtype)


@converter
def Clip(node: Node) -> Var:
    """The limits were attributes before opset 11."""
    x = node.input(0)
    if node.opset < 11:
        low = constant(node.float("min"), x) if node.has("min") else None
        high = constant(node.float("max"), x) if node.has("max") else None
    else:
        low, high = node.optional(1), node.optional(2)
    if low is not None:
        x = mb.maximum(x=x, y=low)
    return x if high is None else mb.minimum(x=x, y=high, name=node.name)


def _all_inputs(node: Node) -> list[Var]:
    return [node.input(i) for i in range(len(node.inputs))]


@converter
def Max(node: Node) -> Var:
    return reduce(lambda x, y: mb.maximum(x=x, y=y), _all_inputs(node))


@converter
def Min(node: Node) -> Var:
    return reduce(lambda x, y: mb.minimum(x=x, y=y), _all_inputs(node))


@converter
def Sum(node: Node) -> Var:
    return reduce(lambda x, y: mb.add(x=x, y=y), _all_inputs(node))


@converter
def Mean(node: Node) -> Var:
    terms = _all_inputs(node)
    total = reduce(lambda x, y: mb.add(x=x, y=y), terms)
    return mb.real_div(x=total, y=constant(len(terms), total), name=node.name)


@converter
def BitShift(node: Node) -> Var:
    """By powers of two: Core ML has no bits. Left shifts of 32 and 64 bits must fit int32, as all its integers."""
    x, places, dtype = node.input(0), node.input(1), node.dtype(0)
    if node.string("direction") == "RIGHT":
        # In two steps, since 2 to the 31 is no int32.
        beyond = mb.maximum(x=mb.sub(x=places, y=np.int32(30)), y=np.int32(0))
        return mb.floor_div(x=mb.floor_div(x=x, y=_power(places, 30)), y=_power(beyond, 30), name=node.name)
    if dtype.bitwidth > 16:
        return mb.mul(x=x, y=_power(places, 30), name=node.name)
    # Bits that leave the number would overflow int32 first.
    power, width = _power(places, dtype.bitwidth), np.int32(1 << dtype.bitwidth)
    kept = mb.mod(x=x, y=mb.maximum(x=mb.floor_div(x=width, y=power), y=np.int32(1)))
    return wrap(mb.mul(x=kept, y=power), dtype)


def _power(exponent: Var, limit: int) -> Var:
    return mb.pow(x=np.int32(2), y=mb.minimum(x=exponent, y=np.int32(limit)))


@converter
def BitwiseNot(node: Node) -> Var:
    x = node.input(0)
    return wrap(mb.sub(x=np.int32(-1), y=x), node.dtype(0))


@converter
def IsNaN(node: Node) -> Var:
    x = node.input(0)
    return mb.not_equal(x=x, y=x, name=node.name)


@converter
def IsInf(node: Node) -> Var:
    x = node.input(0)
    positive, negative = bool(node.int("detect_positive", 1)), bool(node.int("detect_negative", 1))
    if positive and negative:
        return mb.equal(x=mb.abs(x=x), y=constant(np.inf, x), name=node.name)
    if not positive and not negative:
        return mb.less(x=x, y=constant(-np.inf, x), name=node.name)
    return mb.equal(x=x, y=constant(np.inf if positive else -np.inf, x), name=node.name)


@converter
def CumSum(node: Node) -> Var:
    x, axis = node.input(0), int(node.constant(1).item())
    exclusive, reverse = bool(node.int("exclusive", 0)), bool(node.int("reverse", 0))
    return wrap(mb.cumsum(x=x, axis=axis, exclusive=exclusive, reverse=reverse, name=node.name), node.dtype(0))


@converter
def Identity(node: Node) -> Var:
    return node.input(0)


@converter
def Dropout(node: Node) -> list[Var]:
    """As it is when a model is used: nothing is dropped."""
    x = node.input(0)
    if bool(node.constant_or(2, False)) and float(node.constant_or(1, 0.5)) != 0:
        node.fail("drops elements at random, as in training, which Core ML does not do")
    if len(node.outputs) < 2:
        return [x]
    dims = sizes(x)
    return [x, mb.fill(shape=shape_vector(dims), value=True) if dims else mb.const(val=True)]
