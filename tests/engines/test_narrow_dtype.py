"""Graphs narrowed to halves: what stays float32, what is right for that, and what is said of it.

Bound: relative L2 <= 2e-3 of float32, for a few roundings of 2**-11 each.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.engines.lowering.narrow_islands import lost_in
from intaglio.engines.lowering.round_values import RoundValuesPass
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, pack_codes

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
BOUND = 2e-3


def model(text: str, opset: int = 18) -> onnx.ModelProto:
    """The model of a graph in ONNX's own text form; nodes are named after their first output."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


def narrowed(proto: onnx.ModelProto) -> tuple[ir.Model, NarrowDtypePass]:
    result, narrow = ir.from_proto(proto), NarrowDtypePass(HALF)
    narrow(result)
    return result, narrow


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.dtype == expected.dtype
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    return float(np.linalg.norm(np.nan_to_num(found - expected)) / np.linalg.norm(np.nan_to_num(expected)))


def check(
    proto: onnx.ModelProto, feeds: dict[str, np.ndarray], bound: float = BOUND
) -> tuple[ir.Model, dict[str, str]]:
    """The narrowed model, whose outputs are close to float32's, and what it kept."""
    result, narrow = narrowed(proto)
    for ours, theirs in zip(run(ir.to_proto(result), feeds), run(proto, feeds), strict=True):
        assert distance(ours, theirs) <= bound
    return result, narrow.kept


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng().standard_normal(shape) * scale).astype(np.float32)


def dtypes(result: ir.Model) -> dict[str, ir.DataType | None]:
    """Of all nodes that are no casts, by name, what they give."""
    return {str(node.name): node.outputs[0].dtype for node in result.graph if node.op_type != "Cast"}


