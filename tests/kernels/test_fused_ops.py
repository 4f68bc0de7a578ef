"""The ops that join a product with its neighbours, and the look-up of packed rows, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, GroupedQuantRows, dequantize

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
ROWS = (0, 1, 3, 9, 40)


def load(
    op_type: str,
    inputs: dict[str, np.ndarray | None],
    constants: Sequence[np.ndarray],
    attributes: dict[str, Any],
    outputs: int = 1,
    threads: int = 2,
) -> Any:
    """A session of one node whose first inputs are fed by name, None where one is left out."""
    values: list[ir.Value | None] = []
    for name, array in inputs.items():
        kind = None if array is None else ir.TensorType(ir.DataType.from_numpy(array.dtype))
        values.append(None if kind is None else ir.Value(name=name, type=kind))
    fed = [value for value in values if value is not None]
    stored = [
        ir.Value(name=f"constant_{i}", const_value=ir.tensor(array, name=f"constant_{i}"))
        for i, array in enumerate(constants)
    ]
    node = ir.node(op_type, [*values, *stored], attributes, domain=DOMAIN, num_outputs=outputs)
    for i, value in enumerate(node.outputs):
        value.name, value.type = f"y{i}", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        fed, node.outputs, nodes=[node], initializers=stored, opset_imports={"": 23, DOMAIN: 1}, name="fused"
    )
    data = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(
    op_type: str,
    inputs: dict[str, np.ndarray | None],
    constants: Sequence[np.ndarray] = (),
    attributes: dict[str, Any] | None = None,
    outputs: int = 1,
    threads: int = 2,
) -> list[np.ndarray]:
    session = load(op_type, inputs, constants, attributes or {}, outputs, threads)
    return session.run(None, {name: array for name, array in inputs.items() if array is not None})


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    rows = random_rows(np.random.default_rng(0), (1, 2), GroupedQuantFormat(8, 2, 0))
    try:
        load_product(rows, np.zeros((1, 2), np.float32))
    except Exception as error:
        if "this machine or this build lacks" in str(error):
            pytest.skip(f"{request.param} is not to be had here")
        raise
    return request.param


def load_product(rows: GroupedQuantRows, x: np.ndarray) -> Any:
    attributes = {"bits": 8, "group_size": 2, "zero_point": 0}
    return load("GroupedQuantMatMul", {"x": x}, parts(rows), attributes)


def random_rows(
    rng: np.random.Generator, shape: tuple[int, int], form: GroupedQuantFormat, dtype: Any = np.float16
) -> GroupedQuantRows:
    groups = form.groups_shape(shape)
    codes = rng.integers(0, 256, form.codes_shape(shape), dtype=np.uint8)
    scales, offsets = (rng.normal(size=groups).astype(dtype) for _ in range(2))
    return GroupedQuantRows(codes, scales, offsets)


def parts(rows: GroupedQuantRows) -> list[np.ndarray]:
    return [rows.codes, rows.scales, rows.offsets]


def close(found: np.ndarray, expected: np.ndarray, bound: float = 1e-6) -> None:
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


EPSILON = 0.3  # of a size that the statistics feel
FORMATS = pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (4, 32), (8, 20)])


@FORMATS
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("kind", ["projections", "gated", "residual"])
@pytest.mark.parametrize("is_normed", [False, True])
def test_joined_products(
    kind: str, is_normed: bool, count: int, bits: int, group_size: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(count + bits)
    form, width = GroupedQuantFormat(bits, group_size, 1), 640
    sizes = {"projections": (70, 9, 33), "gated": (77, 77), "residual": (130,)}[kind]
    weights = [random_rows(rng, (n, width), form) for n in sizes]
    x = rng.normal(size=(count, 1, width)).astype(np.float32)
    norm_weight = rng.normal(size=width).astype(np.float32) if is_normed else None
    residual = rng.normal(2, 9, size=(count, 1, sizes[0])).astype(np.float32) if kind == "residual" else None

    wide = x.astype(np.float64)
    if norm_weight is not None:
        wide = rms_norm(wide, norm_weight.astype(np.float64), EPSILON)
    expected = [wide @ dequantize(rows, form).T.astype(np.float64) for rows in weights]
    attributes: dict[str, Any] = {**vars(form), "epsilon": EPSILON}
    if kind == "gated":
        expected, attributes["gated"] = [silu(expected[0]) * expected[1]], 1
    if residual is not None:
        expected = [expected[0] + residual]
    inputs = {"x": x, "norm_weight": norm_weight, "residual": residual}
    constants = [array for rows in weights for array in parts(rows)]
    for threads in (1, 2):
        found = run("FusedGroupedQuantMatMul", inputs, constants, attributes, len(expected), threads)
        for y, reference in zip(found, expected, strict=True):
            close(y, reference, 2e-6 if kind == "gated" else 1e-6)


def test_what_is_not_finite_stays_in_its_row(instruction_set: str) -> None:
    rng = np.random.default_rng(1)
    form = GroupedQuantFormat(4, 32, 8)
    weights = [random_rows(rng, (40, 64), form) for _ in range(2)]
    x = rng.normal(size=(5, 64)).astype(np.float32)
    x[1, 3], x[3, 60] = np.nan, np.inf
    inputs = {"x": x, "norm_weight": np.ones(64, np.float32), "residual": None}
    constants = [array for rows in weights for array in parts(rows)]
    (y,) = run("FusedGroupedQuantMatMul", inputs, constants, {**vars(form), "epsilon": 1e-6, "gated": 1})
    assert np.isnan(y[[1, 3]]).all()
    assert np.isfinite(y[[0, 2, 4]]).all()


def test_gates_over_the_whole_range(instruction_set: str) -> None:
    """With weights that copy x, silu meets what it is fed with."""
    form, width = GroupedQuantFormat(8, 64, 0), 64
    one = GroupedQuantRows(np.eye(width, dtype=np.uint8), np.ones((width, 1), np.float32), np.zeros((), np.float32))
    values = np.concatenate([np.linspace(-110, 110, 36 * width - 8), [0, -0.0, 1e-30, -1e-30, 1e18, -1e18, 88, -88]])
    x = values.astype(np.float32).reshape(-1, width)
    constants = [np.asarray(a) for a in (*parts(one), *parts(one))]
    (y,) = run("FusedGroupedQuantMatMul", {"x": x, "n": None, "r": None}, constants, {**vars(form), "gated": 1})
    expected = silu(x.astype(np.float64)) * x
    np.testing.assert_allclose(y, expected, rtol=6e-7, atol=1e-33)


@pytest.mark.parametrize(
    ("changes", "outputs", "message"),
    [
        ({"norm_weight": np.ones(63, np.float32)}, 1, r"norm_weight has shape \[63\], expected \[64\]"),
        ({"residual": np.ones((1, 8), np.float32)}, 1, r"residual has shape \[1, 8\], expected \[2, 8\]"),
        ({}, 2, "1 weights have 2 outputs"),
        ({"x": np.ones((2, 96), np.float32)}, 1, r"codes have shape \[8, 32\], expected \[out, 48\]"),
    ],
)
def test_mismatched_inputs_are_named(changes: dict[str, Any], outputs: int, message: str) -> None:
    form = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(np.random.default_rng(0), (8, 64), form)
    inputs = {"x": np.ones((2, 64), np.float32), "norm_weight": None, "residual": None} | changes
    with pytest.raises(Exception, match="FusedGroupedQuantMatMul: " + message):
        run("FusedGroupedQuantMatMul", inputs, parts(rows), vars(form), outputs)


@FORMATS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (700,)])
def test_gathered_rows_are_bit_equal(shape: tuple[int, ...], dtype: Any, bits: int, group_size: int) -> None:
    rng = np.random.default_rng(3)
    form = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (50, 640), form, dtype)
    indices = rng.integers(-50, 50, shape)
    for offsets in (rows.offsets, np.zeros((), dtype)):
        table = GroupedQuantRows(rows.codes, rows.scales, offsets)
        (y,) = run("GroupedQuantGather", {"indices": np.asarray(indices)}, parts(table), vars(form))
        np.testing.assert_array_equal(y, dequantize(table, form)[indices])


@pytest.mark.parametrize("index", [50, -51])
def test_an_index_beyond_the_table_is_named(index: int) -> None:
    form = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(np.random.default_rng(0), (50, 64), form)
    with pytest.raises(Exception, match=f"GroupedQuantGather: index {index} is not a row of a table of 50 rows"):
        run("GroupedQuantGather", {"indices": np.array([0, index])}, parts(rows), vars(form))
