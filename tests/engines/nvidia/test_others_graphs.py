"""Graphs that others wrote, lowered for TensorRT: the numbers of the file in onnxruntime, and what the parser says.

Bounds of relative L2: 1e-5 in float32, of which steps of a quantized activation may fall on the other side of a
rounding; 2e-2 in float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from fetched import fetched
from foreign_models import MODELS, Foreign, random_feeds
from onnx import numpy_helper, parser
from tensorrt_rtx_builds import build_for_gpu, parse_for_gpu, require_tensorrt_rtx

from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.lowering.round_values import RoundValuesPass
from intaglio.engines.nvidia.building import lowered_model
from intaglio.engines.nvidia.lower import lower
from intaglio.engines.nvidia.options import FullOptions, RtxOptions
from intaglio.engines.onnx_file import read_onnx
from intaglio.errors import CompileError

BOUNDS = {None: 1e-5, "float16": 2e-2}


def run(graph: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def lowered(graph: Path, folder: Path, dtype: Any = None) -> tuple[Path, ir.Model]:
    model, _ = lowered_model(graph, RtxOptions(dtype=dtype))
    write_graph(model, folder / f"{graph.stem}-{dtype}.onnx")
    return folder / f"{graph.stem}-{dtype}.onnx", model


def agree(found: list[np.ndarray], expected: list[np.ndarray], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        wide = theirs.astype(np.float64)
        assert np.linalg.norm(ours - wide) <= bound * np.linalg.norm(wide)


@pytest.mark.parametrize("foreign", MODELS, ids=lambda foreign: foreign.name)
def test_published_models(foreign: Foreign, tmp_path: Path) -> None:
    path = fetched(foreign.name)
    inputs = read_onnx(path).inputs
    graphs = {dtype: lowered(path, tmp_path, dtype)[0] for dtype in BOUNDS}
    for sizes in foreign.sizes:
        feeds = random_feeds(inputs, foreign, dict(zip(foreign.dims, sizes, strict=True)))
        expected = run(path, feeds)
        for dtype, graph in graphs.items():
            agree(run(graph, feeds), expected, BOUNDS[dtype])
    require_tensorrt_rtx()
    assert parse_for_gpu(list(graphs.values())) == {}


def text_model(text: str, opset: int, folder: Path, **weights: np.ndarray) -> Path:
    """A file of a graph in ONNX's own text form; nodes are named after their first output."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]>\n{text}')
    for name, array in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    for node in proto.graph.node:
        node.name = f"make {node.output[0]}"
    onnx.save(proto, folder / "given.onnx")
    return folder / "given.onnx"


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


NETWORK = """g (float[N,3,12,12] x) => (float[N,8] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu(a) c = Conv <pads = [1, 1, 1, 1]> (r, w2, b2)
    p = GlobalAveragePool(c) f = Flatten(p) y = Gemm <transB = 1> (f, w3, b3)
}"""
SHAPES = {"w": (8, 3, 3, 3), "b": (8,), "w2": (8, 8, 3, 3), "b2": (8,), "w3": (8, 8), "b3": (8,)}


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("form", ["int8", "uint8", "dynamic"])
def test_what_onnxruntime_quantized(form: str, opset: int, tmp_path: Path) -> None:
    """Pairs of QuantizeLinear and DequantizeLinear with biases of 32 bits, and products of integers."""
    from onnxruntime import quantization

    given = text_model(NETWORK, opset, tmp_path, **{name: floats(*shape) * 0.3 for name, shape in SHAPES.items()})
    quantized = tmp_path / "quantized.onnx"
    if form == "dynamic":
        quantization.quantize_dynamic(given, quantized)
    else:

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self._feeds = iter([{"x": floats(2, 3, 12, 12)} for _ in range(3)])

            def get_next(self) -> dict[str, np.ndarray] | None:
                return next(self._feeds, None)

        kind = getattr(quantization.QuantType, f"Q{form.replace('i', 'I').replace('u', 'U')}")
        quantization.quantize_static(given, quantized, Reader(), activation_type=kind, per_channel=opset > 11)
    graph, model = lowered(quantized, tmp_path)
    feeds = {"x": floats(2, 3, 12, 12)}
    agree(run(graph, feeds), run(quantized, feeds), BOUNDS[None])
    stored = {value.dtype for value in model.graph.initializers.values()}
    assert ir.DataType.INT8 in stored
    assert not {ir.DataType.UINT8, ir.DataType.INT32} & stored
    require_tensorrt_rtx()
    built = build_for_gpu(graph, {"N": (1, 2, 4)})
    assert not built.failure, built


