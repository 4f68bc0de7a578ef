"""The ops FusedConv and GroupStatistics through onnxruntime, compared with torch in float64 and with themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch.nn import functional

from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import DOMAIN

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "amx")
EPSILON = 1e-6
INPUTS = ("x", "weight", "bias", "mean", "variance", "norm_weight", "norm_bias", "row_mask", "residual")
NORM = INPUTS[3:7]
# Relative L2 of the accuracies.
EXACT, WINOGRAD, BFLOAT16 = 1e-6, 1e-5, 4e-3


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]  # of x
    outputs: int
    kernel: tuple[int, int]
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right
    upsample: int = 1
    groups: int = 0  # no norm
    extras: tuple[str, ...] = ("bias",)


CASES = {
    "3x3": Case((1, 32, 16, 16), 32, (3, 3), (1, 1, 1, 1)),
    "odd": Case((2, 33, 13, 37), 45, (3, 3), (1, 1, 1, 1), extras=()),
    "one pixel": Case((1, 5, 1, 1), 3, (3, 3), (1, 1, 1, 1)),
    "norm": Case((2, 40, 35, 81), 72, (3, 3), (1, 1, 1, 1), groups=8, extras=INPUTS[7:]),
    "band": Case((1, 96, 11, 70), 3, (3, 3), (0, 1, 0, 1), groups=32, extras=("bias", "row_mask", "residual")),
    "wide": Case((1, 16, 6, 603), 17, (3, 3), (1, 1, 1, 1), groups=4),
    "many channels": Case((1, 512, 9, 33), 160, (3, 3), (1, 1, 1, 1), groups=32, extras=("bias", "residual")),
    "1x1": Case((2, 96, 11, 19), 40, (1, 1)),
    "1x1 norm": Case((1, 8, 3, 50), 130, (1, 1), groups=2),
    "5x2": Case((1, 24, 12, 79), 20, (5, 2), (2, 3, 1, -4), groups=3),
    "upsampled": Case((2, 24, 11, 19), 40, (3, 3), (1, 1, 1, 1), 2, extras=("bias", "residual")),
    "upsampled norm": Case((1, 66, 9, 35), 34, (3, 3), (1, 1, 1, 1), 2, groups=3, extras=("row_mask",)),
    "upsampled band": Case((1, 40, 7, 33), 40, (3, 3), (-1, 1, -1, 1), 2),
    "upsampled oddly": Case((1, 7, 5, 6), 9, (3, 3), (2, 0, -3, 3), 2),
}


def feeds_of(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch, channels, height, width = case.shape
    y_height, y_width = (
        case.upsample * size + case.pads[i] + case.pads[i + 2] - case.kernel[i] + 1
        for i, size in enumerate((height, width))
    )
    fan_in = channels * case.kernel[0] * case.kernel[1]
    arrays = {
        "x": rng.normal(0.3, 2, size=case.shape),
        "weight": rng.normal(size=(case.outputs, channels, *case.kernel)) / np.sqrt(fan_in),
        "bias": rng.normal(size=case.outputs),
        "norm_weight": rng.normal(1, 0.3, size=channels),
        "norm_bias": rng.normal(size=channels),
        "row_mask": (rng.random(height) < 0.7).astype(float),
        "residual": rng.normal(size=(batch, case.outputs, y_height, y_width)),
    }
    names = {"x", "weight", *case.extras} | ({"norm_weight", "norm_bias"} if case.groups else set())
    return {name: arrays[name].astype(np.float32) for name in INPUTS if name in names}


def value(name: str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype))


def load(nodes: list[ir.Node], inputs: list[ir.Value], weights: list[ir.Value], outputs: Any, threads: int) -> Any:
    imports = {"": 23, DOMAIN: 1}
    for output in outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports=imports, name="conv")
    data = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def session_of(case: Case, feeds: dict[str, np.ndarray], fast: bool, threads: int = 2, **attributes: Any) -> Any:
    """The convolution, after a statistics op where the case has a norm; weights and biases are constants."""
    values: dict[str, ir.Value] = {}
    for name in feeds:
        values[name] = value(name)
        if name in ("weight", "bias", "norm_weight", "norm_bias"):
            values[name].const_value = ir.tensor(feeds[name], name=name)
    nodes = []
    if case.groups:
        nodes.append(
            ir.node("GroupStatistics", [values["x"]], {"num_groups": case.groups}, domain=DOMAIN, num_outputs=2)
        )
        values["mean"], values["variance"] = nodes[0].outputs
    pads = dict(zip(("pad_top", "pad_left", "pad_bottom", "pad_right"), case.pads, strict=True))
    told = {**pads, "upsample": case.upsample, "epsilon": EPSILON, "fast": int(fast), **attributes}
    nodes.append(ir.node("FusedConv", [values.get(name) for name in INPUTS], told, domain=DOMAIN))
    nodes[-1].outputs[0].name = "y"
    given = [v for name, v in values.items() if name in feeds]
    constants = [v for v in given if v.const_value is not None]
    return load(nodes, [v for v in given if v not in constants], constants, nodes[-1].outputs, threads)


def run(session: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})[0]


def expected_of(case: Case, feeds: dict[str, np.ndarray]) -> np.ndarray:
    t = {name: torch.from_numpy(array).double() for name, array in feeds.items()}
    a = t["x"]
    if case.groups:
        a = functional.silu(functional.group_norm(a, case.groups, t["norm_weight"], t["norm_bias"], EPSILON))
    if "row_mask" in t:
        a = a * t["row_mask"][:, None]
    if case.upsample == 2:
        a = functional.interpolate(a, scale_factor=2.0, mode="nearest")
    top, left, bottom, right = case.pads
    y = functional.conv2d(functional.pad(a, (left, right, top, bottom)), t["weight"], t.get("bias"))
    return (y + t["residual"] if "residual" in t else y).numpy()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def is_winograd(case: Case) -> bool:
    return case.kernel == (3, 3) and case.upsample == 1


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    feeds = feeds_of(CASES["one pixel"], np.random.default_rng(0))
    try:
        session_of(CASES["one pixel"], feeds, True)
    except Exception as error:
        if "this machine or this build lacks" in str(error):
            pytest.skip(f"{request.param} is not to be had here")
        raise
    return request.param


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_match_torch(name: str, fast: bool, instruction_set: str) -> None:
    case = CASES[name]
    feeds = feeds_of(case, np.random.default_rng(sum(case.shape)))
    found, expected = run(session_of(case, feeds, fast), feeds), expected_of(case, feeds)
    assert found.shape == expected.shape
    bound = EXACT
    if fast and instruction_set == "amx":
        bound = BFLOAT16
    elif fast and is_winograd(case):
        bound = WINOGRAD
    assert relative(found, expected) <= bound


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["norm", "5x2", "upsampled norm"])
def test_results_depend_neither_on_threads_nor_on_what_was_in_memory(
    name: str, fast: bool, instruction_set: str
) -> None:
    case = CASES[name]
    feeds = feeds_of(case, np.random.default_rng(1))
    expected = run(session_of(case, feeds, fast, threads=1), feeds)
    for threads in (2, 3):
        session = session_of(case, feeds, fast, threads)
        for _ in range(2):
            binding = session.io_binding()
            for i in session.get_inputs():
                binding.bind_cpu_input(i.name, feeds[i.name])
            poisoned = np.full_like(expected, np.nan)
            binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(poisoned))
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(binding.get_outputs()[0].numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["norm", "1x1", "upsampled"])
def test_pictures_of_a_batch_do_not_meet(name: str, instruction_set: str) -> None:
    case = CASES[name]
    feeds = feeds_of(case, np.random.default_rng(2))
    session = session_of(case, feeds, True)
    whole = run(session, feeds)
    for i in range(len(whole)):
        one = {n: a[i : i + 1] if n in ("x", "residual") else a for n, a in feeds.items()}
        np.testing.assert_array_equal(run(session, one).view(np.uint32), whole[i : i + 1].view(np.uint32))
    none = {n: a[:0] if n in ("x", "residual") else a for n, a in feeds.items()}
    assert run(session, none).shape == (0, *whole.shape[1:])


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["3x3", "wide pixels", "1x1", "upsampled band"])
def test_a_pixel_that_is_not_a_number_stays_where_it_is(name: str, fast: bool, instruction_set: str) -> None:
    case = Case((1, 24, 21, 83), 20, (3, 3), (1, 1, 1, 1)) if name == "wide pixels" else CASES[name]
    feeds = feeds_of(case, np.random.default_rng(3))
    session = session_of(case, feeds, fast)
    before = run(session, feeds)
    row, column = case.shape[2] // 2, case.shape[3] // 2 + 1
    feeds["x"][0, 5, row, column] = np.nan
    after = run(session, feeds)
    reached = np.isnan(expected_of(case, feeds))
    assert np.isnan(after[reached]).all()
    # Winograd's tiles of four rows and columns of y become NaN as a whole.
    rows, columns = np.nonzero(reached[0, 0])
    spread = 3 if fast and instruction_set != "amx" and is_winograd(case) else 0
    outside = np.ones(after.shape[2:], bool)
    top, left = max(rows.min() - spread, 0), max(columns.min() - spread, 0)
    outside[top : rows.max() + spread + 1, left : columns.max() + spread + 1] = False
    np.testing.assert_array_equal(after[..., outside].view(np.uint32), before[..., outside].view(np.uint32))
    # Of a batch of two, the other picture is not touched.
    both = {n: np.concatenate([a[:1], 0 * a[:1] + 1]) if n in ("x", "residual") else a for n, a in feeds.items()}
    both["x"][1] = 1
    assert np.isfinite(run(session, both)[1]).all()


def test_large_activations_keep_their_sign(instruction_set: str) -> None:
    """SiLU far from zero, where the exponential is not to be had."""
    case = Case((1, 32, 4, 40), 32, (1, 1), groups=32, extras=())
    feeds = feeds_of(case, np.random.default_rng(4))
    feeds["weight"] = np.eye(32, dtype=np.float32)[:, :, None, None]
    feeds["norm_weight"] = np.full(32, 60, np.float32)
    for fast in (False, True):
        found, expected = run(session_of(case, feeds, fast), feeds), expected_of(case, feeds)
        assert expected.max() > 100
        np.testing.assert_allclose(found, expected, rtol=1e-2 if fast else 2e-6, atol=1e-2 if fast else 1e-6)


def test_inputs_that_do_not_fit_are_named() -> None:
    case = CASES["norm"]
    feeds = feeds_of(case, np.random.default_rng(5))
    session = session_of(case, feeds, True)

    def message(**other: np.ndarray) -> str:
        with pytest.raises(Exception, match="FusedConv") as caught:
            run(session, {**feeds, **other})
        return str(caught.value)

    assert "residual has shape [2, 72, 35, 1], expected [2, 72, 35, 81]" in message(residual=feeds["residual"][..., :1])
    assert "row_mask has shape [34], expected [35]" in message(row_mask=feeds["row_mask"][1:])
    with pytest.raises(Exception, match="upsample is 3, expected 1 or 2"):
        session_of(case, feeds, True, upsample=3)
    narrow = dict(feeds, weight=feeds["weight"][:, :39])
    with pytest.raises(Exception, match=r"weight has shape \[72, 39, 3, 3\], expected \[out, 40, height, width\]"):
        run(session_of(case, narrow, True), narrow)
    wide = Case((1, 3, 20, 20), 3, (9, 9))
    wide_feeds = feeds_of(wide, np.random.default_rng(5))
    with pytest.raises(Exception, match="9 x 9 taps is more than 64"):
        run(session_of(wide, wide_feeds, True), wide_feeds)
    with pytest.raises(Exception, match="smaller than the kernel"):
        run(session_of(case, feeds, True, pad_left=-100), feeds)


def test_a_weight_that_may_change_is_refused() -> None:
    node = ir.node("FusedConv", [x := value("x"), weight := value("weight")], {}, domain=DOMAIN)
    node.outputs[0].name = "y"
    with pytest.raises(Exception, match="the weight is not a constant of the graph"):
        load([node], [x, weight], [], node.outputs, 1)


def statistics(x: np.ndarray, groups: int, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    node = ir.node("GroupStatistics", [given := value("x")], {"num_groups": groups}, domain=DOMAIN, num_outputs=2)
    node.outputs[0].name, node.outputs[1].name = "mean", "variance"
    return load([node], [given], [], node.outputs, threads).run(None, {"x": x})


@pytest.mark.parametrize(
    ("shape", "mean", "deviation"),
    [((2, 6, 5, 7), 0.5, 2), ((1, 6, 300, 301), 3, 2), ((1, 6, 64, 64), 1000, 0.5), ((3, 6, 1), 0, 1), ((1, 3), -2, 1)],
)
def test_statistics_match_float64(shape: tuple[int, ...], mean: float, deviation: float, instruction_set: str) -> None:
    x = np.random.default_rng(6).normal(mean, deviation, size=shape).astype(np.float32)
    found = statistics(x, 3)
    groups = x.astype(np.float64).reshape(shape[0], 3, -1)
    assert found[0].shape == found[1].shape == (shape[0], 3)
    np.testing.assert_allclose(found[0], groups.mean(axis=2), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], groups.var(axis=2), rtol=1e-6, atol=1e-12)
    for threads in (1, 3):
        for one, other in zip(statistics(x, 3, threads), found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_statistics_of_one_group_do_not_reach_another() -> None:
    x = np.random.default_rng(7).normal(size=(2, 8, 50, 90)).astype(np.float32)
    clean = statistics(x, 4)
    x[1, 3, 20, 4] = np.inf
    for found, before in zip(statistics(x, 4), clean, strict=True):
        touched = np.zeros((2, 4), bool)
        touched[1, 1] = True
        assert not np.isfinite(found[touched]).any()
        np.testing.assert_array_equal(found[~touched], before[~touched])


def test_wrong_groups_are_named() -> None:
    assert statistics(np.ones((0, 4, 2), np.float32), 2)[0].shape == (0, 2)
    with pytest.raises(Exception, match=r"x has shape \[1, 4, 2\], expected .* 3 groups"):
        statistics(np.ones((1, 4, 2), np.float32), 3)
    with pytest.raises(Exception, match="a group without values has no mean"):
        statistics(np.ones((1, 4, 0), np.float32), 2)
