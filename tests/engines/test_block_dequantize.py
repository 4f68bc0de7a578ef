"""``BlockDequantizePass``: packed weights as blocks of INT4 and INT8, with the numbers of the format's definition.

Bounds, relative L2 against the definition in float64: 1e-6 in float32; 1e-3 in float16 and 8e-3 in bfloat16, whose
weights are rounded, and whose activations are not where they are widened for onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from packed_weights import BF16, F16, F32, ROWS, WIDTH, Weight, embedding, new_graph, product, relative_l2, written
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import build_for_gpu

from intaglio.engines.lowering.block_dequantize import BlockDequantizePass
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, dequantize

BOUNDS = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}
TOKENS = 5
# bits, group size, zero point, offsets; the dtype of a value and what comes of it in float16.
FORMATS = {
    "ternary": (2, 128, 1, False, "INT4"),
    "ternary in groups of 256": (2, 256, 1, False, "INT4"),
    "ternary in groups of 32": (2, 32, 1, False, "INT4"),
    "ternary rows": (2, WIDTH, 1, False, "INT4"),
    "2 bits, affine": (2, 64, 0, True, "INT4 + rest"),
    "Q4_0": (4, 32, 8, False, "INT4"),
    "Q4_1": (4, 32, 0, True, "INT4 + rest"),
    "MLX in groups of 64": (4, 64, 0, True, "INT4 + rest"),
    "K-quants": (4, 16, 0, True, "INT4 + rest"),
    "off the middle": (4, 64, 3, False, "INT4 + rest"),
    "int8 rows": (8, WIDTH, 128, False, "INT8"),
    "Q8_0": (8, 32, 128, False, "INT8"),
    "8 bits, affine": (8, 64, 0, True, "INT8 + rest"),
    "8 bits off the middle": (8, 64, 7, False, "INT8 + rest"),
    "groups of 12": (4, 12, 8, False, "dense"),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product(name: str, dtype: ir.DataType, tmp_path: Path) -> None:
    bits, group_size, zero_point, has_offsets, form = FORMATS[name]
    weight = Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, F16)
    model = product(weight, dtype)
    lowering = BlockDequantizePass()
    assert lowering(model).modified
    assert not model.functions
    found_form = sorted({value.dtype.name for value in model.graph.initializers.values() if value.dtype.bitwidth < 16})
    assert found_form == [] if form == "dense" else found_form == [form.removesuffix(" + rest")]
    assert any(node.op_type == "ReduceSum" for node in model.graph) == form.endswith("rest")
    told = {"dense": "weight: dense", "rest": f"weights of {bits} bits in"}.get(form.rpartition(" ")[2])
    assert [note[: len(told or "")] for note in lowering.notes] == ([] if told is None else [told])
    x = np.random.standard_normal((2, TOKENS, weight.width)).astype(np.float16).astype(np.float32)
    x = x.astype(dtype.numpy() if dtype != BF16 else np.float32)
    found = run_onnxruntime(written(model, tmp_path), {"x": x})["y"]
    expected = x.astype(np.float64) @ dequantize(weight.rows, weight.form).astype(np.float64).T
    assert relative_l2(found, expected) <= BOUNDS[dtype]
    assert not BlockDequantizePass()(model).modified


@pytest.mark.parametrize(("bits", "zero_point"), [(8, 16), (4, 4)])
def test_narrow_codes_in_wider_ones_need_no_rest(bits: int, zero_point: int, tmp_path: Path) -> None:
    """Such as Q5_0, whose 32 codes are held in 8 bits."""
    weight = Weight(GroupedQuantFormat(bits, 32, zero_point), False, F32, narrow=True)
    model = product(weight, F32)
    BlockDequantizePass()(model)
    assert not any(node.op_type == "ReduceSum" for node in model.graph)
    x = np.random.standard_normal((1, TOKENS, weight.width)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantize(weight.rows, weight.form).astype(np.float64).T
    assert relative_l2(run_onnxruntime(written(model, tmp_path), {"x": x})["y"], expected) <= 1e-6


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding(name: str, dtype: ir.DataType, tmp_path: Path) -> None:
    bits, group_size, zero_point, has_offsets, _ = FORMATS[name]
    weight = Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, F16)
    model = embedding(weight, dtype)
    FuseGatherPass()(model)
    BlockDequantizePass()(model)
    assert {node.domain for node in model.graph} == {""}
    tables = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert all(node.outputs[0].dtype == dtype for node in tables)
    ids = np.random.randint(0, ROWS, (2, TOKENS))
    found = run_onnxruntime(written(model, tmp_path), {"ids": ids})["y"]
    assert relative_l2(found, dequantize(weight.rows, weight.form).astype(np.float64)[ids]) <= BOUNDS[dtype]


def test_a_tied_table_is_held_once() -> None:
    model = embedding(Weight(GroupedQuantFormat(2, 128, 1), False, F16), F16, is_tied=True)
    FuseGatherPass()(model)
    BlockDequantizePass()(model)
    (values,) = (value for value in model.graph.initializers.values() if value.dtype == ir.DataType.INT4)
    assert len(values.uses()) == 2


def test_weights_are_read_when_the_graph_is_written(tmp_path: Path) -> None:
    weight = Weight(GroupedQuantFormat(2, 128, 1), False, F16)
    model = product(weight, F16)
    (tmp_path / "codes").write_bytes(bytes(32) + weight.rows.codes.tobytes())
    codes = model.graph.initializers["weight.codes"]
    codes.const_value = ir.ExternalTensor(
        "codes", 32, weight.rows.codes.nbytes, ir.DataType.UINT8, shape=codes.shape, name=codes.name, base_dir=tmp_path
    )
    BlockDequantizePass()(model)
    stored = weight.rows.codes.copy()
    stored[:] = 0b01010110
    (tmp_path / "codes").write_bytes(bytes(32) + stored.tobytes())
    advanced: list[tuple[int, int]] = []
    write_graph(model, tmp_path / "lowered.onnx", lambda done, total: advanced.append((done, total)))
    lowered = ir.load(tmp_path / "lowered.onnx")
    values = lowered.graph.initializers["weight.values"].const_value
    assert isinstance(values, ir.ExternalTensor)
    np.testing.assert_array_equal(values.numpy().astype(int), np.tile([1, 0, 0, 0], (ROWS, WIDTH // 4)))
    assert [total for _, total in advanced] == [advanced[-1][0]] * len(advanced)
    assert ROWS * WIDTH // 2 < advanced[-1][0] < ROWS * WIDTH


def test_scales_that_a_dtype_does_not_hold_are_noted() -> None:
    weight = Weight(GroupedQuantFormat(2, 128, 1), False, F32)
    weight.rows.scales[3, 1] = 1e-6
    for dtype, count in ((F16, 1), (BF16, 0), (F32, 0)):
        lowering = BlockDequantizePass()
        lowering(product(weight, dtype))
        assert len(lowering.notes) == count


def test_a_weight_that_is_computed_is_refused() -> None:
    weight = Weight(GroupedQuantFormat(2, 128, 1), False, F32)
    model = product(weight, F32)
    scales = model.graph.initializers["weight.scales"]
    scales.const_value = None
    with pytest.raises(CompileError, match="computed"):
        BlockDequantizePass()(model)


@pytest.mark.parametrize("name", ["ternary", "MLX in groups of 64", "int8 rows", "8 bits, affine"])
def test_tensorrt_builds_products_and_look_ups(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    bits, group_size, zero_point, has_offsets, _ = FORMATS[name]
    weight = Weight(GroupedQuantFormat(bits, group_size, zero_point), has_offsets, F16)
    model = embedding(weight, F16, is_tied=True)
    FuseGatherPass()(model)
    BlockDequantizePass()(model)
    built = build_for_gpu(written(model, tmp_path), {"batch": (1, 1, 2), "tokens": (1, 16, 64)})
    assert not built.failure, built
    assert built.layers["DEQUANTIZE"] == 2
    assert built.engine_bytes


def test_ternary_weights_take_little_of_an_engine(tmp_path: Path) -> None:
    """At most 4.3 bits a weight, in the difference of two engines that differ in rows."""
    pytest.importorskip("tensorrt_rtx_bindings")
    sizes = []
    for rows in (1024, 3072):
        graph = new_graph("x", F16, ["tokens", 1024])
        codes = np.random.randint(0, 256, (rows, 256)).astype(np.uint8)
        codes[codes & codes >> 1 & 0x55 > 0] = 0x55  # a code of 3 is not ternary
        scales = np.random.uniform(0.01, 0.02, (rows, 8)).astype(ml_dtypes.bfloat16)
        parts = {"codes": codes, "scales": scales, "offsets": np.zeros((), ml_dtypes.bfloat16)}
        for name, array in parts.items():
            tensor = ir.tensor(array, name=f"weight.{name}")
            graph.register_initializer(
                ir.Value(
                    name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
                )
            )
        values = [graph.initializers[f"weight.{name}"] for name in parts]
        node = ir.node("GroupedQuantMatMul", [graph.inputs[0], *values],
                       {"bits": 2, "group_size": 128, "zero_point": 1}, domain=DOMAIN)  # fmt: skip
        graph.append(node)
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", F16, ir.Shape(["tokens", rows])
        graph.outputs.append(node.outputs[0])
        model = ir.Model(graph, ir_version=11)
        BlockDequantizePass()(model)
        folder = tmp_path / str(rows)
        folder.mkdir()
        built = build_for_gpu(written(model, folder), {"tokens": (1, 16, 64)}, (86, 89, 120))
        assert not built.failure, built
        sizes.append(built.engine_bytes)
    bits = 8 * (sizes[1] - sizes[0]) / (2048 * 1024)
    assert 4 <= bits <= 4.3
