"""The custom op through onnxruntime, compared with the reference and with itself."""

from __future__ import annotations

import ctypes
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from kernel_runner import (
    bits_of,
    build_model,
    has_chosen_instruction_set,
    load,
    random_rows,
    run,
    session_options,
)

import intaglio.kernels.cpu
from intaglio.errors import EngineError
from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import (
    SCALE_DTYPES,
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    matmul,
)

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
# The kernel has one regime for fewer rows than this and one for the rest.
MANY_ROWS = 8
ROWS = (0, 1, 2, 3, 5, MANY_ROWS - 1, MANY_ROWS, 17, 64)


def load_rows(rows: GroupedQuantRows, quantization: GroupedQuantFormat, threads: int = 2) -> Any:
    return load(build_model(rows, vars(quantization)), threads)


def run_in_slices(session: Any, x: np.ndarray, count: int) -> np.ndarray:
    """The rows of x, ``count`` at a time: below MANY_ROWS in the regime of few rows."""
    return np.concatenate([run(session, x[start : start + count]) for start in range(0, len(x), count)])


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    if not has_chosen_instruction_set():
        pytest.skip(f"{request.param} is not to be had here")
    return request.param


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [4, 12, 16, 32, 64, 128, 256, 768, 2304])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_every_format_matches_the_float64_product(
    bits: int, group_size: int, has_offsets: bool, instruction_set: str
) -> None:
    rng = np.random.default_rng(bits * group_size)
    quantization = GroupedQuantFormat(bits, group_size, (1 << bits) // 2)
    dtype = SCALE_DTYPES[group_size % len(SCALE_DTYPES)]
    # More inputs than the kernel takes at a time, and more rows of the weight than whole panels.
    rows = random_rows(rng, (13, 2304), quantization, dtype, has_offsets)
    session = load_rows(rows, quantization)
    weight = dequantize(rows, quantization).astype(np.float64)
    for count in ROWS:
        x = rng.normal(size=(count, 2304)).astype(np.float32)
        y = run(session, x)
        expected = x.astype(np.float64) @ weight.T
        assert y.shape == (count, 13)
        assert y.dtype == np.float32
        assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("bits", "group_size", "groups"), [(2, 128, 6), (2, 4, 150), (4, 6, 171), (4, 1024, 1), (8, 1, 515), (8, 24, 22)]
)
@pytest.mark.parametrize("outputs", [1, 31, 113])
def test_many_rows_match_the_float64_product_at_every_edge(
    bits: int, group_size: int, groups: int, outputs: int, instruction_set: str
) -> None:
    """Tails of rows, columns and inputs, beside whole tiles and panels, and groups across two panels."""
    rng = np.random.default_rng(outputs)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    dtype = SCALE_DTYPES[outputs % len(SCALE_DTYPES)]
    rows = random_rows(rng, (outputs, groups * group_size), quantization, dtype)
    session = load_rows(rows, quantization)
    weight = dequantize(rows, quantization).astype(np.float64)
    for count in (MANY_ROWS, 9, 13, 15, 29, 391):
        x = rng.normal(size=(count, groups * group_size)).astype(np.float32)
        expected = x.astype(np.float64) @ weight.T
        difference = np.abs(run(session, x) - expected)
        assert (difference <= 1e-6 * (np.abs(x) @ np.abs(weight).T)).all()