def with_weight(proto: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def test_the_interface_stays_and_what_is_inside_is_float16() -> None:
    proto = with_weight(
        model("g (float[b,8] x) => (float[b,4] y, float[b,4] z) { wt = Transpose(w) z = MatMul(x, wt) y = Relu(z) }"),
        "w",
        floats(4, 8),
    )
    result, kept = check(proto, {"x": floats(3, 8)})
    assert [(v.name, v.dtype) for v in (*result.graph.inputs, *result.graph.outputs)] == [
        ("x", FLOAT), ("y", FLOAT), ("z", FLOAT),
    ]  # fmt: skip
    assert set(dtypes(result).values()) == {HALF}
    assert {v.dtype for v in result.graph.initializers.values()} == {HALF}
    assert not kept


NORM = """g (float[b,64] x) => (float[b,64] y)
    <int64[1] axes = {-1}, float eps = {1e-12}, float two = {2.0}, float[1] scale = {1.5}> {
        mean = ReduceMean(x, axes) d = Sub(x, mean) square = Pow(d, two) variance = ReduceMean(square, axes)
        e = Add(variance, eps) s = Sqrt(e) n = Div(d, s) y = Mul(n, scale)
    }"""
RMS = """g (float[b,64] x) => (float[b,64] y)
    <int64[1] axes = {-1}, float eps = {1e-6}, float[1] scale = {1.5}> {
        square = Mul(x, x) mean = ReduceMean(square, axes) e = Add(mean, eps) s = Sqrt(e) r = Reciprocal(s)
        n = Mul(x, r) y = Mul(n, scale)
    }"""
SOFTMAX = """g (float[b,64] x) => (float[b,64] y) <int64[1] axes = {-1}> {
        e = Exp(x) sum = ReduceSum(e, axes) n = Div(e, sum) y = Relu(n)
    }"""


@pytest.mark.parametrize(("text", "scale"), [(NORM, 600.0), (NORM, 1e-4), (RMS, 600.0), (SOFTMAX, 5.0)])
def test_norms_and_softmax_in_pieces_keep_their_statistics_in_float32(text: str, scale: float) -> None:
    x = floats(4, 64, scale=scale)
    x[0] = 0.0  # without its epsilon a norm would divide zero by zero
    if text == SOFTMAX:
        x[0] = 12.0  # their exponentials are beyond float16
    result, _ = check(model(text), {"x": x})
    found = dtypes(result)
    assert found["y"] == HALF
    assert {found[name] for name in found if name not in ("y", "axes")} == {FLOAT}


def test_softmax_is_float32_and_the_products_around_it_are_not() -> None:
    text = """g (float[b,16] q, float[b,16] k) => (float[b,16] y) {
        kt = Transpose <perm = [1, 0]> (k) scores = MatMul(q, kt) p = Softmax <axis = -1> (scores) y = MatMul(p, k)
    }"""
    result, kept = check(model(text), {"q": floats(5, 16), "k": floats(5, 16)})
    assert dtypes(result) == {"kt": HALF, "scores": HALF, "p": FLOAT, "y": HALF}
    assert not kept


@pytest.mark.parametrize("shape", ["[8]", "[1, 8]"])
def test_angles_of_far_positions_are_float32(shape: str) -> None:
    text = f"""g (int64[b,1] ids, float[b,8] x) => (float[b,8] y)
        <float{shape} f = {{1, 0.5, 0.3, 0.1, 0.05, 0.01, 2e-5, 0}}> {{
        p = Cast <to = 1> (ids) angles = Mul(p, f) c = Cos(angles) half = Identity(c) r = Mul(x, half) y = Relu(r)
    }}"""
    ids = np.array([[0], [77], [60001], [100003]])
    result, _ = check(model(text), {"ids": ids, "x": floats(4, 8)})
    found = dtypes(result)
    assert (found["angles"], found["c"], found["r"]) == (FLOAT, FLOAT, HALF)


def test_the_outer_product_of_frequencies_and_positions_is_float32() -> None:
    text = """g (int64[1,s] ids, float[1,s,4] x) => (float[1,s,4] y)
        <float[1,4,1] f = {1, 0.3, 0.1, 0.01}, int64[1] one = {1}> {
        u = Unsqueeze(ids, one) p = Cast <to = 1> (u) a = MatMul(f, p) t = Transpose <perm = [0, 2, 1]> (a)
        c = Sin(t) y = Mul(x, c)
    }"""
    result, _ = check(model(text), {"ids": np.array([[0, 5000, 70001]]), "x": floats(1, 3, 4)})
    assert dtypes(result)["a"] == FLOAT
    assert dtypes(result)["y"] == HALF


MASKS = {
    "times": """m = Cast <to = 1> (mask) hidden = Sub(one, m) a = Mul(hidden, least) masked = Add(scores, a)""",
    "where": """b = Cast <to = 9> (mask) masked = Where(b, scores, least)""",
    "add": """b = Cast <to = 9> (mask) zero = Sub(one, one) a = Where(b, zero, least) masked = Add(scores, a)""",
}


@pytest.mark.parametrize("least", ["-3.4028235e38", "-1e9"])
@pytest.mark.parametrize("how", MASKS)
def test_a_mask_that_float16_does_not_hold_is_applied_in_float32(how: str, least: str) -> None:
    text = f"""g (float[b,6] x, int64[b,6] mask) => (float[b,6] y) <float least = {{{least}}}, float one = {{1}}> {{
        scores = Mul(x, x) {MASKS[how]} p = Softmax <axis = -1> (masked) y = Mul(p, x)
    }}"""
    mask = np.array([[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])  # a row that is masked as a whole is no NaN
    result, kept = check(model(text), {"x": floats(2, 6), "mask": mask})
    assert dtypes(result)["masked"] == FLOAT
    assert dtypes(result)["scores"] == dtypes(result)["y"] == HALF
    assert any("'least'" in why and "beyond 65504" in why for why in kept.values())
    assert "masked" in kept
    assert "y" not in kept


def test_a_mask_that_float16_holds_is_applied_as_it_is() -> None:
    text = """g (float[b,6] x, bool[b,6] mask) => (float[b,6] y) <float least = {-1e4}, float one = {1}> {
        m = Cast <to = 1> (mask) hidden = Sub(one, m) a = Mul(hidden, least) s = Add(x, a) y = Softmax <axis = -1> (s)
    }"""
    _, kept = check(model(text), {"x": floats(2, 6), "mask": np.array([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]], bool)})
    assert not kept


def test_an_attention_takes_such_a_mask_as_it_is() -> None:
    text = """g (float[1,2,s,8] q, float[1,1,s,s] m) => (float[1,2,s,8] y) <float least = {-3.4e38}> {
        a = Mul(m, least) t = Attention(q, q, q, a) y = Neg(t)
    }"""
    for changed, mask in ((text, FLOAT), (text.replace("Mul(m, least)", "Neg(m)"), HALF)):
        result, narrow = narrowed(model(changed, 23))
        (attention,) = (node for node in result.graph if node.op_type == "Attention")
        assert [value.dtype for value in attention.inputs if value is not None] == [HALF, HALF, HALF, mask]
        assert dtypes(result)["y"] == HALF
        assert attention.attributes["softmax_precision"].value == FLOAT
        assert set(narrow.kept) == ({"a"} if mask == FLOAT else set())


def test_weights_that_float16_does_not_hold() -> None:
    text = "g (float[b,8] x) => (float[b,4] y) { z = MatMul(x, w) t = Tanh(z) y = Neg(t) }"
    weight = floats(8, 4)
    weight[3, 2] = 70000.0
    result, kept = check(with_weight(model(text), "w", weight), {"x": floats(3, 8, scale=1e-5)})
    assert "'w'" in kept["z"]
    assert "70000, beyond 65504" in kept["z"]
    assert dtypes(result) == {"z": FLOAT, "t": FLOAT, "y": HALF}


def test_divisors_whose_reciprocal_float16_does_not_hold() -> None:
    text = "g (float[b,8] x) => (float[b,8] y) <float s = {60001}, float t = {255}> { a = Div(x, t) y = Div(a, s) }"
    result, kept = check(model(text), {"x": floats(3, 8, scale=1e4)})
    assert dtypes(result) == {"a": HALF, "y": FLOAT}
    assert "reciprocal" in kept["y"]


def test_small_numbers() -> None:
    text = "g (float[b,8] x) => (float[b,8] y) <float s = {1e-7}, float t = {1e7}> { a = Mul(x, s) y = Mul(a, t) }"
    _, kept = check(model(text), {"x": floats(3, 8)})
    assert set(kept) == {"a", "y"}
    assert lost_in(np.array([1e-9, 1.0], np.float32), HALF) is None
    assert lost_in(np.array([1e-9, 0.0], np.float32), HALF)
    assert lost_in(np.array([0.0, np.inf, -np.inf, np.nan, 65504.0], np.float32), HALF) is None
    assert lost_in(np.array(2.0**-20, np.float32), HALF) is None


def test_little_that_is_added_is_no_matter_and_what_guards_a_divisor_is() -> None:
    text = """g (float[b,8] x) => (float[b,8] y)
        <float[1] bias = {2.6e-6}, float[8] gamma = {1e-6, 2e-6, 1e-6, 1e-6, 0, 0, 1e-6, 0}> {
        a = Add(x, bias) m = Mul(a, gamma) r = Add(x, m) y = Neg(r)
    }"""
    result, kept = check(model(text), {"x": floats(3, 8)})
    assert dtypes(result) == {"a": HALF, "m": FLOAT, "r": FLOAT, "y": HALF}
    assert set(kept) == {"m", "r"}
    guarded = "g (float[b,8] x) => (float[b,8] y) <float e = {1e-9}> { a = Abs(x) d = Add(a, e) y = Div(x, d) }"
    x = floats(3, 8)
    x[0] = 0
    result, kept = check(model(guarded), {"x": x})
    assert set(kept) == {"d", "y"}


def test_a_norm_whose_statistics_are_given_ends_its_island_itself() -> None:
    text = """g (float[b,8] x, float[b,1] mean, float[b,1] variance, float[8,4] w) => (float[b,4] y)
        <float eps = {1e-7}, float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}> {
        d = Sub(x, mean) e = Add(variance, eps) s = Sqrt(e) n = Div(d, s) m = Mul(n, scale) y = MatMul(m, w)
    }"""
    x = floats(6, 8, scale=1e-3)
    feeds = {"x": x, "mean": x.mean(1, keepdims=True), "variance": x.var(1, keepdims=True), "w": floats(8, 4)}
    result, kept = check(model(text), feeds)
    assert dtypes(result) == {"d": HALF, "e": FLOAT, "s": FLOAT, "n": FLOAT, "m": HALF, "y": HALF}
    assert set(kept) == {"e"}


def test_nodes_that_follow_from_others_are_one_note() -> None:
    text = """g (float[b,8] x) => (float[b,8] y) <float huge = {70000}, float t = {0.5}> {
        a = Mul(x, huge) b = Mul(a, t) c = Neg(b) d = Mul(c, t) e = Abs(d) y = Tanh(e)
    }"""
    _, narrow = narrowed(model(text))
    assert len(narrow.kept) == 6
    named, counted = narrow.notes
    assert named.startswith("a stays float32: Mul reads 'huge'")
    assert counted == "5 more stay float32, since they read what such nodes give: b, c, d, …"


def test_bounds_that_no_float16_reaches_are_none() -> None:
    text = """g (float[b,8] x) => (float[b,8] y) <float low = {0.0}, float high = {3.4e38}, float least = {-1e30}> {
        a = Clip(x, low, high) y = Max(a, least)
    }"""
    result, kept = check(model(text), {"x": floats(3, 8)})
    assert set(dtypes(result).values()) == {HALF}
    assert not kept


def test_a_gated_residual_sum_is_clipped_as_our_float16_graphs_clip_it() -> None:
    text = (
        "g (float[1,s,8] x, float[1,1,8] gate, float[1,s,8] z) => (float[1,s,8] y) { g = Mul(gate, z) y = Add(x, g) }"
    )
    feeds = {
        "x": floats(1, 3, 8),
        "gate": np.full((1, 1, 8), 300, np.float32),
        "z": np.full((1, 3, 8), -300, np.float32),
    }
    result, _ = narrowed(model(text))
    (found,) = run(ir.to_proto(result), feeds)
    assert np.array_equal(found, np.full((1, 3, 8), -65504, np.float32))


def test_integers_that_are_products_stay_float32_until_they_are_scaled() -> None:
    text = """g (float[b,64] x) => (float[b,4] y) <float scale = {0.01}> {
        q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast <to = 1> (i)
        t = Mul(s, scale) m = Mul(f, t) y = Relu(m)
    }"""
    proto = with_weight(model(text), "w", np.random.default_rng().integers(90, 127, (64, 4), np.int8))
    result, kept = check(proto, {"x": np.abs(floats(3, 64))})
    assert "takes no float16" in kept["q"]
    assert dtypes(result)["y"] == HALF


def test_a_branch_reads_what_it_read_before() -> None:
    text = """g (float[b,8] x, bool c) => (float[b,8] y) {
        a = Relu(x)
        r = If (c) <
            then_branch = t () => (float[b,8] p) { p = Neg(a) },
            else_branch = e () => (float[b,8] q) { q = Add(a, a) }
        >
        y = Neg(r)
    }"""
    for choice in (True, False):
        result, _ = check(model(text), {"x": floats(2, 8), "c": np.array(choice)})
        assert dtypes(result)["a"] == dtypes(result)["y"] == HALF


def test_what_a_float16_graph_has_lost_already_is_named() -> None:
    text = """g (float16[b,6] x, float16[b,6] m) => (float16[b,6] y) {
        hidden = Mul(m, least) s = Add(x, hidden) square = Pow(s, two) e = Add(square, eps) r = Sqrt(e) y = Div(s, r)
    }"""
    proto = model(text)
    for name, number in (("least", -np.inf), ("eps", 1e-9), ("two", 2)):
        with_weight(proto, name, np.array(number, np.float16))
    _, narrow = narrowed(proto)
    assert set(narrow.broken) == {"hidden", "e"}
    assert "NaN" in narrow.broken["hidden"]
    assert "epsilon" in narrow.broken["e"]
    assert not narrow.kept


def test_a_dtype_that_is_not_known_is_asked_for() -> None:
    proto = model("g (float[3] x) => (float[3] y) { m = Identity(x) y = Add(x, m) }")
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "Make", "own"
    del proto.graph.node[0].input[:]
    proto.opset_import.append(onnx.OperatorSetIdProto(domain="own", version=1))
    with pytest.raises(CompileError, match=r"dtype of 'm', which Make makes.*shape_inference"):
        narrowed(proto)
    with pytest.raises(ValueError, match="found double"):
        NarrowDtypePass(ir.DataType.DOUBLE)


def quantized(scale: float, *, head: bool) -> ir.Model:
    """A quantized product, and a norm after it unless it is the ``head``."""
    layout = GroupedQuantFormat(2, 32, 1)
    arrays = {
        "codes": pack_codes(np.random.default_rng().integers(0, 3, (4, 32), np.uint8), 2),
        "scales": np.full((4, 1), scale, np.float32),
        "offsets": np.zeros([], np.float32),
    }
    weights = [
        ir.Value(
            name=n, shape=ir.Shape(a.shape), type=ir.TensorType(ir.tensor(a).dtype), const_value=ir.tensor(a, name=n)
        )
        for n, a in arrays.items()
    ]
    x = ir.Value(name="x", shape=ir.Shape(["b", 32]), type=ir.TensorType(FLOAT))
    attributes = {"bits": layout.bits, "group_size": layout.group_size, "zero_point": layout.zero_point}
    product = ir.node("GroupedQuantMatMul", [x, *weights], attributes, domain=DOMAIN, name="product")
    nodes = [product]
    if not head:
        nodes.append(ir.node("Relu", [product.outputs[0]], name="relu"))
    for node in nodes:
        node.outputs[0].dtype, node.outputs[0].name = FLOAT, node.name
    opsets = {"": 23, DOMAIN: 1}
    graph = ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, initializers=weights, opset_imports=opsets, name="g")
    return ir.Model(graph, ir_version=11)


