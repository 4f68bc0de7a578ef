"""Quantized values and weights of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import packaged
from coreml_nodes import check_node, floats, one_node

RNG = np.random.default_rng()


def _scale(*shape: int) -> tuple[np.ndarray]:
    return (RNG.uniform(0.01, 0.1, shape).astype(np.float32),)


def _integers(dtype: type, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("axis", [None, 1])
def test_quantize_and_dequantize(dtype, axis):
    shape = () if axis is None else (4,)
    zero, more = (_integers(dtype, *shape) if shape else np.array(3, dtype),), {} if axis is None else {"axis": axis}
    check_node("QuantizeLinear", [floats(3, 4, 5) * 5, _scale(*shape), zero], **more)
    check_node("DequantizeLinear", [_integers(dtype, 3, 4, 5), _scale(*shape), zero], **more)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("case", ["tensor", "axis", "block"])
def test_quantized_weights_stay_packed(dtype, case):
    shape, more = {"tensor": ((), {}), "axis": ((48,), {"axis": 1}), "block": ((2, 48), {"axis": 0, "block_size": 16})}[
        case
    ]
    zero = (_integers(dtype, *shape) if shape else np.array(3, dtype),)
    model, _ = one_node("DequantizeLinear", [(_integers(dtype, 32, 48),), _scale(*shape), zero], **more)
    ops = [op.op_type for op in packaged(model).program.functions["main"].operations]
    assert "constexpr_blockwise_shift_scale" in ops
    check_node("DequantizeLinear", [(_integers(dtype, 32, 48),), _scale(*shape), zero], **more)


def test_dynamic_quantization():
    check_node("DynamicQuantizeLinear", [floats(3, 40)], outputs=3)
    check_node("DynamicQuantizeLinear", [np.abs(floats(3, 40)) + 1], outputs=3)
    check_node("DynamicQuantizeLinear", [np.zeros((3, 4), np.float32)], outputs=3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_quantized_products_and_convolutions(dtype):
    a, b = _integers(dtype, 5, 32), (_integers(dtype, 32, 6),)
    zero, out = (np.array(5, dtype),), (np.array([3.0], np.float32)[0:1].reshape(()),)
    check_node("QLinearMatMul", [a, _scale(), zero, b, _scale(), zero, out, zero])
    x, w = _integers(np.uint8, 1, 4, 7, 6), (_integers(np.int8, 6, 4, 3, 3),)
    first, bias = (np.array(100, np.uint8),), (_integers(np.int8, 6).astype(np.int32),)
    inputs = [x, _scale(), first, w, _scale(6), (np.zeros(6, np.int8),), out, first, bias]
    check_node("QLinearConv", inputs, pads=[1, 1, 1, 1])
    check_node("ConvInteger", [x, (_integers(np.uint8, 6, 4, 3, 3),), first], pads=[1, 0, 1, 0])


def test_what_onnxruntime_makes_of_quantized_models():
    ms = {"domain": "com.microsoft"}
    a, b, zero, signed = floats(5, 32), (_integers(np.int8, 32, 6),), (np.array(7, np.uint8),), (np.array(2, np.int8),)
    check_node("DynamicQuantizeMatMul", [a, b, _scale(), signed, (floats(6),)], rtol=1e-4, **ms)
    integers = _integers(np.uint8, 5, 32)
    check_node("MatMulIntegerToFloat", [integers, b, _scale(), _scale(6), zero, None, (floats(6),)], **ms)
    x, y = _integers(np.uint8, 2, 3, 4, 5), _integers(np.uint8, 2, 3, 4, 5)
    out = (np.array(0.2, np.float32),)
    check_node("QLinearAdd", [x, _scale(), zero, y, _scale(), zero, out, zero], **ms)
    check_node("QLinearMul", [x, _scale(), zero, y, _scale(), zero, out, zero], **ms)
    check_node("QLinearGlobalAveragePool", [x, _scale(), zero, _scale(), zero], **ms)
    check_node("FusedMatMul", [floats(3, 4, 5), floats(3, 6, 5)], transB=1, alpha=0.5, **ms)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", ["none", "one", "packed", "float"])
def test_matmul_n_bits(bits, zero_points):
    if (bits, zero_points) == (8, "float"):
        pytest.skip("onnxruntime has no such kernel")
    width, rows, block = 64, 6, 32
    codes = _integers(np.uint8, rows, width // block, block * bits // 8)
    blob = rows, width // block * bits // 8
    zero = {
        "none": None,
        "one": (np.full(blob, {4: 0x77, 8: 0x07}[bits], np.uint8),),
        "packed": (_integers(np.uint8, *blob),),
        "float": (RNG.uniform(0, 15, (rows, width // block)).astype(np.float32),),
    }[zero_points]
    attributes = {"K": width, "N": rows, "bits": bits, "block_size": block, "domain": "com.microsoft"}
    check_node("MatMulNBits", [floats(3, width), (codes,), _scale(rows, width // block), zero], rtol=2e-5, **attributes)