def test_many_rows_of_a_wide_weight_match_the_float64_product(instruction_set: str) -> None:
    """Parts as wide as they get, and a narrower last one."""
    rng = np.random.default_rng(10)
    quantization = GroupedQuantFormat(4, 86, 8)
    rows = random_rows(rng, (6200, 516), quantization)
    x = rng.normal(size=(MANY_ROWS, 516)).astype(np.float32)
    weight = dequantize(rows, quantization).astype(np.float64)
    difference = np.abs(run(load_rows(rows, quantization), x) - x.astype(np.float64) @ weight.T)
    assert (difference <= 1e-6 * (np.abs(x) @ np.abs(weight).T)).all()


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (2, 4), (4, 32), (4, 6), (8, 1), (8, 48)])
def test_the_weight_is_dequantized_bit_for_bit(
    bits: int, group_size: int, has_offsets: bool, dtype: np.dtype, instruction_set: str
) -> None:
    rng = np.random.default_rng(7)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    width = group_size * 3
    rows = random_rows(rng, (5, width), quantization, dtype, has_offsets)
    session = load_rows(rows, quantization)
    expected = dequantize(rows, quantization) + np.float32(0)  # a sum that starts at 0 has no -0
    # A unit vector picks one column of the weight: everything else adds an exact zero.
    unit = np.tile(np.eye(width, dtype=np.float32), (MANY_ROWS, 1))
    for count in (MANY_ROWS - 1, len(unit)):
        columns = run_in_slices(session, unit, count)[-width:].T
        np.testing.assert_array_equal(bits_of(np.ascontiguousarray(columns)), bits_of(expected))


def test_every_float16_scale_is_converted_exactly(instruction_set: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = halves[np.isfinite(halves)].reshape(-1, 64)
    rows = GroupedQuantRows(np.ones(scales.shape, np.uint8), scales, np.zeros((), np.float16))
    session = load_rows(rows, GroupedQuantFormat(8, 1, 0))
    for count in (MANY_ROWS - 1, 64):
        y = run_in_slices(session, np.eye(64, dtype=np.float32), count).T
        np.testing.assert_array_equal(y, scales.astype(np.float32))


def test_infinite_and_nan_scales_are_kept() -> None:
    for dtype in SCALE_DTYPES:
        scales = np.array([[np.inf], [-np.inf], [np.nan]]).astype(dtype)
        rows = GroupedQuantRows(np.ones((3, 1), np.uint8), scales, np.zeros((), dtype))
        for count in (1, MANY_ROWS):
            y = run(load_rows(rows, GroupedQuantFormat(8, 1, 0)), np.ones((count, 1), np.float32))
            np.testing.assert_array_equal(y, [[np.inf, -np.inf, np.nan]] * count)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)])
def test_leading_dims_of_x_are_kept(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (7, 64), quantization)
    x = rng.normal(size=shape).astype(np.float32)
    y = run(load_rows(rows, quantization), x)
    assert y.shape == (*shape[:-1], 7)
    np.testing.assert_allclose(y, matmul(x, rows, quantization), rtol=1e-5, atol=1e-5)


PRODUCTS = pytest.mark.parametrize(("bits", "group_size", "width"), [(4, 32, 1536), (2, 128, 1152), (8, 20, 2100)])


@PRODUCTS
@pytest.mark.parametrize("count", [MANY_ROWS - 1, 459])
def test_results_do_not_depend_on_threads(bits: int, group_size: int, width: int, count: int) -> None:
    rng = np.random.default_rng(3)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    # Columns enough for several parts, and, of the larger count, rows too.
    rows = random_rows(rng, (83, width), quantization)
    x = rng.normal(size=(count, width)).astype(np.float32)
    expected = bits_of(run(load_rows(rows, quantization, threads=1), x))
    for threads in (2, 3):
        np.testing.assert_array_equal(bits_of(run(load_rows(rows, quantization, threads), x)), expected)


@PRODUCTS
def test_few_rows_do_not_depend_on_their_number_or_the_instruction_set(
    bits: int, group_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (83, width), quantization)
    x = rng.normal(size=(20, width)).astype(np.float32)
    expected = bits_of(run_in_slices(load_rows(rows, quantization), x, 1))
    for name in INSTRUCTION_SETS:
        monkeypatch.setenv("INTAGLIO_CPU_ISA", name)
        if has_chosen_instruction_set():
            session = load_rows(rows, quantization)
            for count in range(1, MANY_ROWS):
                np.testing.assert_array_equal(bits_of(run_in_slices(session, x, count)), expected)


