"""The ops that join a product with its neighbours, and those on rows of activations, against float64."""

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


def test_weights_that_are_no_constants() -> None:
    """They may change from run to run, and are checked in each."""
    rng = np.random.default_rng(4)
    form = GroupedQuantFormat(4, 32, 8)
    inputs: dict[str, np.ndarray | None] = {"x": rng.normal(size=(3, 64)).astype(np.float32), "n": None, "r": None}
    names = ("codes", "scales", "offsets")
    first = inputs | dict(zip(names, parts(random_rows(rng, (20, 64), form)), strict=True))
    session = load("FusedGroupedQuantMatMul", first, [], vars(form))
    for rows, width in ((20, 64), (33, 64), (8, 96)):
        weight = random_rows(rng, (rows, width), form)
        x = rng.normal(size=(3, width)).astype(np.float32)
        (y,) = session.run(None, {"x": x, **dict(zip(names, parts(weight), strict=True))})
        close(y, x.astype(np.float64) @ dequantize(weight, form).T.astype(np.float64))


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


WIDTHS = pytest.mark.parametrize("width", [1, 31, 32, 100, 3072])
SHAPES = pytest.mark.parametrize("shape", [(2, 5), (1, 300), (3, 0), (0, 4), (2, 3, 4)])


def vectors(rng: np.random.Generator, shape: tuple[int, ...], width: int, is_shared: bool) -> np.ndarray:
    batch = 1 if is_shared else shape[0]
    return rng.normal(size=(batch, *[1] * (len(shape) - 1), width)).astype(np.float32)


def layer_norm(x: np.ndarray, epsilon: float) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)


@WIDTHS
@SHAPES
@pytest.mark.parametrize("is_shared", [False, True])
def test_adaptive_layer_norm(is_shared: bool, shape: tuple[int, ...], width: int, instruction_set: str) -> None:
    rng = np.random.default_rng(width)
    x = rng.normal(3, 2, size=(*shape, width)).astype(np.float32)
    scale, shift = (vectors(rng, shape, width, is_shared) for _ in range(2))
    wide = [a.astype(np.float64) for a in (x, scale, shift)]
    for threads in (1, 2):
        inputs = {"x": x, "scale": scale, "shift": shift}
        (y,) = run("AdaptiveLayerNorm", inputs, attributes={"epsilon": EPSILON}, threads=threads)
        close(y, layer_norm(wide[0], EPSILON) * (1 + wide[1]) + wide[2])


def test_a_layer_norm_far_from_zero(instruction_set: str) -> None:
    """The mean is as exact as the numbers are: what is left is the rounding of float32 at 1000."""
    rng = np.random.default_rng(0)
    x = rng.normal(1000, 0.5, size=(1, 8, 4096)).astype(np.float32)
    zeros = np.zeros((1, 1, 4096), np.float32)
    (y,) = run("AdaptiveLayerNorm", {"x": x, "scale": zeros, "shift": zeros}, attributes={"epsilon": 1e-6})
    close(y, layer_norm(x.astype(np.float64), 1e-6), 1e-5)


@WIDTHS
@SHAPES
@pytest.mark.parametrize("is_shared", [False, True])
def test_gated_add(is_shared: bool, shape: tuple[int, ...], width: int, instruction_set: str) -> None:
    rng = np.random.default_rng(width)
    x, z = (rng.normal(3, 2, size=(*shape, width)).astype(np.float32) for _ in range(2))
    gate = vectors(rng, shape, width, is_shared)
    (y,) = run("GatedAdd", {"x": x, "gate": gate, "z": z})
    np.testing.assert_array_equal(y, x + gate * z)


@WIDTHS
@SHAPES
@pytest.mark.parametrize("prefix", [None, 0, 7])
def test_swiglu(prefix: int | None, shape: tuple[int, ...], width: int, instruction_set: str) -> None:
    rng = np.random.default_rng(width)
    rows = rng.normal(0, 4, size=(*shape, 2 * width + 11)).astype(np.float32)
    before = None if prefix is None else rng.normal(size=(*shape, prefix)).astype(np.float32)
    sizes = {"width": width, "gate_offset": width + 8, "up_offset": 3}
    gate, up = (rows[..., sizes[n] : sizes[n] + width].astype(np.float64) for n in ("gate_offset", "up_offset"))
    (y,) = run("SwiGLU", {"rows": rows, "before": before}, attributes=sizes)
    if before is not None:
        np.testing.assert_array_equal(y[..., : prefix or 0], before)
    close(y[..., prefix or 0 :], silu(gate) * up)


