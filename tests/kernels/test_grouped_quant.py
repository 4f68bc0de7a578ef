"""The grouped-quantized format: packers, reference, and the function bodies that restate it in ONNX."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from kernel_runner import random_rows
from numpy.typing import DTypeLike
from onnxscript import GraphBuilder

from intaglio.kernels import functions
from intaglio.kernels.grouped_quant import (
    DOMAIN,
    SCALE_DTYPES,
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    matmul,
    pack_codes,
    unpack_codes,
)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3)])
def test_unpacking_restores_what_was_packed(bits: int, leading: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (*leading, 24), dtype=np.uint8)
    packed = pack_codes(values, bits)
    assert packed.shape == (*leading, 24 * bits // 8)
    np.testing.assert_array_equal(unpack_codes(packed, bits), values)


@pytest.mark.parametrize(
    ("bits", "values", "packed"),
    [
        (2, [1, 2, 3, 0, 0, 0, 0, 3], [0b00_11_10_01, 0b11_00_00_00]),
        (4, [0x1, 0xA, 0xF, 0x0], [0xA1, 0x0F]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_the_first_code_is_in_the_lowest_bits(bits: int, values: list[int], packed: list[int]) -> None:
    assert pack_codes(np.array(values, np.uint8), bits).tolist() == packed
    assert unpack_codes(np.array(packed, np.uint8), bits).tolist() == values


def test_packing_does_not_alias_its_argument() -> None:
    values = np.array([1, 2], np.uint8)
    assert not np.shares_memory(pack_codes(values, 8), values)


@pytest.mark.parametrize(
    ("values", "bits", "message"),
    [
        (np.zeros(4, np.int8), 4, "int8, expected uint8"),
        (np.zeros(3, np.uint8), 4, "3 codes of 4 bits"),
        (np.zeros(6, np.uint8), 2, "6 codes of 2 bits"),
        (np.array([16, 0], np.uint8), 4, "code 16 does not fit in 4 bits"),
        (np.array([0, 0, 4, 0], np.uint8), 2, "code 4 does not fit in 2 bits"),
    ],
)
def test_packing_refuses_what_does_not_fit(values: np.ndarray, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_codes(values, bits)


@pytest.mark.parametrize(
    ("bits", "group_size", "zero_point", "message"),
    [
        (3, 32, 0, "bits is 3"),
        (4, 0, 0, "group_size 0"),
        (4, 33, 0, "positive multiple of 2"),
        (2, 6, 0, "positive multiple of 4"),
        (4, 32, 16, "zero_point 16 is not a 4-bit code"),
        (8, 32, -1, "zero_point -1"),
    ],
)
def test_a_format_refuses_what_it_does_not_hold(bits: int, group_size: int, zero_point: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedQuantFormat(bits, group_size, zero_point)


def test_shapes_of_a_weight() -> None:
    quantization = GroupedQuantFormat(4, 32, 8)
    assert quantization.codes_shape((3, 96)) == (3, 48)
    assert quantization.groups_shape((3, 96)) == (3, 3)
    with pytest.raises(ValueError, match="100 is not a multiple of the group size 32"):
        quantization.codes_shape((3, 100))
    with pytest.raises(ValueError, match="100 is not a multiple"):
        quantization.groups_shape((3, 100))


def test_dequantize_in_numbers() -> None:
    rows = GroupedQuantRows(
        codes=pack_codes(np.array([[0, 8, 15, 9]], np.uint8), 4),
        scales=np.array([[0.5, 2.0]], np.float16),
        offsets=np.array([[0.0, 1.0]], np.float16),
    )
    weight = dequantize(rows, GroupedQuantFormat(4, 2, 8))
    assert weight.dtype == np.float32
    assert weight.tolist() == [[-4.0, 0.0, 15.0, 3.0]]
    assert rows.has_offsets


def test_dequantize_rounds_after_the_multiplication_and_after_the_addition() -> None:
    # 3 * (1 + 2**-23) lies halfway between two float32 and rounds up, to the even one. A fused or
    # float64 sum would see the offset first and round down.
    scale, offset = np.float32(1 + 2.0**-23), np.float32(-(2.0**-30))
    rows = GroupedQuantRows(np.array([[3]], np.uint8), np.full((1, 1), scale), np.full((1, 1), offset))
    assert dequantize(rows, GroupedQuantFormat(8, 1, 0))[0, 0] == 3 + 2.0**-21
    assert np.float32(3 * np.float64(scale) + np.float64(offset)) == 3 + 2.0**-22


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "zero_point", "has_offsets"),
    [(2, 128, 1, False), (4, 32, 8, False), (4, 16, 0, True), (8, 32, 128, False), (8, 256, 0, True)],
)
def test_function_bodies_equal_the_reference(
    bits: int, group_size: int, zero_point: int, has_offsets: bool, dtype: np.dtype
) -> None:
    rng = np.random.default_rng(bits * group_size)
    quantization = GroupedQuantFormat(bits, group_size, zero_point)
    rows = random_rows(rng, (11, 256), quantization, dtype, has_offsets)
    attributes = {"bits": bits, "group_size": group_size, "zero_point": zero_point}

    graph = ir.Graph([], [], nodes=[], opset_imports={"": functions.OPSET, DOMAIN: 1}, name="bodies")
    builder = GraphBuilder(graph)
    op = builder.op
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "tokens", 256]))
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["rows"]))
    graph.inputs.extend([x, ids])
    codes, scales, offsets = (
        op.initializer(ir.tensor(array, name=name))
        for array, name in ((rows.codes, "codes"), (rows.scales, "scales"), (rows.offsets, "offsets"))
    )
    y = op.call(functions.grouped_quant_matmul(), x, codes, scales, offsets, **attributes)
    weight = op.call(
        functions.grouped_quant_dequantize(),
        op.Gather(codes, ids),
        op.Gather(scales, ids),
        op.Gather(offsets, ids) if has_offsets else offsets,
        **attributes,
    )
    y.shape, weight.shape = ir.Shape(["batch", "tokens", 11]), ir.Shape(["rows", 256])
    for value, name in ((y, "y"), (weight, "weight")):
        value.name, value.type = name, ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    model = ir.Model(graph, ir_version=11, functions=list(builder.functions.values()))

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    inputs = {"x": rng.normal(size=(2, 3, 256)).astype(np.float32), "ids": np.array([3, 0, 10, 3])}
    y_found, weight_found = session.run(None, inputs)

    expected = dequantize(rows, quantization)
    np.testing.assert_array_equal(weight_found.view(np.uint32), expected[inputs["ids"]].view(np.uint32))
    reference = matmul(inputs["x"], rows, quantization)
    assert np.linalg.norm(y_found - reference) <= 1e-6 * np.linalg.norm(reference)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_the_matmul_of_halves_is_float32s_rounded_once(dtype: DTypeLike) -> None:
    rng = np.random.default_rng(5)
    quantization = GroupedQuantFormat(4, 32, 0)
    rows = random_rows(rng, (11, 256), quantization, np.dtype(np.float16), True)
    half = ir.DataType.from_numpy(np.dtype(dtype))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": functions.OPSET, DOMAIN: 1}, name="halves")
    builder = GraphBuilder(graph)
    # In and out as float32, since onnxruntime's Python face has no bfloat16.
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["tokens", 256]))
    graph.inputs.append(x)
    parts = [
        builder.op.initializer(ir.tensor(array, name=name))
        for array, name in ((rows.codes, "codes"), (rows.scales, "scales"), (rows.offsets, "offsets"))
    ]
    attributes = {"bits": 4, "group_size": 32, "zero_point": 0}
    x_half = builder.op.Cast(x, to=half)
    y_half = builder.op.call(functions.grouped_quant_matmul(), x_half, *parts, **attributes)
    y = builder.op.Cast(y_half, to=ir.DataType.FLOAT)
    y_half.dtype, y.name, y.dtype, y.shape = half, "y", ir.DataType.FLOAT, ir.Shape(["tokens", 11])
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=11, functions=list(builder.functions.values()))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    x_found = rng.normal(size=(7, 256)).astype(dtype).astype(np.float32)
    (found,) = session.run(None, {"x": x_found})
    exact = matmul(x_found, rows, quantization)
    rounded = exact.astype(dtype).astype(np.float32)
    # A sum in another order may lie on the other side of a rounding boundary: then one step apart.
    step = np.float32(ml_dtypes.finfo(dtype).eps) * np.abs(exact)
    assert (np.abs(found - rounded) <= step).all() and (found == rounded).mean() > 0.95
    assert not np.array_equal(found, exact)


def test_infinite_scales_reach_the_weight() -> None:
    rows = GroupedQuantRows(np.array([[255, 0]], np.uint8), np.full((1, 1), 3e38, np.float32), np.zeros((), np.float32))
    assert dequantize(rows, GroupedQuantFormat(8, 2, 0)).tolist() == [[np.inf, 0.0]]


def test_bfloat16_scales_are_read_as_they_are() -> None:
    scales = np.array([[1.0078125]], ml_dtypes.bfloat16)
    rows = GroupedQuantRows(np.array([[1]], np.uint8), scales, np.zeros((), ml_dtypes.bfloat16))
    assert dequantize(rows, GroupedQuantFormat(8, 1, 0))[0, 0] == 1.0078125