@PRODUCTS
def test_many_rows_do_not_depend_on_their_number_or_the_width_of_vectors(
    bits: int, group_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (83, width), quantization)
    x = rng.normal(size=(459, width)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantize(rows, quantization).T.astype(np.float64)
    fused = []
    for name in INSTRUCTION_SETS:
        monkeypatch.setenv("INTAGLIO_CPU_ISA", name)
        if not has_chosen_instruction_set():
            continue
        session = load_rows(rows, quantization)
        y = run(session, x)
        for count in (MANY_ROWS, 9, 14, 23):
            for start in (0, 100):
                alone = bits_of(run(session, x[start : start + count]))
                np.testing.assert_array_equal(alone, bits_of(y)[start : start + count])
        assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)
        if name != "portable":
            fused.append(bits_of(y))
    for y in fused[1:]:
        np.testing.assert_array_equal(y, fused[0])


@pytest.mark.parametrize("count", [6, 30])
def test_a_column_does_not_depend_on_its_neighbours(count: int) -> None:
    rng = np.random.default_rng(4)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (21, 96), quantization)
    x = rng.normal(size=(count, 96)).astype(np.float32)
    whole = run(load_rows(rows, quantization), x)
    for n in (0, 9, 20):
        one = GroupedQuantRows(rows.codes[n : n + 1], rows.scales[n : n + 1], rows.offsets[n : n + 1])
        np.testing.assert_array_equal(bits_of(run(load_rows(one, quantization), x)), bits_of(whole[:, n : n + 1]))


@pytest.mark.parametrize(("group_size", "width"), [(32, 96), (6, 42)])
@pytest.mark.parametrize("repeats", [1, 5])
def test_non_finite_activations_follow_ieee_arithmetic(
    group_size: int, width: int, repeats: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(5)
    quantization = GroupedQuantFormat(4, group_size, 8)
    rows = random_rows(rng, (9, width), quantization, has_offsets=False)
    x = rng.normal(size=(7, width)).astype(np.float32)
    # One row each, the first, the last and a middle input; the other rows must stay finite.
    x[1, 0], x[3, width - 1], x[4, 17] = np.inf, np.nan, -np.inf
    x[6, 2], x[6, 3] = np.inf, -np.inf
    x = np.tile(x, (repeats, 1))  # seven rows are few, 35 are many
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float64) @ dequantize(rows, quantization).T.astype(np.float64)
    y = run(load_rows(rows, quantization), x)
    special = ~np.isfinite(expected)
    assert special.any(axis=1).tolist() == [False, True, False, True, True, False, True] * repeats
    np.testing.assert_array_equal(y[special], expected[special])
    np.testing.assert_allclose(y[~special], expected[~special], rtol=1e-4, atol=1e-5)


def test_the_op_wins_over_the_function_body(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(6)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (6, 64), quantization)
    model = build_model(rows, vars(quantization), x_shape=["tokens", 64], with_function=True)
    data = ir.serde.serialize_model(model).SerializeToString()
    x = rng.normal(size=(3, 64)).astype(np.float32)
    ran = {}
    for name, options in (("op", session_options()), ("body", ort.SessionOptions())):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        y = run(ort.InferenceSession(data, options), x)
        np.testing.assert_allclose(y, matmul(x, rows, quantization), rtol=1e-5, atol=1e-5)
        ran[name] = [node.op_type for node in ir.load(tmp_path / f"{name}.onnx").graph]
    assert ran["op"] == ["GroupedQuantMatMul"]
    assert "GroupedQuantMatMul" not in ran["body"]
    assert "MatMul" in ran["body"]


@pytest.mark.parametrize("x_shape", [["batch", "tokens", 64], [2, "tokens", 64], ["batch", "width"], [64]])
def test_the_shape_of_y_is_inferred(x_shape: list[int | str], tmp_path: pathlib.Path) -> None:
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(np.random.default_rng(6), (6, 64), quantization)
    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = build_model(rows, vars(quantization), x_shape=x_shape)
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    assert session.get_outputs()[0].shape == [*x_shape[:-1], 6]