@pytest.mark.parametrize("size", [1, 64, 80, 128])
@pytest.mark.parametrize("tokens", [(5,), (0,), (3, 40), (2, 0, 1)])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_head_rms_norm(batch: int, tokens: tuple[int, ...], size: int, instruction_set: str) -> None:
    rng = np.random.default_rng(size)
    heads, offset = 6, 9
    inputs: dict[str, np.ndarray | None] = {}
    expected = []
    for i, count in enumerate(tokens):
        x = rng.normal(0, 2, size=(batch, count, heads * size + offset + i)).astype(np.float32)
        weight = rng.normal(size=size).astype(np.float32)
        inputs |= {f"rows{i}": x, f"weight{i}": weight}
        part = x[..., offset : offset + heads * size].astype(np.float64).reshape(batch, count, heads, size)
        expected.append(rms_norm(part, weight.astype(np.float64), EPSILON))
    sizes = {"heads": heads, "head_size": size, "offset": offset, "epsilon": EPSILON}
    for threads in (1, 2):
        (y,) = run("HeadRMSNorm", inputs, attributes=sizes, threads=threads)
        close(y, np.concatenate(expected, axis=1))


ROW_OPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AdaptiveLayerNorm": ({"x": (1, 6, 40), "scale": (1, 1, 40), "shift": (1, 1, 40)}, {"epsilon": 1e-6}),
    "GatedAdd": ({"x": (1, 6, 40), "gate": (1, 1, 40), "z": (1, 6, 40)}, {}),
    "SwiGLU": ({"rows": (1, 6, 40), "before": (1, 6, 3)}, {"width": 20, "gate_offset": 0, "up_offset": 20}),
    "HeadRMSNorm": ({"rows": (1, 6, 40), "weight": (20,)}, {"heads": 2, "head_size": 20}),
}


@pytest.mark.parametrize("op_type", ROW_OPS)
def test_what_is_not_finite_stays_in_its_row_of_activations(op_type: str, instruction_set: str) -> None:
    rng = np.random.default_rng(1)
    shapes, attributes = ROW_OPS[op_type]
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    first = next(iter(inputs.values()))
    first[0, 1, 3], first[0, 4, 39], first[0, 2, 0] = np.nan, np.nan, np.inf
    (y,) = run(op_type, dict(inputs), attributes=attributes)
    finite = np.isfinite(y).reshape(6, -1).all(axis=1)
    assert finite.tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("op_type", "changes", "attributes", "message"),
    [
        ("AdaptiveLayerNorm", {"scale": (1, 2, 40)}, {}, r"scale has shape \[1, 2, 40\], expected \[1, 1, 40\]"),
        ("AdaptiveLayerNorm", {"shift": (40,)}, {}, r"shift has shape \[40\]"),
        ("AdaptiveLayerNorm", {"x": ()}, {}, "x is a scalar, expected rows"),
        ("GatedAdd", {"gate": (2, 1, 40)}, {}, r"gate has shape \[2, 1, 40\]"),
        ("GatedAdd", {"z": (1, 1, 40)}, {}, r"z has shape \[1, 1, 40\], expected that of x, \[1, 6, 40\]"),
        ("SwiGLU", {}, {"up_offset": 21}, r"rows \[1, 6, 40\] end before 20 numbers from 21 on"),
        ("SwiGLU", {"before": (1, 5, 3)}, {}, r"before has shape \[1, 5, 3\], expected \[1, 6, 3\]"),
        ("SwiGLU", {}, {"gate_offset": -1}, "gate_offset -1 and up_offset 20 are not a part of a row"),
        ("HeadRMSNorm", {}, {"offset": 1}, r"rows \[1, 6, 40\] end before 2 heads of 20 from 1 on"),
        ("HeadRMSNorm", {"weight": (40,)}, {}, r"weight has shape \[40\], expected \[20\]"),
        ("HeadRMSNorm", {"rows": (6, 40)}, {}, r"rows have shape \[6, 40\], expected \[batch, tokens, width\]"),
        ("HeadRMSNorm", {"more": (1, 2, 40)}, {}, "there are 3 inputs, expected pairs"),
    ],
)
def test_what_does_not_fit_rows_is_named(
    op_type: str, changes: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    shapes, stated = ROW_OPS[op_type]
    inputs = {name: np.zeros(shape, np.float32) for name, shape in (shapes | changes).items()}
    with pytest.raises(Exception, match=f"{op_type}: .*{message}"):
        run(op_type, dict(inputs), attributes=stated | attributes)
