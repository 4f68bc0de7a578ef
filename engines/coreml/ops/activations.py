"""Activations, softmax among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import axis_of, constant, is_float, product, reshape, sizes
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter


@converter
def Relu(node: Node) -> Var:
    x = node.input(0)
    return mb.relu(x=x, name=node.name) if is_float(x) else mb.maximum(x=x, y=np.int32(0), name=node.name)


@converter
def LeakyRelu(node: Node) -> Var:
    x = node.input(0)
    return mb.leaky_relu(x=x, alpha=constant(node.float("alpha", 0.01), x), name=node.name)


@converter
def PRelu(node: Node) -> Var:
    x, slope = node.input(0), node.input(1)
    zero = constant(0, x)
    below = mb.mul(x=slope, y=mb.minimum(x=x, y=zero))
    return mb.add(x=mb.maximum(x=x, y=zero), y=below, name=node.name)


@converter
def Elu(node: Node) -> Var:
    x = node.input(0)
    return mb.elu(x=x, alpha=constant(node.float("alpha", 1.0), x), name=node.name)


@converter
def Selu(node: Node) -> Var:
    x = node.input(0)
    alpha, gamma = node.float("alpha", 1.67326319217681884765625), node.float("gamma", 1.05070102214813232421875)
    return mb.mul(x=mb.elu(x=x, alpha=constant(alpha, x)), y=constant(gamma, x), name=node.name)


@converter
def Celu(node: Node) -> Var:
    x = node.input(0)
    alpha = constant(node.float("alpha", 1.0), x)
    return mb.mul(x=mb.elu(x=mb.real_div(x=x, y=alpha), alpha=constant(1, x)), y=alpha, name=node.name)


@converter
def Gelu(node: Node) -> Var:
    mode = "TANH_APPROXIMATION" if node.string("approximate", "none") == "tanh" else "EXACT"
    return mb.gelu(x=node.input(0), mode=mode, name=node.name)


@converter
def Swish(node: Node) -> Var:
    x, alpha = node.input(0), node.float("alpha", 1.0)
    if alpha == 1:
        return mb.silu(x=x, name=node.name)
    return mb.mul(x=x, y=mb.sigmoid(x=mb.mul(x=x, y=constant(alpha, x))), name=node.name)


@converter
def Mish(node: Node) -> Var:
    x = node.input(0)
    return mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)), name=node.name)


@converter
def Sigmoid(node: Node) -> Var:
    return mb.sigmoid(x=node.input(0), name=node.name)


@converter
def Tanh(node: Node) -> Var:
    return mb.tanh(x=node.input(0), name=node.name)


@converter
def HardSigmoid(node: Node) -> Var:
    x = node.input(0)
    alpha, beta = constant(node.float("alpha", 0.2), x), constant(node.float("beta", 0.5), x)
    return mb.sigmoid_hard(x=x, alpha=alpha, beta=beta, name=node.name)


@converter
def HardSwish(node: Node) -> Var:
    x = node.input(0)
    gate = mb.sigmoid_hard(x=x, alpha=constant(1 / 6, x), beta=constant(0.5, x))
    return mb.mul(x=x, y=gate, name=node.name)


@converter
def Softplus(node: Node) -> Var:
    return mb.softplus(x=node.input(0), name=node.name)


@converter
def Softsign(node: Node) -> Var:
    return mb.softsign(x=node.input(0), name=node.name)


@converter
def ThresholdedRelu(node: Node) -> Var:
    # mb.thresholded_relu keeps what equals alpha.
    x = node.input(0)
    above = mb.greater(x=x, y=constant(node.float("alpha", 1.0), x))
    return mb.select(cond=above, a=x, b=constant(0, x), name=node.name)


@converter
def Shrink(node: Node) -> Var:
    x = node.input(0)
    bias, limit = constant(node.float("bias", 0.0), x), node.float("lambd", 0.5)
    high = mb.select(cond=mb.greater(x=x, y=constant(limit, x)), a=mb.sub(x=x, y=bias), b=constant(0, x))
    return mb.select(cond=mb.less(x=x, y=constant(-limit, x)), a=mb.add(x=x, y=bias), b=high, name=node.name)


@converter
def Softmax(node: Node) -> Var:
    return _over_axis(node, lambda x, axis: mb.softmax(x=x, axis=axis))


@converter
def LogSoftmax(node: Node) -> Var:
    def build(x: Var, axis: int) -> Var:
        # The greatest is taken away first, or a float16 overflows.
        x = mb.sub(x=x, y=mb.reduce_max(x=x, axes=[axis], keep_dims=True))
        total = mb.reduce_sum(x=mb.exp(x=x), axes=[axis], keep_dims=True)
        return mb.sub(x=x, y=mb.log(x=total, epsilon=constant(0, x)))

    return _over_axis(node, build)


@converter
def Hardmax(node: Node) -> Var:
    def build(x: Var, axis: int) -> Var:
        size = x.shape[axis]
        if not isinstance(size, (int, np.integer)):
            node.fail("works along a dim that varies, whose size Core ML must know")
        best = mb.reduce_argmax(x=x, axis=axis)
        return mb.one_hot(
            indices=best, one_hot_vector_size=int(size), axis=axis, on_value=constant(1, x), off_value=constant(0, x)
        )

    return _over_axis(node, build)


def _over_axis(node: Node, build: Callable[[Var, int], Var]) -> Var:
    """Before opset 13 all dims from the axis on count as one."""
    x = node.input(0)
    axis = axis_of(node.int("axis", -1 if node.opset >= 13 else 1), x.rank)
    if node.opset >= 13 or axis == x.rank - 1:
        return build(x, axis)
    dims = sizes(x)
    flat = reshape(x, [product(dims[:axis]), product(dims[axis:])])
    return reshape(build(flat, 1), dims)
