"""Elementwise ops, activations, comparison, reductions of the evaluator, compared with NumPy and torch in float64."""

import mil_packages
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from mil_packages import error, run, t

F = torch.nn.functional
# All in float32 on a handful of values: rounding only.
BOUND = 2e-6


def agree(found, expected, bound=BOUND):
    mil_packages.agree(found, expected, bound)


def test_unary(tmp_path):
    rng = np.random.default_rng()
    x = rng.uniform(-0.95, 0.95, (3, 4, 5)).astype(np.float32)
    x64 = x.astype(np.float64)
    references = {
        "abs": np.abs, "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "atanh": np.arctanh,
        "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "exp": np.exp, "exp2": np.exp2, "floor": np.floor,
        "sign": np.sign, "sin": np.sin, "sinh": np.sinh, "square": np.square, "tan": np.tan, "tanh": np.tanh,
        "erf": lambda v: torch.erf(t(v)).numpy(),
        "relu": lambda v: np.maximum(v, 0), "relu6": lambda v: np.clip(v, 0, 6),
        "sigmoid": lambda v: torch.sigmoid(t(v)).numpy(), "silu": lambda v: F.silu(t(v)).numpy(),
        "softplus": lambda v: F.softplus(t(v)).numpy(), "softsign": lambda v: F.softsign(t(v)).numpy(),
    }  # fmt: skip
    found = run(tmp_path, lambda x: [getattr(mb, name)(x=x) for name in references], {"x": x})
    agree(found, [reference(x64) for reference in references.values()])


def test_unary_of_wide_values(tmp_path):
    x = np.array([-200, -9.5, -2.5, -0.5, 0, 0.5, 1.5, 2.5, 30, 200], np.float32)

    def body(x):
        return [mb.round(x=x), mb.sigmoid(x=x), mb.softplus(x=x), mb.tanh(x=x), mb.gelu(x=x), mb.softmax(x=x)]

    expected = [
        torch.round(t(x)), torch.sigmoid(t(x)), F.softplus(t(x)), torch.tanh(t(x)), F.gelu(t(x)),
        torch.softmax(t(x), -1),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected)


def test_unary_with_parameters(tmp_path):
    rng = np.random.default_rng()
    x = rng.uniform(0.1, 3, (2, 3, 4)).astype(np.float32)
    y = rng.uniform(-3, 3, (2, 3, 4)).astype(np.float32)

    def body(x, y):
        return [
            mb.clip(x=y, alpha=-0.7, beta=1.1), mb.inverse(x=x, epsilon=0.3), mb.log(x=x, epsilon=0.2), mb.log(x=x),
            mb.rsqrt(x=x, epsilon=0.4), mb.rsqrt(x=x), mb.sqrt(x=x), mb.threshold(x=y, alpha=0.6),
            mb.clamped_relu(x=y, alpha=0.2, beta=1.5), mb.elu(x=y, alpha=0.7), mb.leaky_relu(x=y, alpha=0.1),
            mb.linear_activation(x=y, alpha=0.4, beta=0.9),
            mb.scaled_tanh(x=y, alpha=1.7, beta=0.6), mb.sigmoid_hard(x=y, alpha=0.3, beta=0.4),
            mb.thresholded_relu(x=y, alpha=0.5), mb.softmax(x=y, axis=1), mb.gelu(x=y, mode="EXACT"),
            mb.gelu(x=y, mode="TANH_APPROXIMATION"), mb.gelu(x=y, mode="SIGMOID_APPROXIMATION"),
        ]  # fmt: skip

    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    expected = [
        np.clip(y64, -0.7, 1.1), 1 / (x64 + 0.3), np.log(x64 + 0.2), np.log(x64), 1 / np.sqrt(x64 + 0.4),
        1 / np.sqrt(x64), np.sqrt(x64), np.maximum(y64, 0.6), np.minimum(F.leaky_relu(t(y), 0.2).numpy(), 1.5),
        F.elu(t(y), 0.7), F.leaky_relu(t(y), 0.1), 0.4 * y64 + 0.9, 1.7 * np.tanh(0.6 * y64),
        np.clip(0.3 * y64 + 0.4, 0, 1), np.where(y64 >= 0.5, y64, 0), torch.softmax(t(y), 1), F.gelu(t(y)),
        F.gelu(t(y), approximate="tanh"), y64 * torch.sigmoid(1.702 * t(y)).numpy(),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x, "y": y}), expected)