def test_quantized_products() -> None:
    for scale, head, expected, reason in (
        (0.02, False, HALF, None),
        (0.02, True, FLOAT, None),
        (1e5, False, FLOAT, "'scales', which holds 100000, beyond 65504"),
        (1.1e-7, False, FLOAT, "'scales', which holds 1.1e-07, below"),
    ):
        result, narrow = quantized(scale, head=head), NarrowDtypePass(HALF)
        narrow(result)
        assert dtypes(result)["product"] == expected
        assert reason is None or reason in narrow.kept["product"]
        # The kernels' own dtype of scales is nobody else's matter.
        assert result.graph.initializers["scales"].dtype == FLOAT


COMPUTED = {
    "divided": "g (float[b,8] x) => (float[b,8] y) { c = Mul(k, k) t = Relu(x) y = Div(t, c) }",
    "multiplied": "g (float[b,8] x) => (float[b,8] y) { c = Mul(k, k) t = Relu(x) y = Mul(t, c) }",
    "held after all": "g (float[b,8] x) => (float[b,8] y) { c = Mul(k, k) d = Div(c, c) t = Relu(x) y = Mul(t, d) }",
    "moved": "g (float[b,8] x) => (float[b,8] y) { c = Mul(k, k) d = Reshape(c, one) t = Relu(x) y = Mul(t, d) }",
    "large": "g (float[b,8] x) => (float[b,9000] y) { c = Mul(w, k) d = Mul(c, k) t = Relu(x) y = MatMul(t, d) }",
    "large and moved": """g (float[b,8] x) => (float[b,9000] y) {
        c = Mul(v, k) d = Mul(c, k) e = Transpose(d) t = Relu(x) y = MatMul(t, e)
    }""",
    "large and held": """g (float[b,8] x) => (float[b,9000] y) {
        c = Mul(w, k) d = Div(c, k) t = Relu(x) y = MatMul(t, d)
    }""",
}


