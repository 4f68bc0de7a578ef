"""``SymmetricDequantizePass`` and ``FloatIntegersPass``: quantized tensors of others with the numbers they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnxscript import GraphBuilder
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import build_for_gpu, require_tensorrt_rtx

from intaglio.engines.lowering.float_integers import FloatIntegersPass
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.engines.lowering.symmetric_dequantize import SymmetricDequantizePass
from intaglio.engines.nvidia.lower import lower

ROWS, WIDTH = 16, 64
U4, I4 = ml_dtypes.uint4, ml_dtypes.int4


def graph_of(inputs: dict[str, list[Any]], dtype: ir.DataType = ir.DataType.FLOAT) -> tuple[ir.Graph, Any]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="quantized")
    for name, shape in inputs.items():
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
    return graph, GraphBuilder(graph).op


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def model_of(graph: ir.Graph, y: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    y.name, y.dtype = "y", dtype
    y.shape = y.shape or ir.Shape(["rows", ROWS])
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def saved(model: ir.Model, folder: Path) -> Path:
    ir.save(model, folder / "quantized.onnx")
    return folder / "quantized.onnx"


def check(
    model: ir.Model, feeds: dict[str, np.ndarray], expected: np.ndarray, folder: Path, *, builds: bool = True
) -> None:
    """The numbers in onnxruntime to 1e-6 and, where that is asked for, that TensorRT builds it."""
    onnx.checker.check_model(onnx.load(saved(model, folder)), full_check=True)
    found = run_onnxruntime(saved(model, folder), feeds)["y"]
    assert np.linalg.norm(found - expected.astype(np.float64)) <= 1e-6 * np.linalg.norm(expected)
    if not builds:
        return
    require_tensorrt_rtx()
    built = build_for_gpu(saved(model, folder), {"rows": (1, 4, 16)})
    assert not built.failure, built


# The dtype, the range of codes and of zero points, how these lie, and the dtype that comes of it.
CASES = {
    "uint8 about 128": (np.uint8, (0, 256), (128, 129), "tensor", "INT8"),
    "uint8 a row": (np.uint8, (20, 100), (10, 60), "row", "INT8"),
    "uint8 far off the middle": (np.uint8, (0, 256), (3, 4), "tensor", "dense"),
    "int8 off the middle": (np.int8, (-20, 60), (5, 9), "row", "INT8"),
    "uint4 about 8": (U4, (0, 16), (8, 9), "block", "INT4"),
    "uint4 a block": (U4, (0, 16), (3, 12), "block", "INT8"),
    "uint4 without zero points": (U4, (0, 8), None, "block", "INT4"),
    "int4 with zeros": (I4, (-8, 8), (0, 1), "block", "INT4"),
}


@pytest.mark.parametrize("name", CASES)
def test_constants(name: str, tmp_path: Path) -> None:
    dtype, codes, zeros, kind, expected_form = CASES[name]
    rng = np.random.default_rng()
    graph, op = graph_of({"x": ["rows", WIDTH]})
    shape, attributes = {
        "tensor": ((), {}),
        "row": ((ROWS,), {"axis": 0}),
        "block": ((ROWS, WIDTH // 16), {"axis": 1, "block_size": 16}),
    }[kind]
    weight = constant(graph, "w", rng.integers(*codes, (ROWS, WIDTH)).astype(dtype))
    inputs = [weight, constant(graph, "s", rng.uniform(0.01, 0.02, shape).astype(np.float32))]
    if zeros is not None:
        inputs.append(constant(graph, "z", rng.integers(*zeros, shape).astype(dtype)))
    dense = op.DequantizeLinear(*inputs, **attributes)
    dense.dtype, dense.shape = ir.DataType.FLOAT, ir.Shape([ROWS, WIDTH])
    model = model_of(graph, op.MatMul(graph.inputs[0], op.Transpose(dense, perm=[1, 0])))
    feeds = {"x": rng.standard_normal((5, WIDTH)).astype(np.float32)}
    (expected,) = ReferenceEvaluator(ir.serde.serialize_model(model)).run(None, feeds)
    lowering = SymmetricDequantizePass()
    assert lowering(model).modified
    nodes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert [node.inputs[0].dtype.name for node in nodes] == ([] if expected_form == "dense" else [expected_form])
    assert all(len(node.inputs) == 2 for node in nodes)
    assert bool(lowering.notes) == (name in ("uint8 far off the middle", "uint4 a block"))
    assert not SymmetricDequantizePass()(model).modified
    check(model, feeds, expected, tmp_path, builds=name in ("uint8 a row", "uint4 a block"))


@pytest.mark.parametrize(("dtype", "zero"), [(np.uint8, 7), (np.int8, -5), (np.uint16, 100)])
def test_activations_become_floats(dtype: Any, zero: int, tmp_path: Path) -> None:
    graph, op = graph_of({"x": ["rows", ROWS]})
    parts = [constant(graph, "s", np.float32(0.013)), constant(graph, "z", np.array(zero, dtype))]
    y = op.DequantizeLinear(op.QuantizeLinear(graph.inputs[0], *parts), *parts)
    next(node for node in graph).outputs[0].dtype = ir.DataType.from_numpy(np.dtype(dtype))
    model = model_of(graph, y)
    feeds = {"x": np.random.standard_normal((9, ROWS)).astype(np.float32) * 2}
    (expected,) = ReferenceEvaluator(ir.serde.serialize_model(model)).run(None, feeds)
    assert SymmetricDequantizePass()(model).modified
    assert {node.op_type for node in model.graph} == {"Div", "Round", "Clip", "Mul"}
    check(model, feeds, expected, tmp_path, builds=dtype == np.uint8)


@pytest.mark.parametrize("narrow", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_activations_of_a_narrowed_graph_become_floats(narrow: ir.DataType) -> None:
    """Of a pair only the second scale is narrowed, and a pair they stay."""
    graph, op = graph_of({"x": ["rows", ROWS]})
    parts = [constant(graph, "s", np.float32(0.013)), constant(graph, "z", np.array(7, np.uint8))]
    y = op.Relu(op.DequantizeLinear(op.QuantizeLinear(graph.inputs[0], *parts), *parts))
    next(node for node in graph).outputs[0].dtype = ir.DataType.UINT8
    model = model_of(graph, y)
    NarrowDtypePass(narrow)(model)
    assert {value.dtype for node in model.graph for value in node.outputs} >= {narrow}
    assert SymmetricDequantizePass()(model).modified
    assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in model.graph}


def test_pairs_of_two_scales_stay() -> None:
    graph, op = graph_of({"x": ["rows", ROWS]})
    scales = [constant(graph, f"s{i}", np.float32(0.013 + i)) for i in range(2)]
    zero = constant(graph, "z", np.array(7, np.uint8))
    y = op.DequantizeLinear(op.QuantizeLinear(graph.inputs[0], scales[0], zero), scales[1], zero)
    next(node for node in graph).outputs[0].dtype = ir.DataType.UINT8
    assert not SymmetricDequantizePass()(model_of(graph, y)).modified


def test_activations_about_zero_stay() -> None:
    graph, op = graph_of({"x": ["rows", ROWS]})
    parts = [constant(graph, "s", np.float32(0.013)), constant(graph, "z", np.array(0, np.int8))]
    y = op.DequantizeLinear(op.QuantizeLinear(graph.inputs[0], *parts), *parts)
    next(node for node in graph).outputs[0].dtype = ir.DataType.INT8
    assert not SymmetricDequantizePass()(model_of(graph, y)).modified


@pytest.mark.parametrize("zeros", [None, "one", "a column"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("is_integer", [False, True])
def test_dynamically_quantized_products(zeros: str | None, dtype: Any, is_integer: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    graph, op = graph_of({"x": ["rows", WIDTH]})
    quantized, scale, zero = op.DynamicQuantizeLinear(graph.inputs[0], _outputs=3)
    quantized.shape, quantized.dtype = ir.Shape(["rows", WIDTH]), ir.DataType.UINT8
    scale.shape = zero.shape = ir.Shape([])
    scale.dtype, zero.dtype = ir.DataType.FLOAT, ir.DataType.UINT8
    weight = constant(graph, "w", rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (WIDTH, ROWS)).astype(dtype))
    inputs = [quantized, weight, zero]
    if zeros is not None:
        middle = rng.integers(100, 130, (ROWS,) if zeros == "a column" else ()) - (128 if dtype == np.int8 else 0)
        inputs.append(constant(graph, "z", np.asarray(middle).astype(dtype)))
    y = op.MatMulInteger(*inputs)
    y.dtype, y.shape = ir.DataType.INT32, ir.Shape(["rows", ROWS])
    if is_integer:
        model = model_of(graph, y, ir.DataType.INT32)
    else:
        wide = op.Cast(y, to=ir.DataType.FLOAT)
        wide.dtype = ir.DataType.FLOAT
        model = model_of(graph, op.Mul(wide, scale))
    feeds = {"x": rng.standard_normal((5, WIDTH)).astype(np.float32)}
    (expected,) = ReferenceEvaluator(ir.serde.serialize_model(model)).run(None, feeds)
    assert FloatIntegersPass()(model).modified
    assert not {node.op_type for node in model.graph} & {"DynamicQuantizeLinear", "MatMulInteger"}
    assert not FloatIntegersPass()(model).modified
    lower(model)
    check(model, feeds, expected, tmp_path, builds=zeros == "a column" and dtype == np.uint8 and not is_integer)


def test_convolutions_of_integers(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    graph, op = graph_of({"x": ["rows", 3, 8, 8]})
    quantized, _, zero = op.DynamicQuantizeLinear(graph.inputs[0], _outputs=3)
    quantized.shape, quantized.dtype = ir.Shape(["rows", 3, 8, 8]), ir.DataType.UINT8
    zero.shape, zero.dtype = ir.Shape([]), ir.DataType.UINT8
    weight = constant(graph, "w", rng.integers(60, 180, (ROWS, 3, 3, 3)).astype(np.uint8))
    y = op.ConvInteger(quantized, weight, zero, constant(graph, "z", np.array(120, np.uint8)), pads=[1, 1, 1, 1])
    y.dtype, y.shape = ir.DataType.INT32, ir.Shape(["rows", ROWS, 8, 8])
    model = model_of(graph, y, ir.DataType.INT32)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    (expected,) = ReferenceEvaluator(ir.serde.serialize_model(model)).run(None, feeds)
    lower(model)
    assert "Conv" in {node.op_type for node in model.graph}
    check(model, feeds, expected, tmp_path)


def test_bytes_that_others_read_stay() -> None:
    graph, op = graph_of({"x": ["rows", ROWS]})
    quantized, _, _ = op.DynamicQuantizeLinear(graph.inputs[0], _outputs=3)
    quantized.dtype = ir.DataType.UINT8
    assert not FloatIntegersPass()(model_of(graph, op.Relu(op.Cast(quantized, to=ir.DataType.FLOAT)))).modified
