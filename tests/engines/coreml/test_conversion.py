"""The converter's frame: names, interface, determinism, and what is refused with which words."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from coreml_models import assert_same, model, packaged

from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.node import NotConstantError
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.registry import load_converters
from intaglio.engines.coreml.supported import LIST, listing
from intaglio.errors import CompileError, RuntimeMissingError
from intaglio.exporters.bundle import Dim

SMALL = """g (float[batch,3] x, float s, bool[2] b, int64[2] i)
    => (float[batch,3] y, float s2, bool[2] c, int64[2] j, float[2] k)
    <float[3] w = {1, 2, 3}, float[2] k = {4, 5}> {
        t = Add(x, w) y = Mul(t, s) s2 = Identity(s) c = Not(b) j = Add(i, i)
    }"""


def test_the_interface_keeps_onnx_names_and_says_what_was_changed() -> None:
    converted = packaged(model(SMALL), {"batch": 4})
    assert [(p.name, p.mil_name, p.mil_dtype, p.shape) for p in converted.inputs] == [
        ("x", "x", "fp32", (4, 3)),
        ("s", "s", "fp32", ()),
        ("b", "b", "int32", (2,)),
        ("i", "i", "int32", (2,)),
    ]
    assert [(p.name, p.mil_name, p.dtype.name) for p in converted.outputs] == [
        ("y", "y", "FLOAT"),
        ("s2", "s2", "FLOAT"),
        ("c", "c", "BOOL"),
        ("j", "j", "INT64"),
        ("k", "k", "FLOAT"),
    ]


def test_scalars_booleans_and_weights_as_outputs() -> None:
    rng = np.random.default_rng(1)
    feeds = [
        {
            "x": rng.standard_normal((batch, 3)).astype(np.float32),
            "s": np.array(-2.5, np.float32),
            "b": np.array([True, False]),
            "i": np.array([5, -7]),
        }
        for batch in (1, 4)
    ]
    assert_same(model(SMALL), *feeds, dims={"batch": Dim(min=1, max=4)})


def test_names_that_mil_does_not_allow() -> None:
    proto = model("g (float[2] a) => (float[2] b) { c = Neg(a) b = Relu(c) }")
    renamed = {"a": "0/x:0", "b": "0/y.1", "c": "0 x 0"}
    for value in [*proto.graph.input, *proto.graph.output]:
        value.name = renamed[value.name]
    for node in proto.graph.node:
        node.input[:], node.output[:] = [renamed[n] for n in node.input], [renamed[n] for n in node.output]
    converted = packaged(proto)
    for port in (*converted.inputs, *converted.outputs):
        assert re.fullmatch(r"[A-Za-z_]\w*", port.mil_name, re.ASCII)
    assert [p.name for p in converted.inputs] == ["0/x:0"]


@pytest.mark.parametrize("dims", [{"batch": 4}, {"batch": Dim(min=1, max=9)}], ids=["static", "varying"])
def test_two_conversions_are_the_same_to_the_byte(tmp_path: Path, dims: dict) -> None:
    digests = []
    for name in ("one", "two"):
        path = tmp_path / name / "model.mlpackage"
        path.parent.mkdir()
        write_package(packaged(model(SMALL), dims), path)
        files = sorted(f for f in path.rglob("*") if f.is_file())
        digests.append({str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files})
    assert digests[0] == digests[1]
    assert "Manifest.json" in digests[0]


def test_nothing_of_the_day_is_written(tmp_path: Path) -> None:
    write_package(packaged(model(SMALL), {"batch": 1}), tmp_path / "model.mlpackage")
    written = (tmp_path / "model.mlpackage/Data/com.apple.CoreML/model.mlmodel").read_bytes()
    assert b"conversion_date" not in written


def test_a_package_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.mlpackage"
    for _ in range(2):
        write_package(packaged(model(SMALL), {"batch": 1}), path)
    assert [f.name for f in tmp_path.iterdir()] == ["model.mlpackage"]


def test_functions_are_inlined() -> None:
    proto = model("g (float[3] x) => (float[3] y) { y = Relu(x) }")
    function = onnx.parser.parse_function(
        '<domain: "own", opset_import: ["" : 17]> Twice (a) => (c) { b = Add(a, a) c = Neg(b) }'
    )
    proto.functions.append(function)
    proto.opset_import.append(onnx.OperatorSetIdProto(domain="own", version=1))
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "Twice", "own"
    assert_same(proto, {"x": np.array([1, -2, 3], np.float32)})


def test_the_list_of_ops_is_that_of_the_converters() -> None:
    assert LIST.read_text() == listing(), "write it anew: python -m intaglio.engines.coreml.supported"


REFUSED = {
    "unknown op": ("g (float[3] x) => (float[3] y) { y = Det(x) }", r"\(Det, opset 17\).*supported_ops.txt.*cpu"),
    "rank of an input": ("g (float[1,1,1,1,1,1] x) => (float[1] y) { y = Relu(x) }", r"'x' has 6 dims.*end at 5"),
    "rank inside": (
        "g (float[2,2,2,2,2] x) => (float[1,2,2,2,2,2] t) <int64[1] a = {0}> { t = Unsqueeze(x, a) }",
        r"'t' has 6 dims",
    ),
    "empty": ("g (float[0,3] x) => (float[0,3] y) { y = Relu(x) }", r"no empty tensors"),
    "emptied": (
        "g (float[3] x) => (float[n] y) <int64[1] a = {2}, int64[1] b = {1}> { y = Slice(x, a, b) }",
        r"'y' has the shape \[0\].*no empty tensors",
    ),
    "text": ("g (string[3] x) => (string[3] y) { y = Identity(x) }", r"'x' is string"),
    "integer too large": (
        "g (int64[1] x) => (int64[1] y) <int64[1] w = {3000000000}> { y = Add(x, w) }",
        r"'w' holds the int64 3000000000.*int32",
    ),
    "float too large": (
        "g (double[1] x) => (double[1] y) <double[1] w = {1e200}> { y = Add(x, w) }",
        r"'w' holds the float64 1e\+200.*float32",
    ),
    "float too small": (
        "g (double[1] x) => (double[1] y) <double[1] w = {1e-200}> { y = Div(x, w) }",
        r"'w' holds the float64 1e-200.*it is 0",
    ),
    "float of 8 bits": ("g (float8e4m3fn[3] x) => (float[3] y) { y = Cast<to=1>(x) }", r"'x' is float8e4m3fn"),
    "sequence": ("g (seq(float[2]) x) => (seq(float[2]) y) { y = Identity(x) }", r"'x' is no tensor"),
    "what nothing makes": ("g (float[2] x) => (float[2] y) { y = Add(x, z) }", r"\(Add, opset 17\) reads 'z'"),
    "order of nodes": ("g (float[2] x) => (float[2] y) { y = Relu(z) z = Neg(x) }", r"\(Relu, opset 17\) reads 'z'"),
    "constant too large": (
        "g (float[1] x) => (float[n] y) <int64[2] s = {100000, 100000}> { z = ConstantOfShape(s) y = Add(z, x) }",
        r"\(ConstantOfShape, opset 17\) makes a constant of the shape \[100000, 100000\]",
    ),
    "range too large": (
        "g (int64[1] x) => (int64[n] y) <int64 a = {0}, int64 b = {100000000000}, int64 c = {1}> "
        "{ r = Range(a, b, c) y = Add(r, x) }",
        r"\(Range, opset 17\) makes a constant of the shape \[100000000000\]",
    ),
    "size of more than 31 bits": (
        "g (float[1] x) => (float[n] y) <int64[2] p = {0, 100000000000}> { y = Pad(x, p) }",
        r"'y' the shape.*31 bits",
    ),
    "shapes that do not fit": (
        "g (float[2,3] x, float[4,3] z) => (float[n,m] y) { y = Add(x, z) }",
        r"\(Add, opset 17\) cannot be built with the inputs x float\[2, 3\], z float\[4, 3\]",
    ),
    "not constant": (
        "g (float[2,3] x, int64[1] a) => (float[m,n] y) { y = ReduceSum(x, a) }",
        r"needs the value of 'a'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_core_ml_cannot_hold_is_refused(name: str) -> None:
    text, words = REFUSED[name]
    with pytest.raises(CompileError, match=words):
        packaged(model(text))


def test_opsets_that_are_not_known_and_ops_that_meant_something_else_are_refused() -> None:
    text = "g (float[2] x) => (float[2] y) { y = Add(x, x) }"
    with pytest.raises(CompileError, match=r"model.onnx: is of opset 99; expected 7 to "):
        packaged(model(text, 99))
    with pytest.raises(CompileError, match=r"is of opset 6, in which Add \('y'\) is another op.*version_converter"):
        packaged(model(text, 6))
    packaged(model("g (bool[2] x) => (bool[2] y) { y = Not(x) }", 1))


def test_a_failing_shape_inference_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CompileError, match=r"\(Relu, opset 17\) lacks its input 0"):
        packaged(model("g (float[2] x) => (float[2] y) { y = Relu() }"))
    assert not caplog.records


def test_what_is_computed_in_another_way_is_noted() -> None:
    text = "g (double[3,4] x) => (int64[2,n] y) { z = Abs(x) y = NonZero(z) }"
    assert packaged(model(text)).notes == (
        "float64 is computed in float32",
        "how much NonZero gives ('y') depends on the data",
    )
    known = "g (float[3] x) => (float[3] y) <float[2] k = {0, 1}> { i = NonZero(k) f = Cast<to=1>(i) y = Add(x, f) }"
    assert packaged(model(known)).notes == ()
    assert packaged(model(SMALL), {"batch": 1}).notes == ()


def test_a_dim_of_minus_one_varies() -> None:
    proto = model("g (float[b,3] x) => (float[b,3] y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert packaged(proto, {"x_dim0": 4}).inputs[0].shape == (4, 3)


def test_subgraphs_that_are_nested_too_deeply(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a0 = Relu(x)"
    for i in range(20):
        taken, other = f"t{i} () => (float[2] a{i}) {{ {text} }}", f"o{i} () => (float[2] b{i}) {{ b{i} = Neg(x) }}"
        text = f"a{i + 1} = If (c) <then_branch = {taken}, else_branch = {other}>"
    proto = model(f"g (float[2] x, bool c) => (float[2] a20) {{ {text} }}")
    read = ir.from_proto(proto)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 60)
        with pytest.raises(CompileError, match="nested too deeply"):
            convert(read, "model.onnx")
    finally:
        sys.setrecursionlimit(limit)


def test_an_unknown_op_is_named_with_the_others_and_where_it_comes_from() -> None:
    proto = model("g (float[3,3] x) => (float y) { t = Det(x) y = Bernoulli(t) }")
    proto.graph.node[0].name = "layer/det"
    proto.graph.node[0].metadata_props.add(key="namespace", value="encoder.block.3")
    with pytest.raises(CompileError, match=r"'layer/det' \(Det, opset 17, from encoder.block.3\).*Bernoulli, Det"):
        packaged(proto)


def test_an_input_that_must_be_known_can_be_bound() -> None:
    proto = model(REFUSED["not constant"][0])
    with pytest.raises(NotConstantError) as caught:
        packaged(proto)
    assert caught.value.value == "a"
    converted = convert(ir.from_proto(proto), "m", constants={"a": np.array([1])})
    assert [p.name for p in converted.inputs] == ["x"]
    assert converted.outputs[0].shape == (2, 1)


def test_external_data_that_is_missing(tmp_path: Path) -> None:
    proto = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="gone.data")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(CompileError, match=r"'w' cannot be read.*gone.data"):
        convert(ir.load(tmp_path / "m.onnx"), "m.onnx")


def test_a_dim_without_a_greatest_size_is_refused_when_the_package_is_written(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"'batch' of the input 'x'.*--shapes batch="):
        write_package(packaged(model(SMALL)), tmp_path / "model.mlpackage")


def test_without_coremltools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(RuntimeMissingError, match=r"\.\[coreml\]"):
        load_converters()
