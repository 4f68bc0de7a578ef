"""``MatMulNBitsPass``: packed weights as onnxruntime's own operators, with the numbers of the format's definition.

Bounds, relative L2 against the definition in float64: 1e-6 in float32, 1e-3 in float16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from packed_weights import F16, F32, ROWS, WIDTH, Weight, embedding, product, relative_l2, written
from run_graph import run_onnxruntime

from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.engines.lowering.matmul_n_bits import MatMulNBitsPass
from intaglio.kernels.grouped_quant import GroupedQuantFormat, dequantize

BOUNDS = {F32: 1e-6, F16: 1e-3}
TOKENS = 5
# bits, group size, zero point, offsets; the bits and the block of the operators, and whether there is a second product.
FORMATS = {
    "ternary": (2, 128, 1, False, (4, 128, False)),
    "ternary in groups of 256": (2, 256, 1, False, (4, 128, False)),
    "ternary rows": (2, WIDTH, 1, False, (4, 128, False)),
    "2 bits, affine": (2, 64, 0, True, (4, 64, True)),
    "Q4_0": (4, 32, 8, False, (4, 32, False)),
    "MLX in groups of 64": (4, 64, 0, True, (4, 64, True)),
    "K-quants": (4, 16, 0, True, (4, 16, True)),
    "int8 rows": (8, WIDTH, 128, False, (8, 128, False)),
    "Q8_0": (8, 32, 128, False, (8, 32, False)),
    "8 bits off the middle": (8, 64, 7, False, (8, 64, True)),
    "groups of 12": (4, 12, 8, False, None),
    "groups of 8": (4, 8, 8, False, None),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product(name: str, dtype: ir.DataType, tmp_path: Path) -> None:
    bits, group_size, zero_point, has_offsets, form = FORMATS[name]
    weight = Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, F16)
    model = product(weight, dtype)
    lowering = MatMulNBitsPass()
    assert lowering(model).modified
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    has_rest = any(node.op_type == "ReduceSum" for node in model.graph)
    found_forms = [(node.attributes["bits"].value, node.attributes["block_size"].value, has_rest) for node in nodes]
    assert found_forms == ([] if form is None else [form])
    told = "weight: dense" if form is None else f"weights of {bits} bits in" if form[2] else None
    assert [note[: len(told or "")] for note in lowering.notes] == ([] if told is None else [told])
    x = np.random.standard_normal((2, TOKENS, weight.width)).astype(dtype.numpy())
    found = run_onnxruntime(written(model, tmp_path), {"x": x})["y"]
    expected = x.astype(np.float64) @ dequantize(weight.rows, weight.form).astype(np.float64).T
    assert relative_l2(found, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding(name: str, dtype: ir.DataType, tmp_path: Path) -> None:
    bits, group_size, zero_point, has_offsets, form = FORMATS[name]
    weight = Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, F16)
    model = embedding(weight, dtype)
    FuseGatherPass()(model)
    MatMulNBitsPass()(model)
    assert any(node.op_type == "GatherBlockQuantized" for node in model.graph) == (form is not None)
    ids = np.random.randint(0, ROWS, (2, TOKENS))
    found = run_onnxruntime(written(model, tmp_path), {"ids": ids})["y"]
    assert relative_l2(found, dequantize(weight.rows, weight.form).astype(np.float64)[ids]) <= BOUNDS[dtype]


def test_a_weight_takes_half_a_byte_and_its_scales() -> None:
    weight = Weight(GroupedQuantFormat(2, 128, 1), False, F16)
    model = product(weight, F16)
    MatMulNBitsPass()(model)
    bits = 8 * sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    assert bits == (4 + 16 / 128) * ROWS * WIDTH