def test_activations_per_channel(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    alpha, beta = rng.uniform(0.1, 2, (2, 3)).astype(np.float32)

    def body(x):
        return [mb.prelu(x=x, alpha=alpha), mb.softplus_parametric(x=x, alpha=alpha, beta=beta)]

    by_channel = t(alpha).reshape(3, 1, 1), t(beta).reshape(3, 1, 1)
    expected = [F.prelu(t(x), t(alpha)), by_channel[0] * F.softplus(t(x) * by_channel[1])]
    agree(run(tmp_path, body, {"x": x}), expected)


def test_binary_and_comparison(tmp_path):
    rng = np.random.default_rng()
    x = rng.uniform(0.5, 4, (2, 3, 4)).astype(np.float32)
    y = (rng.uniform(0.5, 3, (3, 1)) * rng.choice([-1, 1], (3, 1))).astype(np.float32)
    y[0] = x[0, 0, 0]
    i = rng.integers(-9, 9, (4, 5)).astype(np.int32)
    j = rng.choice([-5, -3, -2, 2, 3, 4], (4, 5)).astype(np.int32)
    arithmetic = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "floor_div": np.floor_divide, "mod": np.mod,
        "maximum": np.maximum, "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal,
        "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal,
    }  # fmt: skip
    floats = {**arithmetic, "real_div": np.divide, "pow": np.power}

    def body(x, y, i, j):
        ones, twos = mb.greater(x=i, y=0), mb.greater(x=j, y=0)
        return [
            *[getattr(mb, name)(x=x, y=y) for name in floats],
            *[getattr(mb, name)(x=i, y=j) for name in arithmetic],
            mb.logical_and(x=ones, y=twos), mb.logical_or(x=ones, y=twos), mb.logical_xor(x=ones, y=twos),
            mb.logical_not(x=ones), mb.select(cond=ones, a=i, b=j), mb.pow(x=i, y=3),
        ]  # fmt: skip

    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    expected = [
        *[reference(x64, y64) for reference in floats.values()],
        *[reference(i.astype(np.int64), j) for reference in arithmetic.values()],
        (i > 0) & (j > 0), (i > 0) | (j > 0), (i > 0) ^ (j > 0), i <= 0, np.where(i > 0, i, j), i.astype(np.int64) ** 3,
    ]  # fmt: skip
    found = run(tmp_path, body, {"x": x, "y": y, "i": i, "j": j})
    # Remainders and quotients next to an integer may fall on either side of it.
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= 1e-5


def test_int32_wraps_around(tmp_path):
    i = np.array([2**31 - 1, -(2**31), 123456789], np.int32)
    found = run(tmp_path, lambda i: [mb.add(x=i, y=i), mb.mul(x=i, y=i), mb.reduce_sum(x=i), mb.abs(x=i)], {"i": i})
    wide = i.astype(np.int64)
    expected = [wide * 2, wide * wide, wide.sum(), np.abs(wide)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, other.astype(np.int32))


def test_cast(tmp_path):
    x = np.array([-3.7, -0.2, 0, 0.9, 300.6, 1e20, -1e20, np.nan], np.float32)

    def body(x):
        small = mb.cast(x=x, dtype="int32")
        return [
            small, mb.cast(x=mb.cast(x=x, dtype="uint8"), dtype="int32"), mb.cast(x=x, dtype="bool"),
            mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32"), mb.cast(x=small, dtype="fp32"),
            mb.cast(x=mb.cast(x=small, dtype="int8"), dtype="int32"),
        ]  # fmt: skip

    found = run(tmp_path, body, {"x": x})
    integers = [-3, 0, 0, 0, 300, 2**31 - 1, -(2**31), 0]
    np.testing.assert_array_equal(found[0], integers)
    np.testing.assert_array_equal(found[1], [0, 0, 0, 0, 255, 255, 0, 0])
    np.testing.assert_array_equal(found[2], [1, 1, 0, 1, 1, 1, 1, 1])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found[3], x.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(found[4], np.array(integers, np.float32))
    np.testing.assert_array_equal(found[5], [-3, 0, 0, 0, 44, -1, 0, 0])


