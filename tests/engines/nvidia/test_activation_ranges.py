"""Activations near the end of their dtype: which are named, which are not, and that memory stays bounded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gpu_stages import export_decoder
from onnx import parser
from safetensors.numpy import load_file, save_file
from tensorrt_rtx_builds import require_tensorrt_rtx
from typer.testing import CliRunner

import intaglio
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.engines.nvidia import activation_ranges
from intaglio.engines.nvidia.activation_ranges import large_activations
from intaglio.errors import InputError
from intaglio.scripts.main import app

HALF, BFLOAT = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def narrowed(text: str, dtype: ir.DataType = HALF) -> ir.Model:
    """A graph in ONNX's own text form, narrowed; nodes are named after their first output."""
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    for node in proto.graph.node:
        node.name = f"make {node.output[0]}"
    model = ir.from_proto(proto)
    NarrowDtypePass(dtype)(model)
    return model


CHAIN = """g (float[b,8] x) => (float[b,8] y) <float k = {200}, float h = {0.001}> {
    a = Mul(x, k) c = Mul(a, k) d = Neg(c) e = Mul(d, h) y = Relu(e)
}"""


def test_what_comes_near_the_end_is_named() -> None:
    x = np.zeros((2, 8), np.float32)
    for number, expected in ((0.7, []), (0.9, ["c", "d"]), (-0.9, ["c", "d"]), (170.0, ["a", "c", "d"])):
        x[1, 3] = number
        found = large_activations(narrowed(CHAIN), {"x": x})
        assert [each.name for each in found] == expected
        for each in found:
            scale = 200 if each.name == "a" else 40000
            assert each.max_abs == pytest.approx(abs(float(np.float16(number))) * scale, rel=1e-3)
            assert (each.node, each.dtype, each.maximum) == (f"make {each.name}", "float16", 65504.0)
            assert each.op_type == ("Neg" if each.name == "d" else "Mul")


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_hidden_scores_are_no_overflow(dtype: ir.DataType) -> None:
    text = """g (float[b,8] x, bool[b,8] m) => (float[b,8] y) <float e = {-inf}, float k = {1e30}> {
        a = Where(m, x, e) c = Transpose<perm=[0, 1]>(a) s = Softmax(c) p = Mul(x, k) q = Mul(p, k) y = Add(s, q)
    }"""
    feeds = {"x": np.full((2, 8), 0.01, np.float32), "m": np.arange(16).reshape(2, 8) % 3 > 0}
    named = [each.name for each in large_activations(narrowed(text, dtype), feeds)]
    assert not {"a", "c", "s"} & set(named)
    feeds["x"] = np.full((2, 8), 6e4 if dtype == HALF else 3e38, np.float32)
    assert "a" in [each.name for each in large_activations(narrowed(text, dtype), feeds)]


def test_bfloat16_has_other_ends() -> None:
    x = np.full((2, 8), 170, np.float32)
    assert large_activations(narrowed(CHAIN, BFLOAT), {"x": x}) == []
    x[0, 0] = 5e33
    found = large_activations(narrowed(CHAIN, BFLOAT), {"x": x})
    assert [(each.name, each.dtype) for each in found] == [("c", "bfloat16"), ("d", "bfloat16")]
    assert found[0].max_abs == pytest.approx(2e38, rel=1e-2)


def test_what_is_not_finite_is_named() -> None:
    x = np.full((2, 8), 1e36, np.float32)
    found = large_activations(narrowed(CHAIN), {"x": x})
    # The input itself is cast to a half, and what follows from it is not finite in float32 either.
    assert ("c", float("inf")) in [(each.name, each.max_abs) for each in found]


def test_islands_are_not_looked_at() -> None:
    """A sum of squares is far beyond float16, and float32 in the narrowed graph."""
    text = """g (float[b,64] x) => (float[b,64] y) <int64[1] axes = {-1}, float eps = {1e-6}> {
        square = Mul(x, x) mean = ReduceSum(square, axes) e = Add(mean, eps) s = Sqrt(e) n = Div(x, s) y = Neg(n)
    }"""
    x = np.full((2, 64), 4000, np.float32)
    model = narrowed(text)
    islands = {node.name for node in model.graph if node.outputs[0].dtype == ir.DataType.FLOAT}
    assert {"make square", "make mean"} <= islands
    assert large_activations(model, {"x": x}) == []