def test_weights_in_an_external_file(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(8)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (40, 256), quantization)
    model = build_model(rows, vars(quantization))
    ir.save(model, tmp_path / "model.onnx", external_data="weights.data", size_threshold_bytes=0)
    assert (tmp_path / "weights.data").stat().st_size >= rows.codes.nbytes
    x = rng.normal(size=(5, 256)).astype(np.float32)
    expected = run(load_rows(rows, quantization), x)
    session = ort.InferenceSession(tmp_path / "model.onnx", session_options())
    np.testing.assert_array_equal(bits_of(run(session, x)), bits_of(expected))


GOOD: dict[str, np.ndarray] = {
    "x": np.zeros((2, 64), np.float32),
    "codes": np.zeros((3, 32), np.uint8),
    "scales": np.zeros((3, 2), np.float16),
    "offsets": np.zeros((3, 2), np.float16),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((), np.float32)}, r"x is a scalar, expected \[\.\.\., in\]"),
        (
            {"x": np.zeros((2, 48), np.float32)},
            "x has width 48, which is not a multiple of the group size 32",
        ),
        (
            {"x": np.zeros((2, 96), np.float32)},
            r"codes have shape \[3, 32\], expected \[out, 48\] for x of width 96",
        ),
        (
            {"x": np.zeros((2, 0), np.float32)},
            r"x \[2, 0\] and codes \[3, 32\] make a weight of 3 x 0; both sizes",
        ),
        ({"codes": np.zeros((0, 32), np.uint8)}, r"x \[2, 64\] and codes \[0, 32\] make a weight of 0 x 64"),
        ({"codes": np.zeros((3, 2, 16), np.uint8)}, r"codes have shape \[3, 2, 16\], expected \[out, in"),
        ({"codes": np.zeros((3, 33), np.uint8)}, r"codes have shape \[3, 33\], expected \[out, 32\]"),
        ({"codes": np.zeros((4, 32), np.uint8)}, r"scales have shape \[3, 2\], expected \[4, 2\]"),
        ({"scales": np.zeros((3, 4), np.float16)}, r"scales have shape \[3, 4\], expected \[3, 2\]"),
        ({"scales": np.zeros(6, np.float16)}, r"scales have shape \[6\], expected \[3, 2\]"),
        ({"scales": np.zeros((), np.float16)}, r"scales have shape \[\], expected \[3, 2\]"),
        ({"offsets": np.zeros(1, np.float16)}, r"offsets have shape \[1\], expected \[3, 2\] or a scalar"),
        ({"offsets": np.zeros((3, 2), np.float32)}, "scales are float16 and offsets float32"),
        ({"offsets": np.zeros((), ml_dtypes.bfloat16)}, "scales are float16 and offsets bfloat16"),
        (
            {"scales": np.zeros((3, 2), np.float64), "offsets": np.zeros((), np.float64)},
            "scales are ONNX element type 11, expected float16, bfloat16 or float32",
        ),
    ],
)
def test_mismatched_inputs_are_named(changes: dict[str, np.ndarray], message: str) -> None:
    arrays = GOOD | changes
    rows = GroupedQuantRows(arrays["codes"], arrays["scales"], arrays["offsets"])
    session = load(build_model(rows, vars(GroupedQuantFormat(4, 32, 8))))
    with pytest.raises(Exception, match="GroupedQuantMatMul: " + message):
        run(session, arrays["x"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits is 3, expected 2, 4 or 8"),
        ({"bits": 0}, "bits is 0, expected 2, 4 or 8"),
        ({"group_size": 0}, "group_size 0 with 4 bits does not end on a byte"),
        ({"group_size": 33}, "positive multiple of 2"),
        ({"zero_point": 16}, "zero_point 16 is not a 4-bit code"),
        ({"zero_point": -1}, "zero_point -1 is not a 4-bit code"),
        ({"zero_point": None}, "the integer attribute zero_point is needed"),
    ],
)
def test_wrong_attributes_are_named(changes: dict[str, int | None], message: str) -> None:
    attributes = {"bits": 4, "group_size": 32, "zero_point": 8} | changes
    rows = GroupedQuantRows(GOOD["codes"], GOOD["scales"], GOOD["offsets"])
    model = build_model(rows, {name: value for name, value in attributes.items() if value is not None})
    with pytest.raises(Exception, match="GroupedQuantMatMul: .*" + message):
        load(model)


