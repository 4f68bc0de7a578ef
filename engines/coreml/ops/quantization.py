"""Quantized values. In MIL they are integers of 32 bits; a quantized weight stays packed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from intaglio.engines.coreml.deferred import deferred
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.convolutions import convolution
from intaglio.engines.coreml.ops.products import integer_product, without_zero_point
from intaglio.engines.coreml.ops.tensors import cast, dtype_of, per_channel
from intaglio.engines.coreml.registry import converter

_RANGES = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT2: (0, 3),
    ir.DataType.INT2: (-2, 1),
}
# How Core ML packs the integers of a weight.
_PACKED = {
    ir.DataType.UINT8: np.uint8,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT4: types.np_uint4_dtype,
    ir.DataType.INT4: types.np_int4_dtype,
    ir.DataType.UINT2: types.np_uint4_dtype,
    ir.DataType.INT2: types.np_int4_dtype,
}
# Smaller weights are not worth packing.
_SMALL = 1024


@converter
def QuantizeLinear(node: Node) -> Var:
    x, scale = node.input(0), node.input(1)
    block, axis = node.int("block_size", 0), node.int("axis", 1)
    low, high = _range(node, _quantized_dtype(node))
    steps = mb.real_div(x=cast(x, "fp32"), y=_spread(node, scale, x, axis, block))
    zero = node.optional(2)
    return _saturated(steps, None if zero is None else _spread(node, zero, x, axis, block), low, high, node.name)


@converter("QuantizeLinear", domain="com.microsoft")
def ContribQuantizeLinear(node: Node) -> Var:
    return QuantizeLinear(node)


@converter
def DequantizeLinear(node: Node) -> Var:
    if _is_weight(node):
        return _packed_weight(node)
    x, scale = node.input(0), node.input(1)
    block, axis = node.int("block_size", 0), node.int("axis", 1)
    values, zero = cast(x, "fp32"), node.optional(2)
    if zero is not None:
        values = mb.sub(x=values, y=_spread(node, zero, x, axis, block))
    return cast(mb.mul(x=values, y=_spread(node, scale, x, axis, block)), dtype_of(scale))


@converter("DequantizeLinear", domain="com.microsoft")
def ContribDequantizeLinear(node: Node) -> Var:
    return DequantizeLinear(node)


@converter
def DynamicQuantizeLinear(node: Node) -> Sequence[Var]:
    return _dynamically(node.input(0))


@converter
def ConvInteger(node: Node) -> Var:
    x = without_zero_point(node, 0, 2, axis=1)
    weight = without_zero_point(node, 1, 3, axis=0)
    return mb.cast(x=mb.round(x=convolution(node, x, weight, None)), dtype="int32")


@converter
def QLinearConv(node: Node) -> Var:
    x = without_zero_point(node, 0, 2, axis=1)
    weight = without_zero_point(node, 3, 5, axis=0)
    y = convolution(node, x, weight, None)
    bias = node.optional(8)
    if bias is not None:
        y = mb.add(x=y, y=per_channel(cast(bias, "fp32"), y.rank))
    scale = _ratio(node, 1, 4, 6)
    steps = mb.mul(x=y, y=per_channel(scale, y.rank) if scale.rank == 1 and scale.shape[0] != 1 else scale)
    return _saturated(steps, node.optional(7), *_range(node, node.dtype(7)), node.name)


@converter
def QLinearMatMul(node: Node) -> Var:
    a = without_zero_point(node, 0, 2, axis=-2)
    b = without_zero_point(node, 3, 5, axis=-1)
    y = mb.cast(x=integer_product(a, b, f"{node.name}_sums"), dtype="fp32")
    steps = mb.mul(x=y, y=_ratio(node, 1, 4, 6))
    return _saturated(steps, node.optional(7), *_range(node, node.dtype(7)), node.name)


@converter("QGemm", domain="com.microsoft")
def QGemm(node: Node) -> Var:
    if node.int("transA", 0) or node.float("alpha", 1.0) != 1.0:
        node.fail("transposes or scales its first input, which is not converted")
    a = without_zero_point(node, 0, 2, axis=-2)
    transposed = node.int("transB", 0) != 0
    b = without_zero_point(node, 3, 5, axis=0 if transposed else -1)
    y = mb.cast(x=mb.matmul(x=a, y=b, transpose_y=transposed), dtype="fp32")
    bias, scale = node.optional(6), node.optional(7)
    if bias is not None:
        y = mb.add(x=y, y=cast(bias, "fp32"))
    if scale is None:
        return mb.mul(x=y, y=mb.mul(x=node.input(1), y=node.input(4)), name=node.name)
    steps = mb.mul(x=y, y=_ratio(node, 1, 4, 7))
    return _saturated(steps, node.optional(8), *_range(node, node.dtype(8)), node.name)


@converter("MatMulIntegerToFloat", domain="com.microsoft")
def MatMulIntegerToFloat(node: Node) -> Var:
    a = without_zero_point(node, 0, 4, axis=-2)
    b = without_zero_point(node, 1, 5, axis=-1)
    y = mb.mul(x=mb.cast(x=integer_product(a, b, f"{node.name}_sums"), dtype="fp32"), y=node.input(2))
    return _with_bias(mb.mul(x=y, y=node.input(3)), node.optional(6))


@converter("DynamicQuantizeMatMul", domain="com.microsoft")
def DynamicQuantizeMatMul(node: Node) -> Var:
    quantized, scale, zero = _dynamically(node.input(0))
    a = mb.sub(x=cast(quantized, "fp32"), y=cast(zero, "fp32"))
    b = without_zero_point(node, 1, 3, axis=-1)
    y = mb.mul(x=mb.cast(x=integer_product(a, b, f"{node.name}_sums"), dtype="fp32"), y=scale)
    return _with_bias(mb.mul(x=y, y=node.input(2)), node.optional(4))


@converter("QLinearAdd", domain="com.microsoft")
def QLinearAdd(node: Node) -> Var:
    return _requantized(node, mb.add(x=_value(node, 0), y=_value(node, 3)), 6)


@converter("QLinearMul", domain="com.microsoft")
def QLinearMul(node: Node) -> Var:
    return _requantized(node, mb.mul(x=_value(node, 0), y=_value(node, 3)), 6)


@converter("QLinearSigmoid", domain="com.microsoft")
def QLinearSigmoid(node: Node) -> Var:
    return _requantized(node, mb.sigmoid(x=_value(node, 0)), 3)


@converter("QLinearLeakyRelu", domain="com.microsoft")
def QLinearLeakyRelu(node: Node) -> Var:
    y = mb.leaky_relu(x=_value(node, 0), alpha=np.float32(node.float("alpha", 0.01)))
    return _requantized(node, y, 3)


@converter("QLinearGlobalAveragePool", domain="com.microsoft")
def QLinearGlobalAveragePool(node: Node) -> Var:
    x = _value(node, 0)
    axes = list(range(1, x.rank - 1) if node.int("channels_last", 0) else range(2, x.rank))
    return _requantized(node, mb.reduce_mean(x=x, axes=axes, keep_dims=True), 3)


@converter("QLinearConcat", domain="com.microsoft")
def QLinearConcat(node: Node) -> Var:
    values = [_value(node, i) for i in range(2, len(node.inputs), 3)]
    return _requantized(node, mb.concat(values=values, axis=node.int("axis")), 0)


def _range(node: Node, dtype: ir.DataType) -> tuple[int, int]:
    if dtype not in _RANGES:
        node.fail(
            f"quantizes to {dtype.name.lower()}, which Core ML has no form of",
            f"quantize to one of {', '.join(sorted(d.name.lower() for d in _RANGES))}",
        )
    return _RANGES[dtype]


def _quantized_dtype(node: Node) -> ir.DataType:
    if node.optional(2) is not None:
        return node.dtype(2)
    return ir.DataType(node.int("output_dtype", 0) or int(ir.DataType.UINT8))


def _spread(node: Node, parameter: Var, x: Var, axis: int, block: int) -> Var:
    """A scale or zero point in float32, in a shape that meets ``x``."""
    parameter = cast(parameter, "fp32")
    if block:
        return _repeated(node, parameter, axis % x.rank, block, x)
    if parameter.rank == 0 or parameter.shape == (1,):
        return mb.reshape(x=parameter, shape=[1] * max(x.rank, 1))
    return per_channel(parameter, x.rank, axis % x.rank)


def _repeated(node: Node, x: Var, axis: int, times: int, like: Var) -> Var:
    """Each value along an axis so many times, as far as ``like`` goes."""
    size = like.shape[axis]
    if not isinstance(size, (int, np.integer)):
        node.fail("is quantized by blocks along an axis whose size varies", "fix the size with --shapes")
    indices = np.arange(int(size), dtype=np.int32) // times
    return mb.gather(x=x, indices=indices, axis=axis)


def _saturated(steps: Var, zero: Var | None, low: int, high: int, name: str) -> Var:
    y = mb.round(x=steps)
    if zero is not None:
        zero = cast(zero, "fp32")
        y = mb.add(
            x=y,
            y=mb.reshape(x=zero, shape=[1] * max(y.rank, 1)) if zero.rank < 2 and zero.shape in ((), (1,)) else zero,
        )
    return mb.cast(x=mb.clip(x=y, alpha=np.float32(low), beta=np.float32(high)), dtype="int32", name=name)


def _is_weight(node: Node) -> bool:
    if node.dtype(0) not in _PACKED:
        return False
    stored = node.stored(0)
    # A weight of the graph is not unpacked to be looked at.
    known = node.is_constant(1) and (stored is not None or node.is_constant(0))
    if not known or (node.has_input(2) and not node.is_constant(2)):
        return False
    shape = stored.shape if stored is not None else node.constant(0).shape
    return len(shape) >= 2 and math.prod(shape) >= _SMALL


def _packed_weight(node: Node) -> Var:
    """A constant that Core ML unpacks: ``scale * (data - offset)`` by blocks."""
    data, scale = _packed_data(node), node.constant(1)
    kind = _PACKED[node.dtype(0)]
    zero = node.constant(2) if node.has_input(2) else None
    axis, block = node.int("axis", 1) % data.ndim, node.int("block_size", 0)
    if block and (data.shape[axis] % block or scale.shape[axis] * block != data.shape[axis]):
        node.fail(f"has blocks of {block} that do not fill the axis of {data.shape[axis]}")
    shape = [1] * data.ndim
    if block:
        shape = list(scale.shape)
    elif scale.size > 1:
        shape[axis] = scale.size
    scale = scale.reshape(shape)
    if scale.dtype == ml_dtypes.bfloat16:
        scale = scale.astype(np.float32)
    held = {}
    if zero is not None and np.any(zero.astype(np.int32)):
        held["offset"] = zero.reshape(shape).astype(np.int32).astype(kind)
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, **held)


def _packed_data(node: Node) -> np.ndarray:
    """The integers of a weight as Core ML packs them; those that are stored so are read when they are written."""
    dtype, stored = node.dtype(0), node.stored(0)
    if stored is not None and stored.dtype.bitwidth in (4, 8):
        return deferred(stored.shape, np.dtype(_PACKED[dtype]), stored.dtype.bitwidth, stored.read)
    return node.constant(0).astype(np.int32).astype(_PACKED[dtype])


def _dynamically(x: Var) -> tuple[Var, Var, Var]:
    """``x`` in 8 bits by its own range, which includes zero: integers, scale, zero point."""
    axes = list(range(x.rank))
    high = mb.maximum(x=mb.reduce_max(x=x, axes=axes, keep_dims=False), y=np.float32(0))
    low = mb.minimum(x=mb.reduce_min(x=x, axes=axes, keep_dims=False), y=np.float32(0))
    scale = mb.real_div(x=mb.sub(x=high, y=low), y=np.float32(255))
    # Nothing but zeros has the scale 1, as in onnxruntime.
    step = mb.select(cond=mb.equal(x=scale, y=np.float32(0)), a=np.float32(1), b=scale)
    zero = mb.clip(
        x=mb.round(x=mb.real_div(x=mb.sub(x=np.float32(0), y=low), y=step)), alpha=np.float32(0), beta=np.float32(255)
    )
    y = mb.add(x=mb.round(x=mb.real_div(x=x, y=step)), y=zero)
    y = mb.clip(x=y, alpha=np.float32(0), beta=np.float32(255))
    return mb.cast(x=y, dtype="int32"), step, mb.cast(x=zero, dtype="int32")


def _ratio(node: Node, first: int, second: int, out: int) -> Var:
    """The factor from products of two inputs' steps to steps of the output; a vector where one of them is."""
    scale = mb.mul(x=cast(node.input(first), "fp32"), y=cast(node.input(second), "fp32"))
    return mb.real_div(x=scale, y=cast(node.input(out), "fp32"))


def _value(node: Node, i: int) -> Var:
    """What the integers of input ``i`` stand for, by the scale and zero point that follow it."""
    x, zero = cast(node.input(i), "fp32"), node.optional(i + 2)
    if zero is not None:
        x = mb.sub(x=x, y=cast(zero, "fp32"))
    return mb.mul(x=x, y=node.input(i + 1))


def _requantized(node: Node, y: Var, scale: int) -> Var:
    zero = node.optional(scale + 1)
    dtype = ir.DataType.UINT8 if zero is None else node.dtype(scale + 1)
    return _saturated(mb.real_div(x=y, y=node.input(scale)), zero, *_range(node, dtype), node.name)


def _with_bias(y: Var, bias: Var | None) -> Var:
    return y if bias is None else mb.add(x=y, y=bias)
