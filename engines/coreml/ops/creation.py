"""Tensors made of nothing: constants, ranges, identity matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.constants import to_mil
from intaglio.engines.coreml.mil import cast, is_static, mil_dtype, number, select, wrap
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

_NUMPY = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "bool": np.bool_}


@converter
def Constant(node: Node) -> Var:
    """The value is a tensor, or a number or list in an attribute of its own."""
    if node.has("value"):
        array = node.tensor("value")
    elif node.has("value_float"):
        array = np.array(node.float("value_float"), np.float32)
    elif node.has("value_floats"):
        array = np.array(node.floats("value_floats"), np.float32)
    elif node.has("value_int"):
        array = np.array(node.int("value_int"), np.int64)
    elif node.has("value_ints"):
        array = np.array(node.ints("value_ints"), np.int64)
    else:
        node.fail("holds text or a sparse tensor, which Core ML has not")
    try:
        return mb.const(val=to_mil(np.asarray(array)), name=node.name)
    except ValueError as error:
        node.fail(str(error))


@converter
def ConstantOfShape(node: Node) -> Var:
    value = to_mil(node.tensor("value").reshape(-1)[0]) if node.has("value") else np.float32(0)
    value = np.asarray(value)[()]
    if not node.is_constant(0):
        return mb.fill(shape=node.input(0), value=value, name=node.name)
    shape = [int(size) for size in node.constant(0)]
    node.check_size(shape)
    return mb.const(val=np.full(shape, value), name=node.name)


@converter
def EyeLike(node: Node) -> Var:
    x = node.input(0)
    if not is_static(x):
        node.fail("follows a shape that varies, which Core ML must know")
    dtype = ir.DataType(node.int("dtype")) if node.has("dtype") else node.dtype(0)
    name = mil_dtype(dtype)
    if name is None:
        node.fail(f"makes {dtype.name.lower()}, which Core ML has no tensors of")
    rows, columns = (int(size) for size in x.shape)
    node.check_size([rows, columns])
    return mb.const(val=np.eye(rows, columns, node.int("k", 0), dtype=_NUMPY[name]), name=node.name)


@converter
def Range(node: Node) -> Var:
    if all(node.is_constant(i) for i in range(3)):
        first, last, by = (float(node.constant(i).item()) for i in range(3))
        node.check_size([math.ceil((last - first) / by) if by else 0])
    start, limit, step = (mb.squeeze(x=v) if v.rank else v for v in (node.input(i) for i in range(3)))
    return mb.range_1d(start=start, end=limit, step=step, name=node.name)


@converter
def Trilu(node: Node) -> Var:
    """Keeps what lies on the diagonal ``k`` and above it, or below it."""
    x, upper = node.input(0), bool(node.int("upper", 1))
    k = node.constant_or(1, 0) if len(node.inputs) < 2 or node.is_constant(1) else node.input(1)
    rows, columns = x.shape[-2:]
    zero = number(0, x)
    if not isinstance(k, Var) and all(isinstance(size, (int, np.integer)) for size in (rows, columns)):
        offset = int(np.asarray(k).item())
        kept = np.tri(int(rows), int(columns), offset - 1 if upper else offset, dtype=np.bool_)
        return mb.select(cond=~kept if upper else kept, a=x, b=zero, name=node.name)
    shape = mb.shape(x=x)
    down, right = (
        mb.range_1d(start=np.int32(0), end=mb.gather(x=shape, indices=np.int32(axis), axis=0), step=np.int32(1))
        for axis in (x.rank - 2, x.rank - 1)
    )
    distance = mb.sub(x=right, y=mb.expand_dims(x=down, axes=[1]))
    diagonal: Any = (mb.squeeze(x=k) if k.rank else k) if isinstance(k, Var) else np.int32(np.asarray(k).item())
    kept = mb.greater_equal(x=distance, y=diagonal) if upper else mb.less_equal(x=distance, y=diagonal)
    return mb.select(cond=kept, a=x, b=zero, name=node.name)


@converter
def OneHot(node: Node) -> Var:
    """Indices from -depth to -1 count from the end; others beyond the depth have no place."""
    indices, values = node.input(0), node.input(2)
    depth, axis = int(node.constant(1).item()), node.int("axis", -1)
    axis = axis + indices.rank + 1 if axis < 0 else axis
    node.check_size([depth])
    indices = cast(indices, "int32")
    zero = np.int32(0)
    counted = mb.select(cond=mb.less(x=indices, y=zero), a=mb.add(x=indices, y=np.int32(depth)), b=indices)
    places = np.arange(depth, dtype=np.int32).reshape([depth if i == axis else 1 for i in range(indices.rank + 1)])
    spread = mb.expand_dims(x=counted, axes=[axis]) if indices.rank else mb.reshape(x=counted, shape=[1])
    hot = mb.equal(x=spread, y=places)
    off, on = (mb.gather(x=values, indices=np.int32(i), axis=0) for i in (0, 1))
    return wrap(select(hot, on, off, node.name), node.dtype(2))


@converter
def NonZero(node: Node) -> Var:
    """How many there are is known only when the model runs."""
    x = node.input(0)
    places = mb.non_zero(x=x)
    return mb.transpose(x=places, perm=[1, 0], name=node.name)
