"""Matrix products."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import as_float, cast, constant
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

# Up to here float32 holds every integer.
_EXACT = 2**24


@converter
def MatMul(node: Node) -> Var:
    return product(node.input(0), node.input(1), node.name)


@converter
def Gemm(node: Node) -> Var:
    a, b = node.input(0), node.input(1)
    y = _product(a, b, node.int("transA", 0) != 0, node.int("transB", 0) != 0)
    alpha, beta = node.float("alpha", 1.0), node.float("beta", 1.0)
    if alpha != 1.0:
        y = mb.mul(x=y, y=constant(np.array(alpha), y))
    c = node.optional(2)
    if c is None or beta == 0.0:
        return mb.identity(x=y, name=node.name)
    if beta != 1.0:
        c = mb.mul(x=c, y=constant(np.array(beta), c))
    return mb.add(x=y, y=c, name=node.name)


@converter
def MatMulInteger(node: Node) -> Var:
    a = without_zero_point(node, 0, 2, axis=-2)
    b = without_zero_point(node, 1, 3, axis=-1)
    return integer_product(a, b, node.name)


@converter("FusedMatMul", domain="com.microsoft")
def FusedMatMul(node: Node) -> Var:
    if node.int("transBatchA", 0) or node.int("transBatchB", 0):
        node.fail("transposes the batch of a product, which is not converted")
    y = _product(node.input(0), node.input(1), node.int("transA", 0) != 0, node.int("transB", 0) != 0)
    return mb.mul(x=y, y=constant(np.array(node.float("alpha", 1.0)), y), name=node.name)


def product(a: Var, b: Var, name: str | None = None) -> Var:
    """``a @ b`` as NumPy has it."""
    if a.rank > 1 and b.rank > 1:
        y = _product(a, b)
        return y if name is None else mb.identity(x=y, name=name)
    if a.rank == 1:
        a, squeezed = mb.expand_dims(x=a, axes=[0]), [-2]
    else:
        squeezed = []
    if b.rank == 1:
        b, squeezed = mb.expand_dims(x=b, axes=[1]), [*squeezed, -1]
    y = _product(a, b)
    return mb.squeeze(x=y, axes=squeezed, **({} if name is None else {"name": name}))


def _product(a: Var, b: Var, transpose_a: bool = False, transpose_b: bool = False) -> Var:
    if a.val is None and b.val is not None and b.rank == 2 and a.rank <= 3:
        a = mb.transpose(x=a, perm=[*range(a.rank - 2), a.rank - 1, a.rank - 2]) if transpose_a else a
        return mb.linear(x=a, weight=b if transpose_b else _transposed(b))
    return mb.matmul(x=a, y=b, transpose_x=transpose_a, transpose_y=transpose_b)


def _transposed(weight: Var) -> Var:
    """The transpose of a constant matrix: what it was made of by a Transpose, if by one."""
    made = weight.op
    if made is not None and made.op_type == "transpose" and list(made.perm.val) in ([1, 0], [-1, -2]):
        return made.x
    return mb.const(val=np.ascontiguousarray(weight.val.T))


def without_zero_point(node: Node, i: int, zero_point: int, axis: int) -> Var:
    """The integers of an input less their zero point, as float32; a vector of zero points is along ``axis``."""
    x = cast(node.input(i), "fp32")
    zero = node.optional(zero_point)
    if zero is None or (zero.val is not None and not np.any(zero.val)):
        return x
    zero = cast(zero, "fp32")
    if zero.rank == 1:
        shape = [1] * x.rank
        shape[axis] = -1
        zero = mb.reshape(x=zero, shape=shape[1:] if x.rank > 1 and axis == -1 else shape)
    return mb.sub(x=x, y=zero)


def integer_product(a: Var, b: Var, name: str) -> Var:
    """``a @ b`` of integers that are held in float32, exactly, as int32."""
    parts = _exact_parts(a, b)
    if parts == 1:
        return mb.cast(x=mb.matmul(x=as_float(a), y=as_float(b)), dtype="int32", name=name)
    depth = int(b.shape[-2])
    ends = [round(depth * i / parts) for i in range(parts + 1)]
    total: Var | None = None
    for begin, end in pairwise(ends):
        y = mb.cast(x=mb.matmul(x=_columns(a, begin, end, -1), y=_columns(b, begin, end, -2)), dtype="int32")
        total = y if total is None else mb.add(x=total, y=y)
    return mb.identity(x=total, name=name)


def _exact_parts(a: Var, b: Var) -> int:
    """In how many parts the inner axis is cut so that float32 holds each part's sums."""
    depth = b.shape[-2] if isinstance(b.shape[-2], (int, np.integer)) else a.shape[-1]
    if not isinstance(depth, (int, np.integer)):
        return 1
    if b.val is not None:
        most = 255.0 * float(np.abs(b.val).sum(axis=-2).max())
    else:
        most = 255.0 * 255.0 * int(depth)
    return min(int(depth), int(np.ceil(most / _EXACT)) or 1)


def _columns(x: Var, begin: int, end: int, axis: int) -> Var:
    axis %= x.rank
    rest = [i != axis for i in range(x.rank)]
    begins = [begin if i == axis else 0 for i in range(x.rank)]
    ends = [end if i == axis else 0 for i in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=rest, end_mask=rest)
