"""Products, convolutions and pools of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import evaluated
from coreml_nodes import check_node, floats, one_node, weight

from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim

RNG = np.random.default_rng()


@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 3, 5, 7), (7, 3)), ((7,), (7, 3)), ((2, 5, 7), (7,)), ((7,), (7,))],
)
def test_matmul_with_a_weight(a, b):
    check_node("MatMul", [floats(*a), weight(*b)])


@pytest.mark.parametrize("transposes", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("bias", [None, (3,), (5, 3), (1,)])
def test_gemm(transposes, bias):
    a, b = ((5, 7), (7, 5))[transposes[0]], ((7, 3), (3, 7))[transposes[1]]
    inputs = [floats(*a), weight(*b), None if bias is None else weight(*bias)]
    check_node("Gemm", inputs, transA=transposes[0], transB=transposes[1], alpha=0.75, beta=1.5)


@pytest.mark.parametrize("depth", [64, 1200])
def test_integer_products_are_exact(depth):
    a, b = RNG.integers(0, 256, (3, depth), np.uint8), RNG.integers(-128, 128, (depth, 4), np.int8)
    zero_points = [(np.array(37, np.uint8),), (np.array([1, 0, -3, 5], np.int8),)]
    check_node("MatMulInteger", [a, (b,), *zero_points])
    check_node("MatMulInteger", [a, b])


CONVOLUTIONS = [
    ((2, 4, 11), (6, 4, 3), {"pads": [1, 2], "strides": [2]}),
    ((1, 4, 9, 8), (6, 2, 3, 3), {"group": 2, "dilations": [2, 1], "pads": [2, 1, 2, 1]}),
    ((1, 4, 9, 8), (8, 1, 3, 2), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 4, 9, 8), (8, 4, 2, 2), {"auto_pad": "SAME_LOWER"}),
    ((1, 4, 9, 8), (8, 4, 3, 3), {"auto_pad": "VALID", "strides": [1, 3]}),
    ((1, 2, 5, 6, 7), (3, 2, 3, 2, 1), {"pads": [1, 0, 0, 1, 1, 0]}),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: str(case[2]))
@pytest.mark.parametrize("known", [True, False])
def test_conv(case, known):
    x, w, attributes = case
    bias, kernel = floats(w[0]), floats(*w)
    check_node("Conv", [floats(*x), *(((kernel,), (bias,)) if known else (kernel, bias))], rtol=2e-5, **attributes)


@pytest.mark.parametrize("size", [(9, 10), (12, 7)])
@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_same_windows_over_sizes_that_vary(auto, size):
    dims = {"n": Dim(min=1, max=4), "h": Dim(min=4, max=32), "w": Dim(min=4, max=32)}
    x, how = floats(2, 3, *size), {"auto_pad": auto, "strides": [2, 3], "dims": dims, "vary": "n,3,h,w"}
    check_node("Conv", [x, weight(5, 3, 3, 2)], rtol=2e-5, **how)
    check_node("MaxPool", [x], kernel_shape=[3, 4], **how)
    check_node("AveragePool", [x], kernel_shape=[3, 4], **how)


def test_conv_over_sizes_that_vary():
    dims = {"n": Dim(min=1, max=4), "h": Dim(min=4, max=32), "w": Dim(min=4, max=32)}
    inputs = [floats(2, 3, 9, 10), weight(5, 3, 3, 3), weight(5)]
    check_node("Conv", inputs, vary="n,3,h,w", dims=dims, auto_pad="SAME_UPPER")
    windows = {"kernel_shape": [2, 2], "strides": [2, 2]}
    model, feeds = one_node("LpPool", inputs[:1], vary="n,3,h,w", auto_pad="SAME_UPPER", **windows)
    with pytest.raises(CompileError, match=r"SAME_UPPER.*size varies.*--shapes"):
        evaluated(model, feeds, dims=dims)


TRANSPOSED = [
    ((2, 4, 6), (4, 3, 3), {"strides": [2], "output_padding": [1], "pads": [1, 1]}),
    ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [1, 2]}),
    ((1, 4, 5, 6), (4, 2, 2, 3), {"group": 2, "dilations": [2, 2]}),
    ((1, 4, 5, 6), (4, 2, 3, 3), {"output_shape": [10, 12], "strides": [2, 2]}),
    ((1, 4, 5, 6), (4, 2, 3, 3), {"output_shape": [10, 11], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 4, 5, 6), (4, 2, 3, 3), {"output_shape": [10, 14], "strides": [2, 2], "output_padding": [1, 1]}),
    ((1, 4, 5, 6), (4, 2, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 4, 5, 6), (4, 2, 2, 2), {"strides": [2, 2], "output_padding": [1, 1]}),
    ((1, 2, 3, 4, 3), (2, 2, 2, 2, 3), {"strides": [2, 1, 2]}),
]


@pytest.mark.parametrize("case", TRANSPOSED, ids=lambda case: str(case[2]))
def test_conv_transpose(case):
    x, w, attributes = case
    check_node(
        "ConvTranspose", [floats(*x), weight(*w), weight(w[1] * attributes.get("group", 1))], rtol=2e-5, **attributes
    )


POOLS = [
    ((2, 3, 10), {"kernel_shape": [3], "strides": [2]}),
    ((1, 3, 10, 9), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    ((1, 3, 10, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 3, 10, 9), {"kernel_shape": [3, 2], "strides": [3, 2], "ceil_mode": 1}),
    ((1, 3, 10, 9), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}),
    ((1, 3, 10, 9), {"kernel_shape": [4, 3], "strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 6, 7, 5), {"kernel_shape": [2, 3, 2], "strides": [2, 2, 1], "ceil_mode": 1}),
]


@pytest.mark.parametrize("case", POOLS, ids=lambda case: str(case[1]))
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "AveragePool with pads", "LpPool"])
def test_pools(case, op):
    shape, attributes = case
    op, *with_pads = op.split(" with ")
    if op == "LpPool" and attributes.get("ceil_mode"):
        pytest.skip("onnxruntime's LpPool knows no ceil_mode")
    more = {"count_include_pad": 1} if with_pads else {"p": 3} if op == "LpPool" else {}
    check_node(op, [floats(*shape)], rtol=2e-5, **attributes, **more)


@pytest.mark.parametrize("storage_order", [0, 1])
def test_where_the_maxima_were(storage_order):
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "storage_order": storage_order}
    check_node("MaxPool", [floats(2, 3, 8, 7)], outputs=2, **attributes)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pools(op):
    check_node(op, [floats(2, 3, 5, 4)], 17, **({"p": 3} if op == "GlobalLpPool" else {}))


def test_pools_of_integers_stay_integers():
    check_node("MaxPool", [RNG.integers(0, 256, (1, 2, 6, 6), np.uint8)], kernel_shape=[2, 2])


def test_what_cannot_be_pooled_names_node_and_op():
    model, feeds = one_node("MaxPool", [floats(1, 2, 3, 3, 3, 3)[0]], kernel_shape=[2, 2, 2])
    assert evaluated(model, feeds)[0][0].shape == (2, 3, 2, 2, 2)
    model, feeds = one_node("Conv", [floats(2, 3), weight(5, 3)])
    with pytest.raises(CompileError, match=r"Conv, opset 21.*over 0 axes"):
        evaluated(model, feeds)