@pytest.mark.parametrize("how", COMPUTED)
def test_constants_that_are_computed_of_constants_are_looked_at_as_well(how: str) -> None:
    proto = with_weight(model(COMPUTED[how]), "k", np.array([300.0], np.float32))
    with_weight(proto, "w", floats(8, 9000))
    with_weight(proto, "v", floats(9000, 8))
    with_weight(proto, "one", np.array([1]))
    for node in proto.graph.node:
        node.name = node.output[0]
    result, kept = check(proto, {"x": floats(3, 8)})
    holds = "held" in how
    assert dtypes(result)["t"] == HALF
    assert dtypes(result)["y"] == (HALF if holds else FLOAT)
    assert ("y" in kept) != holds


def test_attributes_that_float16_does_not_hold() -> None:
    text = "g (float[b,8] x) => (float[b,8] y) { t = Neg(x) p = LeakyRelu <alpha = 1e-9> (t) s = Abs(p) y = Sqrt(s) }"
    result, kept = check(model(text), {"x": floats(3, 8)})
    assert dtypes(result)["p"] == FLOAT
    assert "has alpha 1e-09, below" in kept["p"]
    text = "g (float[2,8] x) => (float[2,10] y) { t = Neg(x) y = Pad <pads = [0, 1, 0, 1], value = -3e38> (t) }"
    result, kept = check(model(text, 9), {"x": floats(2, 8)})
    assert dtypes(result) == {"t": HALF, "y": FLOAT}
    assert "has value -3e+38, beyond" in kept["y"]


