"""Normalisations. Statistics are float32 where the graph says so, whatever the dtype of the values.

Scale and bias are taken in there as well, so that the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.ops.tensors import (
    cast,
    constant,
    dtype_of,
    is_static,
    per_channel,
    reshape,
    shape_like,
    size_of,
)
from intaglio.engines.coreml.registry import converter


@converter
def BatchNormalization(node: Node) -> Var | Sequence[Var]:
    if node.int("spatial", 1) != 1:
        node.fail("normalises each pixel by itself (spatial 0), which ONNX gave up with opset 9")
    x = node.input(0)
    scale, bias, mean, variance = (cast(node.input(i), dtype_of(x)) for i in range(1, 5))
    epsilon = node.float("epsilon", 1e-5)
    if node.int("training_mode", 0):
        return _training_batch_norm(node, x, scale, bias, mean, variance)
    known = all(v.val is not None for v in (scale, bias, mean, variance))
    if known and 3 <= x.rank <= 5:
        return mb.batch_norm(
            x=x,
            mean=mean,
            variance=variance,
            gamma=scale,
            beta=bias,
            epsilon=constant(np.array(epsilon), x),
            name=node.name,
        )
    return _affine(_normalised(x, per_channel(mean, x.rank), per_channel(variance, x.rank), epsilon), scale, bias, 1)


@converter
def InstanceNormalization(node: Node) -> Var:
    dtype = dtype_of(node.input(0))
    x, scale, bias = (cast(node.input(i), "fp32") for i in range(3))
    epsilon = node.float("epsilon", 1e-5)
    if scale.val is not None and bias.val is not None and 3 <= x.rank <= 4:
        return cast(mb.instance_norm(x=x, gamma=scale, beta=bias, epsilon=np.float32(epsilon)), dtype)
    mean, variance = _statistics(x, list(range(2, x.rank)))
    return cast(_affine(_normalised(x, mean, variance, epsilon), scale, bias, 1), dtype)


@converter
def LayerNormalization(node: Node) -> Sequence[Var | None]:
    x, scale, bias = node.input(0), node.input(1), node.optional(2)
    axes = list(range(node.int("axis", -1) % x.rank, x.rank))
    epsilon = node.float("epsilon", 1e-5)
    inner = cast(x, _stash(node, x))
    if any(node.outputs[1:]):
        mean, variance = _statistics(inner, axes)
        inverse = mb.rsqrt(x=mb.add(x=variance, y=constant(np.array(epsilon), inner)))
        y = mb.mul(x=mb.sub(x=inner, y=mean), y=inverse)
        return [cast(_scaled(y, scale, bias), dtype_of(x)), mean, inverse]
    sizes = tuple(x.shape[axis] for axis in axes)
    scale, bias = cast(scale, dtype_of(inner)), None if bias is None else cast(bias, dtype_of(inner))
    whole = is_static(sizes) and all(v is None or _fits(v, sizes) for v in (scale, bias))
    held = {"gamma": scale, **({} if bias is None else {"beta": bias})} if whole else {}
    y = mb.layer_norm(x=inner, axes=axes, epsilon=constant(np.array(epsilon), inner), **held)
    return [cast(y if whole else _scaled(y, scale, bias), dtype_of(x))]


@converter
def RMSNormalization(node: Node) -> Var:
    x = node.input(0)
    axes = list(range(node.int("axis", -1) % x.rank, x.rank))
    inner = cast(x, _stash(node, x))
    mean = mb.reduce_mean(x=mb.mul(x=inner, y=inner), axes=axes, keep_dims=True)
    inverse = mb.rsqrt(x=mean, epsilon=constant(np.array(node.float("epsilon", 1e-5)), inner))
    return cast(_scaled(mb.mul(x=inner, y=inverse), node.input(1), None), dtype_of(x))


@converter
def GroupNormalization(node: Node) -> Var:
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    groups, channels = node.int("num_groups"), x.shape[1]
    if not is_static([channels]) or channels % groups:
        node.fail(f"cuts {channels} channels into {groups} groups, which must divide them")
    inner = cast(x, _stash(node, x))
    rows = reshape(inner, [size_of(x, 0), groups, -1])
    rows = mb.layer_norm(x=rows, axes=[2], epsilon=constant(np.array(node.float("epsilon", 1e-5)), inner))
    if node.opset < 21:
        # Up to opset 20 there is one scale and one bias a group.
        scale, bias = (_repeated(v, int(channels) // groups) for v in (scale, bias))
    scale, bias = (cast(v, dtype_of(rows)) for v in (scale, bias))
    return cast(_affine(shape_like(rows, x), scale, bias, 1), dtype_of(x))


@converter
def LRN(node: Node) -> Var:
    x, size = node.input(0), node.int("size")
    alpha, beta, bias = node.float("alpha", 1e-4), node.float("beta", 0.75), node.float("bias", 1.0)
    if size % 2 and 3 <= x.rank <= 4:
        values = {name: constant(np.array(v), x) for name, v in (("alpha", alpha), ("beta", beta), ("k", bias))}
        return mb.local_response_norm(x=x, size=size, **values, name=node.name)
    # An even window has one channel more after than before.
    rows = reshape(mb.square(x=x), [size_of(x, 0), 1, size_of(x, 1), -1])
    before = (size - 1) // 2
    mean = mb.avg_pool(x=rows, kernel_sizes=[size, 1], pad_type="custom", pad=[before, size - 1 - before, 0, 0])
    powers = mb.add(x=mb.mul(x=mean, y=constant(np.array(alpha), x)), y=constant(np.array(bias), x))
    divisor = mb.pow(x=powers, y=constant(np.array(beta), x))
    return mb.real_div(x=x, y=shape_like(divisor, x), name=node.name)


@converter
def LpNormalization(node: Node) -> Var:
    x, p = node.input(0), node.int("p", 2)
    if p not in (1, 2):
        node.fail(f"has the norm p = {p}; ONNX knows 1 and 2")
    reduce = mb.reduce_l1_norm if p == 1 else mb.reduce_l2_norm
    norm = reduce(x=x, axes=[node.int("axis", -1)], keep_dims=True)
    # All zeros stay zeros.
    one = constant(np.array(1.0), x)
    norm = mb.select(cond=mb.equal(x=norm, y=constant(np.array(0.0), x)), a=one, b=norm)
    return mb.real_div(x=x, y=norm, name=node.name)


@converter
def MeanVarianceNormalization(node: Node) -> Var:
    dtype, x = dtype_of(node.input(0)), cast(node.input(0), "fp32")
    mean, variance = _statistics(x, [axis % x.rank for axis in node.ints("axes", [0, 2, 3])])
    deviation = mb.add(x=mb.sqrt(x=variance), y=np.float32(1e-9))
    return cast(mb.real_div(x=mb.sub(x=x, y=mean), y=deviation), dtype)


@converter("SimplifiedLayerNormalization")
def SimplifiedLayerNormalization(node: Node) -> Var:
    # onnxruntime's name of RMSNormalization, which it puts into ONNX's own domain.
    return RMSNormalization(node)


@converter("SkipLayerNormalization", domain="com.microsoft")
def SkipLayerNormalization(node: Node) -> Sequence[Var | None]:
    x, scale, bias = _skipped(node, 4), node.input(2), node.optional(3)
    inner = cast(x, "fp32")
    y = mb.layer_norm(x=inner, axes=[-1], epsilon=np.float32(node.float("epsilon", 1e-12)))
    return [cast(_scaled(y, scale, bias), dtype_of(x)), None, None, x]


@converter("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def SkipSimplifiedLayerNormalization(node: Node) -> Sequence[Var | None]:
    x = _skipped(node, 3)
    inner = cast(x, "fp32")
    mean = mb.reduce_mean(x=mb.mul(x=inner, y=inner), axes=[-1], keep_dims=True)
    inverse = mb.rsqrt(x=mean, epsilon=np.float32(node.float("epsilon", 1e-12)))
    return [cast(_scaled(mb.mul(x=inner, y=inverse), node.input(2), None), dtype_of(x)), None, None, x]


def _skipped(node: Node, bias: int) -> Var:
    x = mb.add(x=node.input(0), y=node.input(1))
    more = node.optional(bias)
    return x if more is None else mb.add(x=x, y=more)


def _stash(node: Node, x: Var) -> str:
    """The dtype that the graph wants statistics in."""
    wanted = node.int("stash_type", int(ir.DataType.FLOAT))
    return "fp16" if wanted == ir.DataType.FLOAT16 else "fp32" if wanted in _FLOAT32_LIKE else dtype_of(x)


_FLOAT32_LIKE = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def _statistics(x: Var, axes: Sequence[int]) -> tuple[Var, Var]:
    mean = mb.reduce_mean(x=x, axes=list(axes), keep_dims=True)
    return mean, mb.reduce_mean(x=mb.square(x=mb.sub(x=x, y=mean)), axes=list(axes), keep_dims=True)


def _normalised(x: Var, mean: Var, variance: Var, epsilon: float) -> Var:
    inverse = mb.rsqrt(x=mb.add(x=variance, y=constant(np.array(epsilon), variance)))
    return mb.mul(x=mb.sub(x=x, y=mean), y=inverse)


def _affine(y: Var, scale: Var, bias: Var, axis: int, name: str | None = None) -> Var:
    """``y`` times one scale a channel, plus one bias."""
    scaled = mb.mul(x=y, y=per_channel(scale, y.rank, axis))
    return mb.add(x=scaled, y=per_channel(bias, y.rank, axis), **({} if name is None else {"name": name}))


def _scaled(y: Var, scale: Var, bias: Var | None) -> Var:
    """``y`` times ``scale``, plus ``bias``, in the dtype of ``y``."""
    y = mb.mul(x=y, y=cast(scale, dtype_of(y)))
    return y if bias is None else mb.add(x=y, y=cast(bias, dtype_of(y)))


def _fits(v: Var, sizes: Sequence[object]) -> bool:
    return v.val is not None and tuple(v.shape) == tuple(sizes)


def _repeated(v: Var, times: int) -> Var:
    if v.val is not None:
        return mb.const(val=np.repeat(v.val, times))
    return mb.reshape(x=mb.tile(x=mb.expand_dims(x=v, axes=[1]), reps=[1, times]), shape=[-1])


def _training_batch_norm(node: Node, x: Var, scale: Var, bias: Var, mean: Var, variance: Var) -> Sequence[Var]:
    """By the statistics of the batch; also the running mean and variance."""
    momentum = node.float("momentum", 0.9)
    found = _statistics(x, [axis for axis in range(x.rank) if axis != 1])
    y = _affine(_normalised(x, *found, node.float("epsilon", 1e-5)), scale, bias, 1)
    running = []
    for old, new in zip((mean, variance), found, strict=True):
        kept = mb.mul(x=old, y=constant(np.array(momentum), old))
        added = mb.mul(x=mb.reshape(x=new, shape=[-1]), y=constant(np.array(1.0 - momentum), new))
        running.append(mb.add(x=kept, y=added))
    return [y, *running]