def test_zeros_that_are_quantized_as_they_come(tmp_path: Path) -> None:
    text = """g (float[b,16] x) => (float[b,4] y) {
        q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast <to = 1> (i) y = Mul(f, s)
    }"""
    weight = np.random.default_rng().integers(-127, 127, (16, 4), np.int8)
    graph, _ = lowered(text_model(text, 17, tmp_path, w=weight), tmp_path)
    assert np.array_equal(run(graph, {"x": np.zeros((2, 16), np.float32)})[0], np.zeros((2, 4), np.float32))


BODIES = {
    "a branch that quantizes": (
        """g (float[b,16] x, bool c) => (float[b,16] y) {
            a = Relu(x)
            r = If (c) <
                then_branch = t () => (float[b,16] p) {
                    q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) p = Neg(d)
                },
                else_branch = e () => (float[b,16] o) { u = DequantizeLinear(w, s, z) o = MatMul(a, u) }
            >
            y = Neg(r)
        }""",
        {"s": np.float32(0.02), "z": np.uint8(7), "w": np.random.default_rng(1).integers(0, 99, (16, 16), np.uint8)},
        {"x": (2, 16), "c": None},
    ),
    "a branch that attends": (
        """g (float[b,2,s,16] x, float[b,2,s,16] k, bool c) => (float[b,2,s,16] y) {
            r = If (c) <
                then_branch = t () => (float[b,2,s,16] p) { p = Attention <is_causal = 1> (x, k, k) },
                else_branch = e () => (float[b,2,s,16] o) { o = Neg(x) }
            >
            y = Neg(r)
        }""",
        {},
        {"x": (2, 2, 3, 16), "k": (2, 2, 3, 16), "c": None},
    ),
    "a function that attends": (
        """g (float[b,s,32] x, float[b,s,32] k) => (float[b,s,32] y) { h = own.f(x, k) y = Neg(h) }
        <domain: "own", opset_import: ["" : 23]> f (x, k) => (y) {
            m = Mul(x, x) y = Attention <q_num_heads = 2, kv_num_heads = 2> (m, k, k)
        }""",
        {},
        {"x": (2, 3, 32), "k": (2, 3, 32)},
    ),
    "a loop": (
        """g (float[b,8] x, int64 n) => (float[b,8] y) {
            t = Constant <value = bool {1}> ()
            y = Loop (n, t, x) < body = l (int64 i, bool c, float[b,8] v) => (bool c2, float[b,8] o) {
                c2 = Identity(c) h = Constant <value = float {0.5}> () o = Mul(v, h)
            } >
        }""",
        {},
        {"x": (2, 8), "n": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_functions_and_of_branches(name: str, tmp_path: Path) -> None:
    text, weights, shapes = BODIES[name]
    given = text_model(text, 23, tmp_path, **weights)
    graph, _ = lowered(given, tmp_path)
    for choice in (True, False):
        scalars = {"c": np.array(choice), "n": np.array(3 if choice else 0)}
        feeds = {n: scalars[n] if shape is None else floats(*shape) for n, shape in shapes.items()}
        agree(run(graph, feeds), run(given, feeds), BOUNDS[None])
    require_tensorrt_rtx()
    built = build_for_gpu(graph, {"b": (1, 2, 4), "s": (1, 2, 4)})
    assert not built.failure, built


REFUSED = {
    "scores": """g (float[b,2,s,16] x, float[b,2,s,16] k) => (float[b,2,s,16] y, float[b,2,s,s] scores) {
        y, pk, pv, scores = Attention(x, k, k) }""",
    "a cache and lengths": """g (float[b,2,s,16] x, float[b,2,s,16] k, int64[b] n)
        => (float[b,2,s,16] y, float[b,2,s,16] pk, float[b,2,s,16] pv) { y, pk, pv = Attention(x, k, k, , , , n) }""",
    "lengths of what is not padding": """g (float[b,2,s,16] x, float[b,2,s,16] k, int64[b] n)
        => (float[b,2,s,16] y) { y = Attention(x, k, k, , , , n) }""",
    "heads of no number": """g (float[b,s,d] x, float[b,s,d] k) => (float[b,s,d] y) { y = Attention(x, k, k) }""",
}


@pytest.mark.parametrize("options", [RtxOptions(), FullOptions()], ids=["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_by_its_node(name: str, options: Any, tmp_path: Path) -> None:
    given = text_model(REFUSED[name], 24, tmp_path)
    with pytest.raises(CompileError, match="make y"):
        lowered_model(given, options)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_a_mask_hides_as_a_whole_stay_finite(dtype: str, size: int, tmp_path: Path) -> None:
    """The least float32 hides in many models; in a half it would be infinite, and the row NaN. Heads of 8 are taken
    apart."""
    text = """g (float[b,2,s,SIZE] x, float[b,2,s,SIZE] k, float[b,1,s,s] m) => (float[b,2,s,SIZE] y) {
        a = Mul(m, least) y = Attention(x, k, k, a)
    }""".replace("SIZE", str(size))
    given = text_model(text, 23, tmp_path, least=np.float32(np.finfo(np.float32).min))
    feeds = {"x": floats(1, 2, 5, size), "k": floats(1, 2, 5, size), "m": np.triu(np.ones((1, 1, 5, 5), np.float32), 1)}
    feeds["m"][:, :, 2] = 1
    model, _ = lowered_model(given, RtxOptions(dtype=dtype))
    RoundValuesPass(ir.DataType.BFLOAT16)(model)
    write_graph(model, tmp_path / "lowered.onnx")
    (found,), (expected,) = run(tmp_path / "lowered.onnx", feeds), run(given, feeds)
    assert np.isfinite(found).all()
    seen = [0, 1, 3, 4]
    agree([found[:, :, seen]], [expected[:, :, seen]], 2e-2)


def test_queries_under_another_name_are_the_keys() -> None:
    """TensorRT's builder crashes where queries and keys are one tensor, through an Identity as well."""
    text = """g (float16[b,2,s,16] x) => (float16[b,2,s,16] y) {
        i = Identity(x) j = Identity(i) y = Attention(x, j, j)
    }"""
    model = ir.from_proto(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}'))
    assert lower(model) == ["1 of Attention as MatMul and Softmax: queries and keys are one tensor"]


def test_weights_of_branches_are_written_and_short_files_refused(tmp_path: Path) -> None:
    text = """g (float[b,64] x, bool c) => (float[b,64] y) {
        y = If (c) < then_branch = t () => (float[b,64] p) { p = MatMul(x, w) },
                     else_branch = e () => (float[b,64] o) { o = Neg(x) } >
    }"""
    given = text_model(text, 17, tmp_path)
    proto = onnx.load(given)
    weight = floats(64, 64)
    tensor = numpy_helper.from_array(weight, "w")
    onnx.external_data_helper.set_external_data(tensor, "given.data")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    proto.graph.node[0].attribute[0].g.initializer.append(tensor)
    given.write_bytes(proto.SerializeToString())
    (tmp_path / "given.data").write_bytes(weight.tobytes())
    (tmp_path / "out").mkdir()
    graph, _ = lowered(given, tmp_path / "out")
    feeds = {"x": floats(2, 64), "c": np.array(True)}
    (tmp_path / "given.data").rename(tmp_path / "moved.data")
    agree(run(graph, feeds), [feeds["x"] @ weight], 1e-6)
    (tmp_path / "given.data").write_bytes(weight.tobytes()[:-8])
    with pytest.raises(CompileError, match=r"bytes of its 16384; export again"):
        lowered(given, tmp_path / "out")