INTEGERS = {
    "cast": "i = Cast <to = 7> (t) f = Cast <to = 1> (i) y = Relu(f)",
    "rounded": "r = Floor(t) i = Cast <to = 7> (r) f = Cast <to = 1> (i) y = Relu(f)",
    "scaled": "m = Mul(t, k) r = Round(m) i = Cast <to = 7> (r) f = Cast <to = 1> (i) y = Relu(f)",
}


@pytest.mark.parametrize("how", INTEGERS)
def test_integers_are_made_of_float32(how: str) -> None:
    text = f"""g (float[b,3] x) => (float[b,3] y, int64[b,3] i) <float k = {{1001}}> {{ t = Neg(x) {INTEGERS[how]} }}"""
    x = np.array([[4097, 5003, -2049], [12345, 1, 0]], np.float32) / (1000 if how == "scaled" else 1)
    result, _ = narrowed(model(text))
    assert np.array_equal(run(ir.to_proto(result), {"x": x})[1], run(model(text), {"x": x})[1])


@pytest.mark.parametrize("text", [NORM, RMS, SOFTMAX])
def test_bfloat16_has_the_same_islands(text: str) -> None:
    result, narrow = ir.from_proto(model(text)), NarrowDtypePass(ir.DataType.BFLOAT16)
    narrow(result)
    found = dtypes(result)
    assert found["y"] == ir.DataType.BFLOAT16
    assert {found[name] for name in found if name not in ("y", "axes")} == {FLOAT}
    assert [(v.name, v.dtype) for v in (*result.graph.inputs, *result.graph.outputs)] == [("x", FLOAT), ("y", FLOAT)]
    assert not narrow.kept
    RoundValuesPass(ir.DataType.BFLOAT16)(result)
    x = floats(4, 64, scale=5.0)
    (ours,), (theirs,) = run(ir.to_proto(result), {"x": x}), run(model(text), {"x": x})
    assert 1e-4 < distance(ours, theirs) <= 1e-2


