"""Packed weights of the Core ML target: what the package unpacks, and what it takes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.ops.packed_weights import ORDERS, packed_as
from intaglio.engines.coreml.package import write_package
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import (
    DOMAIN,
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    pack_codes,
)

TERNARY = GroupedQuantFormat(2, 128, 1)


def _rows(
    rows: int, width: int, layout: GroupedQuantFormat, dtype: np.dtype, offsets: bool = False
) -> GroupedQuantRows:
    rng = np.random.default_rng()
    top = 3 if layout == TERNARY else 1 << layout.bits
    codes = pack_codes(rng.integers(0, top, (rows, width), np.uint8), layout.bits)
    groups = layout.groups_shape((rows, width))
    scales = (rng.uniform(0.01, 0.05, groups)).astype(dtype)
    return GroupedQuantRows(codes, scales, rng.normal(0, 0.1, groups).astype(dtype) if offsets else np.zeros([], dtype))


def _model(
    rows: list[GroupedQuantRows], layout: GroupedQuantFormat, op: str, shape: list[int], dtype: ir.DataType
) -> ir.Model:
    """The op on each of the weights, of one input."""
    attributes = {"bits": layout.bits, "group_size": layout.group_size, "zero_point": layout.zero_point}
    x = ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))
    nodes, weights = [], []
    for i, each in enumerate(rows):
        parts = []
        for name, array in (("codes", each.codes), ("scales", each.scales), ("offsets", each.offsets)):
            tensor = ir.tensor(array, name=f"{name}{i}")
            parts.append(
                ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            )
        weights += parts
        nodes.append(ir.node(op, [x, *parts], attributes, domain=DOMAIN, outputs=[ir.Value(name=f"y{i}")]))
    graph = ir.Graph(
        [x],
        [node.outputs[0] for node in nodes],
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 23, DOMAIN: 1},
        name="g",
    )
    return ir.Model(graph, ir_version=11)


def _packaged(model: ir.Model, order: str, path: Path) -> Evaluator:
    with packed_as(order):
        converted = convert(model, "model.onnx")
    write_package(converted, path)
    return Evaluator(path)


def _weight_read(rows: GroupedQuantRows, layout: GroupedQuantFormat, order: str, path: Path) -> np.ndarray:
    """The weight that the package unpacks, asked for by looking up all of its rows."""
    count = rows.codes.shape[0]
    model = _model([rows], layout, "GroupedQuantGather", [count], ir.DataType.INT64)
    evaluator = _packaged(model, order, path)
    (found,) = evaluator.run({"x": np.arange(count, dtype=np.int32)}).values()
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_ternary_weights_are_unpacked_exactly(order, dtype, tmp_path):
    rows = _rows(12, 256, TERNARY, np.dtype(dtype))
    found = _weight_read(rows, TERNARY, order, tmp_path / "w.mlpackage")
    np.testing.assert_array_equal(found, dequantize(rows, TERNARY))


@pytest.mark.parametrize("layout", [(4, 32, 8), (4, 32, 0), (8, 32, 128), (8, 64, 7), (2, 64, 2)], ids=str)
def test_integers_of_every_width_are_unpacked_exactly(layout, tmp_path):
    quantization = GroupedQuantFormat(*layout)
    rows = _rows(6, 128, quantization, np.dtype(np.float16))
    found = _weight_read(rows, quantization, ORDERS[0], tmp_path / "w.mlpackage")
    np.testing.assert_array_equal(found, dequantize(rows, quantization))


@pytest.mark.parametrize("layout", [(4, 32, 0), (8, 32, 0), (2, 64, 0), (4, 64, 8)], ids=str)
@pytest.mark.parametrize("order", ["lut", "int4"])
def test_offsets(layout, order, tmp_path):
    quantization = GroupedQuantFormat(*layout)
    rows = _rows(6, 128, quantization, np.dtype(np.float16), offsets=True)
    rows.scales[2, 1] = 0  # a group of equal values
    found = _weight_read(rows, quantization, order, tmp_path / "w.mlpackage")
    np.testing.assert_allclose(found, dequantize(rows, quantization), rtol=0, atol=2e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [[3, 256], [2, 3, 256], [1, 2, 3, 256]], ids=str)
def test_products(order, shape, tmp_path):
    rows = _rows(12, 256, TERNARY, np.dtype(np.float16))
    evaluator = _packaged(
        _model([rows], TERNARY, "GroupedQuantMatMul", shape, ir.DataType.FLOAT),
        order,
        tmp_path / "w.mlpackage",
    )
    x = np.random.default_rng().standard_normal(shape).astype(np.float32)
    (found,) = evaluator.run({"x": x}).values()
    wanted = x.astype(np.float64) @ dequantize(rows, TERNARY).astype(np.float64).T
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_products_in_float16_keep_float16_weights(tmp_path):
    rows = _rows(12, 256, TERNARY, np.dtype(np.float32))
    model = _model([rows], TERNARY, "GroupedQuantMatMul", [4, 256], ir.DataType.FLOAT16)
    evaluator = _packaged(model, ORDERS[0], tmp_path / "w.mlpackage")
    x = np.random.default_rng().standard_normal((4, 256)).astype(np.float16)
    (found,) = evaluator.run({"x": x}).values()
    wanted = x.astype(np.float64) @ dequantize(rows, TERNARY).astype(np.float64).T
    assert found.dtype == np.float16
    assert np.linalg.norm(found - wanted) <= 2e-3 * np.linalg.norm(wanted)


# Bits a value over four matrices of one shape: 2 for the value and 16/128 for the scale at least.
BITS = {"lut": 2.20, "lut-compact": 2.14, "lut-fp16": 2.52, "int4": 4.14}


@pytest.mark.parametrize("order", ORDERS)
def test_bits_a_value_on_disk(order, tmp_path):
    rows = [_rows(512, 1024, TERNARY, np.dtype(np.float16)) for _ in range(4)]
    path = tmp_path / "w.mlpackage"
    _packaged(_model(rows, TERNARY, "GroupedQuantMatMul", [1, 1024], ir.DataType.FLOAT), order, path)
    (weights,) = path.rglob("weight.bin")
    assert weights.stat().st_size * 8 / (4 * 512 * 1024) <= BITS[order]


def test_an_order_that_there_is_not():
    with (
        pytest.raises(ValueError, match="lut, lut-compact, lut-fp16, int4; found 'lut3'"),
        packed_as("lut3"),
    ):
        pass


def test_scales_beyond_float16_are_refused(tmp_path):
    rows = _rows(4, 128, TERNARY, np.dtype(np.float32))
    rows.scales[1, 0] = 1e6
    model = _model([rows], TERNARY, "GroupedQuantMatMul", [4, 128], ir.DataType.FLOAT16)
    with pytest.raises(CompileError, match=r"GroupedQuantMatMul.*1e\+06.*without --dtype"):
        _packaged(model, ORDERS[0], tmp_path / "w.mlpackage")