def test_other_dtypes_of_x_and_codes_are_refused() -> None:
    rows = GroupedQuantRows(GOOD["codes"], GOOD["scales"], GOOD["offsets"])
    attributes = vars(GroupedQuantFormat(4, 32, 8))
    with pytest.raises(Exception, match=r"tensor\(double\).*GroupedQuantMatMul"):
        load(build_model(rows, attributes, x_dtype=ir.DataType.DOUBLE))
    rows = GroupedQuantRows(GOOD["codes"].astype(np.int8), GOOD["scales"], GOOD["offsets"])
    with pytest.raises(Exception, match=r"tensor\(int8\).*GroupedQuantMatMul"):
        load(build_model(rows, attributes))


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", "mmx")
    rows = GroupedQuantRows(GOOD["codes"], GOOD["scales"], GOOD["offsets"])
    with pytest.raises(Exception, match=r"INTAGLIO_CPU_ISA is 'mmx', expected one of portable, .*, amx"):
        load(build_model(rows, vars(GroupedQuantFormat(4, 32, 8))))


def register_with_old_runtime(has_first_version: bool) -> tuple[int | None, list[tuple[int, str]]]:
    """Registers with a runtime that has API version 1 at most: the status, and the statuses made."""
    made: list[tuple[int, str]] = []
    create_status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version_type = ctypes.CFUNCTYPE(ctypes.c_void_p)

    def create_status_impl(code: int, message: bytes) -> int:
        made.append((code, message.decode()))
        return 0x1234

    create_status = create_status_type(create_status_impl)
    table = (ctypes.c_void_p * 128)(ctypes.cast(create_status, ctypes.c_void_p).value)
    version = ctypes.create_string_buffer(b"1.9.0")
    get_api = get_api_type(lambda wanted: ctypes.addressof(table) if has_first_version and wanted == 1 else None)
    get_version = get_version_type(lambda: ctypes.addressof(version))
    base = (ctypes.c_void_p * 2)(
        ctypes.cast(get_api, ctypes.c_void_p).value, ctypes.cast(get_version, ctypes.c_void_p).value
    )
    register = ctypes.CDLL(str(library_path())).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    return register(None, ctypes.addressof(base)), made


def test_an_old_runtime_is_named() -> None:
    status, made = register_with_old_runtime(has_first_version=True)
    assert status == 0x1234
    [(_, message)] = made
    assert "need onnxruntime 1.17 or newer and found 1.9.0" in message
    assert "pip install" in message


def test_a_runtime_without_any_api_does_not_crash(capfd: pytest.CaptureFixture[str]) -> None:
    status, made = register_with_old_runtime(has_first_version=False)
    assert status is None
    assert made == []
    assert "found 1.9.0" in capfd.readouterr().err


def test_many_sessions_share_the_library() -> None:
    rng = np.random.default_rng(9)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (4, 32), quantization)
    x = rng.normal(size=(2, 32)).astype(np.float32)
    options = session_options()
    data = ir.serde.serialize_model(build_model(rows, vars(quantization))).SerializeToString()
    first = ort.InferenceSession(data, options)
    expected = run(first, x)
    for _ in range(20):
        for again in (ort.InferenceSession(data, options), ort.InferenceSession(data, session_options())):
            np.testing.assert_array_equal(run(again, x), expected)
    del options, again
    np.testing.assert_array_equal(run(first, x), expected)


def test_the_library_is_searched_for_in_every_folder_of_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, built = tmp_path / "sources", tmp_path / "built"
    sources.mkdir()
    built.mkdir()
    monkeypatch.setattr(intaglio.kernels.cpu, "__path__", [str(sources), str(built)])
    with pytest.raises(EngineError, match="pip install --force-reinstall intaglio") as caught:
        library_path()
    assert str(sources) in str(caught.value)
    assert str(built) in str(caught.value)
    (built / "intaglio_cpu.dylib").touch()
    assert library_path() == built / "intaglio_cpu.dylib"