def test_pieces_hold_little_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that later pieces read, a branch that captures one, a constant and a table of bfloat16 among them."""
    text = """g (float[b,8] x, int64[b] ids, bool c) => (float[b,8] y, float[b,8] z)
        <float k = {200}, float[3,8] table = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}> {
        r = Gather(table, ids) a = Mul(x, k) s = Add(a, r) b1 = Mul(s, k)
        q = If (c) <
            then_branch = t () => (float[b,8] p) { p = Neg(b1) }, else_branch = e () => (float[b,8] o) { o = Abs(a) }
        >
        m = Mul(q, x) n = Add(m, b1) y = Relu(n) z = Add(r, a)
    }"""
    feeds = {"x": np.full((3, 8), 2, np.float32), "ids": np.array([0, 2, 1]), "c": np.array(True)}
    pieces: list[int] = []
    run = activation_ranges._run_piece

    def counted(model: onnx.ModelProto, nodes: list[onnx.NodeProto], *rest: object) -> dict[str, np.ndarray]:
        pieces.append(len(nodes))
        return run(model, nodes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(activation_ranges, "_run_piece", counted)
    for dtype in (HALF, BFLOAT):
        whole = large_activations(narrowed(text, dtype), feeds)
        assert len(pieces) == 1
        monkeypatch.setattr(activation_ranges, "_MOST_NODES", 2)
        parts = large_activations(narrowed(text, dtype), feeds, most_bytes=1)
        assert parts == whole
        assert pieces[1] == 2
        assert set(pieces[2:]) == {1}
        assert [each.name for each in whole] == (["b1", "q.float16", "m", "n"] if dtype == HALF else [])
        monkeypatch.undo()
        monkeypatch.setattr(activation_ranges, "_run_piece", counted)
        pieces.clear()


def test_feeds_that_are_missing() -> None:
    with pytest.raises(InputError, match="'x' is missing"):
        large_activations(narrowed(CHAIN), {})


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose second layer has feed-forward products beyond a half."""
    folder = tmp_path_factory.mktemp("loud")
    export_decoder(folder)
    intaglio.export(folder / "checkpoint", folder / "quiet", stages=["score"])
    weights = load_file(folder / "checkpoint" / "model.safetensors")
    name = "model.layers.1.mlp.{}_proj.weight"
    weights[name.format("up")] *= 6e4
    weights[name.format("down")] /= 6e4
    save_file(weights, folder / "checkpoint" / "model.safetensors")
    intaglio.export(folder / "checkpoint", folder / "loud", stages=["score"])
    return folder


def test_parity_tells(loud: Path) -> None:
    require_tensorrt_rtx()
    for bundle, dtype, is_loud in (("loud", "float16", True), ("quiet", "bfloat16", False)):
        intaglio.compile(loud / bundle, "tensorrt-rtx", dtype=dtype)
        report = intaglio.parity(loud / bundle, "tensorrt-rtx", keep_going=True)
        assert bool(report.large_activations) == is_loud
    assert report.first_divergent is None
    report = intaglio.parity(loud / "loud", "tensorrt-rtx")
    assert all("layers.1" in each.node and "mlp" in each.node for each in report.large_activations)
    shown = CliRunner().invoke(app, ["parity", str(loud / "loud"), "--target", "tensorrt-rtx", "--json"])
    told = json.loads(shown.stdout)["large_activations"]
    assert [each["name"] for each in told] == [each.name for each in report.large_activations]
    assert {each["stage"] for each in told} == {"score"}
    assert f"{told[0]['node']!r} makes, comes to " in shown.stderr


def test_parity_of_other_engines_looks_for_none(loud: Path) -> None:
    intaglio.compile(loud / "loud", "cpu")
    assert intaglio.parity(loud / "loud", "cpu").large_activations == ()
