"""Values that a compiler would find to be one, and values that it would not."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from coreml_models import model

from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.engines.lowering.same_value import same_value


def _is_one(body: str, constants: str = "", a: str = "a", b: str = "b") -> bool:
    held = f"<{constants}>" if constants else ""
    graph = ir.from_proto(
        model(f"g (float[2,4] x, float[2,4] z) => (float[n,m] a, float[k,l] b) {held} {{ {body} }}", opset=21)
    )
    infer_shapes(graph)
    outputs = {value.name: value for value in graph.graph.outputs}
    first, second = outputs[a], outputs[b]
    assert same_value(first, second) == same_value(second, first)
    return same_value(first, second)


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("a = Identity(x) b = Identity(x)", ""),
        ("a = Relu(x) b = Relu(x)", ""),
        ("a = Transpose<perm=[1, 0]>(x) b = Transpose<perm=[1, 0]>(x)", ""),
        ("c = Cast<to=10>(x) b = Cast<to=1>(c) a = Identity(x)", ""),
        ("a = Identity(x) b = Reshape(x, s)", "int64[2] s = {2, 4}"),
        ("a = Reshape(x, s) b = Reshape(x, t)", "int64[2] s = {4, 2}, int64[2] t = {4, 2}"),
        ("a = Identity(x) b = Mul(x, one)", "float one = {1}"),
        ("a = Identity(x) b = Mul(one, x)", "float one = {1}"),
        ("c = Add(x, z) d = Add(x, z) a = Tanh(c) b = Tanh(d)", ""),
        ("a = Concat<axis=0>(x) b = Split<axis=0, num_outputs=1>(x)", ""),
    ],
)
def test_one_value(body: str, constants: str) -> None:
    assert _is_one(body, constants)


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("a = Identity(x) b = Identity(z)", ""),
        ("a = Relu(x) b = Tanh(x)", ""),
        ("a = Relu(x) b = Relu(z)", ""),
        ("a = Relu(x) b = Identity(x)", ""),
        ("a = Transpose<perm=[1, 0]>(x) b = Transpose<perm=[0, 1]>(x)", ""),
        ("a, b = Split<axis=1, num_outputs=2>(x)", ""),
        ("a = Add(x, z) b = Identity(x)", ""),
        ("a = Slice(x, zero, two, one) b = Slice(x, two, four, one)",
         "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}"),
        ("a = MatMul(x, v) b = MatMul(x, w)", "float[4,1] v = {1, 2, 3, 4}, float[4,1] w = {1, 2, 3, 5}"),
    ],
)  # fmt: skip
def test_two_values(body: str, constants: str) -> None:
    assert not _is_one(body, constants)


def test_long_chains_end() -> None:
    body = " ".join(f"p{i + 1} = Tanh(p{i}) q{i + 1} = Tanh(q{i})" for i in range(500))
    assert not _is_one(f"p0 = Tanh(x) q0 = Tanh(x) {body} a = Identity(p500) b = Identity(q500)")