def test_float16_rounds_after_each_op(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((64, 48)).astype(np.float16)
    weight = rng.standard_normal((32, 48)).astype(np.float16)

    def body(x):
        product = mb.linear(x=x, weight=weight)
        wide = mb.mul(x=x, y=np.float16(200))
        return [
            product,
            mb.exp(x=mb.mul(x=product, y=np.float16(0.1))),
            mb.mul(x=product, y=np.float16(30000)),
            # The squares do not fit in float16, the root of their sum does.
            mb.reduce_l2_norm(x=wide, axes=[-1]),
        ]

    found = run(tmp_path, body, {"x": x})
    product = (x.astype(np.float32) @ weight.astype(np.float32).T).astype(np.float16)
    scaled = (product.astype(np.float32) * np.float32(np.float16(0.1))).astype(np.float16)
    assert all(one.dtype == np.float16 for one in found)
    # Sums in another order may round to the neighbour.
    assert error(found[0], product) <= 1e-4
    assert error(found[1], np.exp(scaled.astype(np.float32)).astype(np.float16)) <= 2e-3
    assert np.isinf(found[2]).any()
    wide = (x.astype(np.float32) * 200).astype(np.float16)
    assert error(found[3], np.linalg.norm(wide.astype(np.float64), axis=-1)) <= 1e-3
    assert error(found[0], x.astype(np.float64) @ weight.astype(np.float64).T) >= 5e-5


def test_reductions(tmp_path):
    rng = np.random.default_rng()
    x = rng.uniform(0.2, 2, (3, 4, 5)).astype(np.float32)
    i = rng.permutation(60).reshape(3, 4, 5).astype(np.int32)
    names = ["l1_norm", "l2_norm", "log_sum", "log_sum_exp", "max", "mean", "min", "prod", "sum", "sum_square"]

    def body(x, i):
        ops = [getattr(mb, f"reduce_{name}") for name in names]
        return [
            *[reduce(x=x, axes=[0, -1], keep_dims=True) for reduce in ops],
            *[reduce(x=x, axes=[1], keep_dims=False) for reduce in ops],
            *[reduce(x=x) for reduce in ops],
            mb.reduce_argmax(x=i, axis=1), mb.reduce_argmin(x=i, axis=-1, keep_dims=True), mb.reduce_sum(x=i, axes=[0]),
            mb.cumsum(x=x, axis=1), mb.cumsum(x=x, axis=-1, exclusive=True), mb.cumsum(x=x, axis=0, reverse=True),
            mb.cumsum(x=x, axis=1, exclusive=True, reverse=True),
        ]  # fmt: skip

    v = x.astype(np.float64)
    expected = []
    for axes, keep in (((0, -1), True), ((1,), False), (None, False)):

        def over(function, values, axes=axes, keep=keep):
            return function(values, axis=axes, keepdims=keep)

        expected += [
            over(np.sum, np.abs(v)), np.sqrt(over(np.sum, v**2)), np.log(over(np.sum, v)),
            np.log(over(np.sum, np.exp(v))), over(np.max, v), over(np.mean, v), over(np.min, v), over(np.prod, v),
            over(np.sum, v), over(np.sum, v**2),
        ]  # fmt: skip
    backwards = torch.flip(torch.cumsum(torch.flip(t(x), [1]), 1), [1])
    expected += [
        i.argmax(1), i.argmin(-1)[..., None], i.sum(0), np.cumsum(v, 1), np.cumsum(v, -1) - v,
        v[::-1].cumsum(0)[::-1], backwards.numpy() - v,
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x, "i": i}), expected, 1e-5)
