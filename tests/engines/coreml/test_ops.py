"""Forms of ops that ONNX's node tests leave out: old opsets, dims that vary, integers that overflow."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import assert_same, model

from intaglio.exporters.bundle import Dim

RNG = np.random.default_rng(8)


def _float(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


OLD = [
    (11, "float[2,3,4] y", "y = Softmax<axis=1>(x)"),
    (11, "float[2,3,4] y", "y = LogSoftmax<axis=1>(x)"),
    (11, "float[2,3,4] y", "y = Hardmax<axis=0>(x)"),
    (9, "float[1,2,2] y", "y = Slice<starts=[-1,1,0], ends=[9,-1,2], axes=[0,1,2]>(x) ", (2, 4, 4)),
    (9, "float[2,3,2] v, int64[2,3,2] i", "v, i = TopK<k=2>(x)"),
    (6, "float[2,3,4] y", "y = Clip<min=-0.5, max=0.25>(x)"),
    (11, "float[2,4] y", "y = Squeeze<axes=[1]>(x)", (2, 1, 4)),
    (11, "float[2,1,4,1] y", "y = Unsqueeze<axes=[1,-1]>(x)", (2, 4)),
    (11, "float[2,4] y", "y = ReduceSum<axes=[-2], keepdims=0>(x)"),
    (13, "float[2,1,1] y", "y = ReduceMean<axes=[1,2]>(x)"),
    (11, "float[2,3,1] a, float[2,3,3] b", "a, b = Split<axis=2, split=[1,3]>(x)"),
    (10, "float[2,3,4] y", "y = Dropout(x)"),
    (9, "float[2,12] y", "y = Flatten<axis=-2>(x)"),
    (17, "float[2,3,4] y", "y = CumSum<reverse=1,exclusive=1>(x, one)"),
]


@pytest.mark.parametrize(
    "case", OLD, ids=lambda case: f"{case[2].split('=')[1].split('<')[0].split('(')[0].strip()}-{case[0]}"
)
def test_ops_of_old_opsets(case: tuple) -> None:
    opset, outputs, body, shape = (*case, (2, 3, 4))[:4]
    if opset < 11 and "axis=-2" in body:
        opset = 11
    dims = ",".join(map(str, shape))
    text = f"g (float[{dims}] x) => ({outputs}) <int64 one = {{1}}> {{ {body} }}"
    assert_same(model(text, opset), {"x": _float(*shape)})


VARYING = {
    "reshape-keeps": "s = Constant<value_ints=[0, 0, 2, 6]>() y = Reshape(x, s)",
    "reshape-computed": (
        "d = Shape(x) i = Constant<value_ints=[0]>() b = Gather(d, i) m = Constant<value_ints=[-1]>() "
        "s = Concat<axis=0>(b, m) y = Reshape(x, s)"
    ),
    "flatten": "y = Flatten<axis=2>(x)",
    "slice-last": "a = Constant<value_ints=[-1]>() e = Constant<value_ints=[9223372036854775807]>() "
    "one = Constant<value_ints=[1]>() y = Slice(x, a, e, one)",
    "slice-backwards": "a = Constant<value_ints=[-1]>() e = Constant<value_ints=[-9223372036854775808]>() "
    "one = Constant<value_ints=[1]>() m = Constant<value_ints=[-2]>() y = Slice(x, a, e, one, m)",
    "expand": "d = Shape(x) k = Constant<value_floats=[1.5]>() y = Expand(k, d)",
    "constant-of-shape": "d = Shape(x) z = ConstantOfShape<value = float[1] {2.5}>(d) y = Add(x, z)",
    "softmax-11": "y = Softmax<axis=-1>(x)",
    "gather-from-end": "i = Constant<value_ints=[-1, 0]>() y = Gather<axis=1>(x, i)",
    "range": "d = Shape<start=1, end=2>(x) o = Constant<value_ints=[0]>() n = Squeeze(d, o) "
    "z = Constant<value_int=0>() w = Constant<value_int=1>() r = Range(z, n, w) y = Cast<to=1>(r)",
    "halves": "d = Shape<start=1, end=2>(x) two = Constant<value_ints=[2]>() h = Div(d, two) "
    "a = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>() y = Slice(x, a, h, one)",
    "trilu": "y = Trilu<upper=0>(x)",
    "where": "z = Constant<value_float=0.0>() w = Constant<value_float=2.0>() c = Less(x, z) y = Where(c, z, w)",
    "reduce": "a = Constant<value_ints=[1]>() y = ReduceSum<keepdims=0>(x, a)",
    "einsum": 'y = Einsum<equation="bnc,bmc->bnm">(x, x)',
    "size": "n = Size(x) y = Cast<to=1>(n)",
}


@pytest.mark.parametrize("name", VARYING)
def test_dims_that_vary(name: str) -> None:
    text = f"g (float[batch, tokens, 12] x) => (float y) {{ {VARYING[name]} }}"
    proto = model(text, 17)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    dims = {"batch": Dim(min=1, max=4), "tokens": Dim(min=2, max=64)}
    assert_same(proto, {"x": _float(1, 6, 12)}, {"x": _float(3, 5, 12)}, dims=dims)


def test_integers_of_fewer_bits_overflow() -> None:
    text = """g (uint8[4] a, uint8[4] b, int8[4] c, int8[4] d) => (uint8[4] w, uint8[4] x, int8[4] y, int8[4] z)
    { w = Add(a, b) x = Sub(a, b) y = Mul(c, d) z = Cast<to=3>(a) }"""
    feeds = {
        "a": np.array([250, 3, 0, 255], np.uint8),
        "b": np.array([10, 4, 1, 255], np.uint8),
        "c": np.array([-128, 100, -7, 127], np.int8),
        "d": np.array([2, 3, 19, 127], np.int8),
    }
    assert_same(model(text), feeds)


def test_integers_are_divided_towards_zero() -> None:
    x, y = RNG.integers(-50, 50, 64), RNG.integers(1, 9, 64) * RNG.choice([-1, 1], 64)
    text = """g (int64[64] x, int64[64] y) => (int64[64] q, int64[64] m, int64[64] f)
    { q = Div(x, y) m = Mod(x, y) f = Mod<fmod=1>(x, y) }"""
    assert_same(model(text), {"x": x, "y": y})


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("bij,bjk", (2, 3, 4), (2, 4, 5)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bqhd,bkhd->bhqk", (2, 4, 3, 5), (2, 6, 3, 5)),
    ("abc,cde->abde", (2, 3, 4), (4, 5, 6)),
    ("abc,acb->a", (2, 3, 4), (2, 4, 3)),
    ("i,j->ij", (3,), (4,)),
    ("ij->ji", (3, 4)),
    ("ij->", (3, 4)),
    ("ij->i", (3, 4)),
    ("bii->bi", (2, 3, 3)),
    ("...ij,...jk->...ik", (2, 3, 4), (1, 4, 5)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    ("nchw,chwk->nk", (2, 3, 4, 5), (3, 4, 5, 6)),
]


@pytest.mark.parametrize("equation", EQUATIONS, ids=lambda case: case[0])
def test_einstein_sums(equation: tuple) -> None:
    text, *shapes = equation
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = ", ".join(f"float[{','.join(map(str, s))}] {n}" for n, s in zip(names, shapes, strict=True))
    proto = model(f'g ({inputs}) => (float y) {{ y = Einsum<equation="{text}">({", ".join(names)}) }}')
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert_same(proto, {n: _float(*s) for n, s in zip(names, shapes, strict=True)})


def test_a_branch_that_is_chosen_when_the_model_runs() -> None:
    text = """g (float[2,3] x, bool c) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
        t = Add(x, w)
        z = If <then_branch = a () => (float[2,3] p) { p = Mul(t, w) },
                else_branch = b () => (float[2,3] q) { q = Sub(x, w) }> (c)
        y = Add(z, w)
    }"""
    x = _float(2, 3)
    assert_same(model(text), {"x": x, "c": np.array(True)}, {"x": x, "c": np.array(False)})


def test_a_branch_that_is_known_is_taken_alone() -> None:
    text = """g (float[2,3] x) => (float[2,3] y) {
        d = Shape(x) r = Size(d) two = Constant<value_int=2>() c = Equal(r, two)
        y = If <then_branch = a () => (float[2,3] p) { p = Relu(x) },
                else_branch = b () => (float[2,3] q) { q = Neg(x) }> (c)
    }"""
    assert_same(model(text), {"x": _float(2, 3)})


def test_functions_far_from_where_they_are_tested() -> None:
    """Asinh near 0 and far from it, a LogSoftmax of large numbers, the logarithm of 0."""
    text = """g (float[6] x) => (float[6] a, float[6] b, float[6] c)
    { a = Asinh(x) b = LogSoftmax<axis=0>(x) d = Abs(x) c = Log(d) }"""
    x = np.array([1e-4, -3e-3, 0.0, 1e4, -7e3, 88.0], np.float32)
    assert_same(model(text), {"x": x})


def test_zeros_of_a_shape_that_is_fed() -> None:
    """MIL counts the places of zeros in a shape from the end, ONNX from the start."""
    proto = model("g (float[2,3,4] x, int64[4] s) => (float[a,b,c,d] y) { y = Reshape(x, s) }")
    x = _float(2, 3, 4)
    assert_same(proto, *({"x": x, "s": np.array(s)} for s in ([0, 0, 2, 2], [0, 3, -1, 1], [4, 0, 1, 2])))


def test_zeros_of_a_shape_that_follows_from_others() -> None:
    text = """g (float[b,3,4] x, float[b,n] z) => (float[a,b,c,d] y) <int64[1] k = {0}, int64[1] r = {2}> {
        s = Shape<start=0, end=1>(z) q = Shape<start=1, end=2>(z) h = Div(q, r)
        t = Concat<axis=0>(s, k, h, r) y = Reshape(x, t) }"""
    feeds = [{"x": _float(b, 3, 4), "z": _float(b, 4)} for b in (2, 5)]
    assert_same(model(text), *feeds, dims={"b": Dim(min=1, max=8), "n": Dim(min=4, max=6)})


def test_a_condition_wider_than_what_it_chooses_from() -> None:
    text = """g (bool[3,4] c, float[4] x, int64[1] i) => (float[3,4] y, int64[3,4] j)
    <float z = {-2}, int64 k = {7}> { y = Where(c, z, x) j = Where(c, i, k) }"""
    rng = np.random.default_rng(3)
    feeds = {"c": rng.random((3, 4)) < 0.5, "x": _float(4), "i": np.array([5])}
    assert_same(model(text), feeds)


def test_indices_from_the_end() -> None:
    text = """g (float[4,5] x, int64[3] i, int64[4,2] e, int64[2,2] n)
    => (float[3,5] a, float[4,2] b, float[2] c, float[4,5] d)
    <float[2] u = {10, 20}> { a = Gather(x, i) b = GatherElements<axis=1>(x, e) c = GatherND(x, n)
    d = ScatterND<reduction="add">(x, n, u) }"""
    rng = np.random.default_rng(4)
    feeds = {
        "x": _float(4, 5),
        "i": np.array([-1, 0, -4]),
        "e": rng.integers(-5, 5, (4, 2)),
        "n": np.array([[-1, -5], [0, 2]]),
    }
    assert_same(model(text), feeds)
