"""Normalisations of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import evaluated, expected, packaged
from coreml_nodes import check_node, floats, one_node, weight


def _positive(n: int) -> tuple[np.ndarray]:
    return (np.abs(floats(n)) + 0.5,)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 6), (2, 4, 3, 2, 3)])
@pytest.mark.parametrize("opset", [8, 9, 14, 15])
def test_batch_normalization(shape, opset):
    check_node(
        "BatchNormalization", [floats(*shape), weight(4), weight(4), weight(4), _positive(4)], opset, epsilon=1e-3
    )


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 6), (2, 4, 3, 2, 3)])
def test_instance_normalization(shape):
    check_node("InstanceNormalization", [floats(*shape), weight(4), weight(4)], epsilon=1e-3, rtol=3e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_normalization(axis, bias):
    shape = (3, 4, 5)[axis % 3 :]
    check_node("LayerNormalization", [floats(3, 4, 5), weight(*shape), weight(*shape) if bias else None], axis=axis)


def test_layer_normalization_with_its_statistics():
    check_node("LayerNormalization", [floats(3, 4, 5), weight(5), weight(5)], outputs=3, rtol=3e-5)


@pytest.mark.parametrize(("opset", "scales"), [(18, 3), (21, 12)])
def test_group_normalization(opset, scales):
    check_node(
        "GroupNormalization", [floats(2, 12, 5, 4), weight(scales), weight(scales)], opset, num_groups=3, rtol=3e-6
    )


def test_group_normalization_of_float16():
    x = (floats(2, 12, 5, 4) * 3).astype(np.float16)
    scale, bias = ((floats(12).astype(np.float16),) for _ in range(2))
    model, feeds = one_node("GroupNormalization", [x, scale, bias], 21, num_groups=3)
    (ours,), (theirs,) = evaluated(model, feeds)[0], expected(model, feeds)
    assert ours.dtype == np.float16
    np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization(axis):
    check_node("RMSNormalization", [floats(3, 4, 5), weight(*(3, 4, 5)[axis:])], 23, axis=axis, epsilon=1e-4)


def test_statistics_of_float16_are_float32():
    # The squares are beyond float16.
    x = (floats(4, 64) * 600).astype(np.float16)
    for op, more in (("RMSNormalization", []), ("LayerNormalization", [(np.zeros(64, np.float16),)])):
        model, feeds = one_node(op, [x, (np.ones(64, np.float16),), *more], 23)
        (ours,), (theirs,) = evaluated(model, feeds)[0], expected(model, feeds)
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", [3, 5])
def test_lrn(size):
    check_node("LRN", [floats(2, 7, 4, 3)], size=size, alpha=0.3, beta=0.6, bias=1.5)


def test_lrn_over_an_even_number_of_channels():
    # onnxruntime knows odd ones only; an even window has one channel more after than before.
    model, feeds = one_node("LRN", [floats(2, 7, 4, 3)], size=4, alpha=0.3, beta=0.6, bias=1.5)
    x = feeds["x0"].astype(np.float64)
    squares = np.pad(x**2, ((0, 0), (1, 2), (0, 0), (0, 0)))
    sums = sum(squares[:, i : i + 7] for i in range(4))
    np.testing.assert_allclose(evaluated(model, feeds)[0][0], x / (1.5 + 0.3 / 4 * sums) ** 0.6, rtol=1e-5)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, -1])
def test_lp_normalization(p, axis):
    x = floats(3, 4, 5)
    x[:, 1] = 0
    x[1, :, 2] = 0
    check_node("LpNormalization", [x], p=p, axis=axis)


def test_mean_variance_normalization():
    check_node("MeanVarianceNormalization", [floats(3, 4, 5, 6)], rtol=3e-5)


def test_a_known_layer_norm_is_one_op():
    model, _ = one_node("LayerNormalization", [floats(3, 5), weight(5), weight(5)])
    ops = [op.op_type for op in packaged(model).program.functions["main"].operations if op.op_type != "const"]
    assert ops == ["layer_norm", "identity"]
