"""Packed weights of every format and dtype of scales as both flavours of TensorRT are given them.

Bounds, relative L2 against the definition in float64: 1e-6 in float32; 1e-3 in float16 and 1.2e-2 in bfloat16, which
round weights, scales and the result.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from packed_weights import BF16, F16, F32, ROWS, Weight, embedding, product, relative_l2, written
from tensorrt_rtx_builds import parse_for_gpu, require_tensorrt_rtx

from intaglio.engines.lowering.round_values import RoundValuesPass
from intaglio.engines.nvidia.evaluation import open_lowered
from intaglio.engines.nvidia.lower import lower
from intaglio.engines.nvidia.plugin_bodies import add_plugin_bodies
from intaglio.engines.nvidia.stats import handed_over
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, dequantize

BOUNDS = {F32: 1e-6, F16: 1e-3, BF16: 1.2e-2}
DTYPES = (F32, F16, BF16)
TOKENS = 5
# bits, group size, zero point, offsets; bits a weight in float16, where each group of a row has a sum or none.
FORMATS = {
    "ternary in groups of 128": (2, 128, 1, False, 4 + 16 / 128),
    "ternary in groups of 256": (2, 256, 1, False, 4 + 16 / 128),
    "4 bits in groups of 32": (4, 32, 0, True, 4 + 16 / 32 + 32 / 32),
    "4 bits in groups of 64": (4, 64, 0, True, 4 + 16 / 64 + 32 / 64),
    "4 bits in groups of 128": (4, 128, 0, True, 4 + 16 / 128 + 32 / 128),
    "Q4_0": (4, 32, 8, False, 4 + 16 / 32),
    "Q4_1": (4, 32, 0, True, 4 + 16 / 32 + 32 / 32),
    "Q8_0": (8, 32, 128, False, 8 + 16 / 32),
    "int8 rows": (8, 512, 128, False, 8 + 16 / 512),
}


def weight_of(name: str, scales: ir.DataType) -> Weight:
    bits, group_size, zero_point, has_offsets, _ = FORMATS[name]
    return Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, scales)


def run(model: ir.Model, folder: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    add_plugin_bodies(model)
    RoundValuesPass(BF16, frozenset({DOMAIN}))(model)
    (y,) = open_lowered(written(model, folder), "a product").run(["y"], feeds)
    return np.asarray(y)


@pytest.mark.parametrize("flavour", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, flavour: str, tmp_path: Path) -> None:
    """Of activations of each dtype, with scales of each."""
    for scales in DTYPES:
        for dtype in DTYPES:
            weight = weight_of(name, scales)
            model = product(weight, dtype)
            lower(model, flavour)
            plugged = [node for node in model.graph if node.domain == DOMAIN]
            assert bool(plugged) == (flavour == "tensorrt" and name.startswith("ternary") and dtype != F32)
            # Some columns far from zero: what is added to a group counts.
            x = np.random.standard_normal((2, TOKENS, weight.width)) + np.random.standard_normal(weight.width)
            x = x.astype(dtype.numpy()).astype(np.float16 if dtype == F16 else np.float32)
            found = run(model, tmp_path, {"x": x})
            expected = x.astype(np.float64) @ dequantize(weight.rows, weight.form).astype(np.float64).T
            assert relative_l2(found, expected) <= BOUNDS[dtype], (scales, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_tables(name: str, tmp_path: Path) -> None:
    for scales in DTYPES:
        for dtype in DTYPES:
            weight = weight_of(name, scales)
            model = embedding(weight, dtype)
            lower(model)
            ids = np.random.randint(0, ROWS, (2, TOKENS))
            found = run(model, tmp_path, {"ids": ids})
            expected = dequantize(weight.rows, weight.form).astype(np.float64)[ids]
            assert relative_l2(found, expected) <= BOUNDS[dtype], (scales, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_weight_takes(name: str) -> None:
    """As the report has it, what groups have added among it, and as a note says where they have that."""
    *_, has_offsets, expected = FORMATS[name]
    model = product(weight_of(name, F16), F16)
    notes = lower(model)
    assert handed_over(model).for_report()["quantized_bits_per_weight"] == round(expected, 3)
    held = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value.size > 8)
    assert held * 8 == pytest.approx(expected * ROWS * 512)
    bits, group_size, *_ = FORMATS[name]
    said = f"weights of {bits} bits in groups of {group_size} as INT4 and a sum a group, {expected:g} bits each: 1"
    assert notes == ([said] if has_offsets else [])


def test_a_tied_table_counts_once() -> None:
    model = embedding(weight_of("Q8_0", F16), F16, is_tied=True)
    lower(model)
    assert sum(node.op_type == "DequantizeLinear" for node in model.graph) == 2
    assert handed_over(model).quantized_count == ROWS * 512
    assert handed_over(model).for_report()["quantized_bits_per_weight"] == 8.5


@pytest.mark.parametrize(("bits", "group_size", "expected"), [(4, 16, 7.0), (4, 8, 10.0), (8, 8, 14.0), (8, 4, 16.0)])
def test_the_form_that_takes_fewer_bits_is_chosen(bits: int, group_size: int, expected: float) -> None:
    """A half takes 16: blocks with a sum a group take fewer down to groups of 8."""
    model = product(Weight(GroupedQuantFormat(bits, group_size, 0), True, F16), F16)
    (note,) = lower(model)
    held = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value.size > 8)
    assert held * 8 == expected * ROWS * 512
    assert ("dense" in note) == (expected == 16)
    assert f"{expected:g} bits each: 1" in note or "its groups of 4 fit no blocks" in note


def test_tensorrt_parses_them(tmp_path: Path) -> None:
    require_tensorrt_rtx()
    graphs = []
    for name in FORMATS:
        for dtype in DTYPES:
            for make in (product, embedding):
                model = make(weight_of(name, F16), dtype)
                lower(model)
                folder = tmp_path / f"{len(graphs)}"
                folder.mkdir()
                graphs.append(written(model, folder))
    assert parse_for_gpu(graphs) == {}