def test_bfloat16_holds_other_constants() -> None:
    text = """g (float[b,6] x, bool[b,6] mask) => (float[b,6] y) <float least = {LEAST}, float tiny = {1e-9}> {
        a = Mul(x, tiny) m = Where(mask, a, least) y = Softmax <axis = -1> (m)
    }"""
    for least, dtype, kept in (
        ("-1e9", ir.DataType.BFLOAT16, set()),
        ("-3.4028235e38", ir.DataType.BFLOAT16, {"m"}),
        ("-1e9", HALF, {"a", "m"}),
    ):
        result, narrow = ir.from_proto(model(text.replace("LEAST", least))), NarrowDtypePass(dtype)
        narrow(result)
        assert set(narrow.kept) == kept
    assert "beyond 3.38953e+38" in (lost_in(np.array(3.4e38, np.float32), ir.DataType.BFLOAT16) or "")
    assert lost_in(np.array([1e-30, 7e4], np.float32), ir.DataType.BFLOAT16) is None


def test_operators_that_take_no_bfloat16_stay_float32_and_are_named() -> None:
    """Before opset 13 none does."""
    text = "g (float[b,8] x) => (float[b,8] y) { a = Neg(x) y = Relu(a) }"
    for opset, expected in ((11, FLOAT), (13, ir.DataType.BFLOAT16)):
        result, narrow = ir.from_proto(model(text, opset)), NarrowDtypePass(ir.DataType.BFLOAT16)
        narrow(result)
        assert dtypes(result)["a"] == expected
        assert ("takes no bfloat16" in narrow.kept.get("a", "")) == (expected == FLOAT)


def test_bfloat16_needs_no_clip() -> None:
    text = (
        "g (float[1,s,8] x, float[1,1,8] gate, float[1,s,8] z) => (float[1,s,8] y) { g = Mul(gate, z) y = Add(x, g) }"
    )
    for dtype, clips in ((HALF, True), (ir.DataType.BFLOAT16, False)):
        result = ir.from_proto(model(text))
        NarrowDtypePass(dtype)(result)
        assert any(node.op_type == "Clip" for node in result.graph) == clips


def test_values_are_rounded_once_each() -> None:
    text = """g (float[b,8] x, float[b,8] z) => (float[b,8] y) {
        a = Mul(x, z) t = Transpose(a) u = Transpose(t) y = Add(u, z)
    }"""
    result = ir.from_proto(model(text))
    NarrowDtypePass(ir.DataType.BFLOAT16)(result)
    RoundValuesPass(ir.DataType.BFLOAT16)(result)
    x, z = floats(3, 8), floats(3, 8)
    (found,) = run(ir.to_proto(result), {"x": x, "z": z})
    narrow_x, narrow_z = x.astype(ml_dtypes.bfloat16), z.astype(ml_dtypes.bfloat16)
    product = (narrow_x.astype(np.float32) * narrow_z.astype(np.float32)).astype(ml_dtypes.bfloat16)
    expected = (product.astype(np.float32) + narrow_z.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert np.array_equal(found, expected.astype(np.float32))


def test_a_mean_of_what_is_too_large_is_too_large_as_well() -> None:
    text = """g (float[b,8] x) => (float[b,8] y) <float k = {1e9}, int64[1] axes = {-1}> {
        big = Mul(x, k) mean = ReduceMean(big, axes) d = Mul(x, mean) n = Neg(d) t = Tanh(n) y = Neg(t)
    }"""
    result, _ = check(model(text), {"x": floats(3, 8)})
    found = dtypes(result)
    assert found["d"] == found["n"] == FLOAT
    assert found["y"] == HALF
