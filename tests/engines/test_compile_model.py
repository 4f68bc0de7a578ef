"""ONNX files that others wrote: odd dims, what is refused, the engine's folder and its identity."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_models import OUT, product, unary, weight

import intaglio
from intaglio.engines import cache, child, cpu, model_build
from intaglio.engines.model_build import TRIAL_SIZES
from intaglio.engines.model_engine import NO_MAXIMUM, is_model_engine, read_model_engine, read_model_report
from intaglio.engines.onnx_file import read_onnx
from intaglio.errors import CompileError, EngineError, InputError, OutputError
from intaglio.exporters.bundle import Dim


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without the child process, which takes a second to start and has tests of its own."""

    def run(module: str, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        assert module == "model_build"
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = model_build.main()
        return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())

    monkeypatch.setattr(cpu, "run_child", run)


in_this_process = pytest.mark.usefixtures("in_process")


def compiled(path: Path, **options: Any) -> Any:
    (stage,) = intaglio.compile(path, **options).stages.values()
    return stage


def test_compile_and_run(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    stage = compiled(path)
    assert (stage.dtype, stage.weight_bytes, stage.weight_count, stage.bits_per_weight) == ("float32", 48, 12, 32.0)
    assert (stage.operators, stage.trial_sizes, stage.notes) == ({"MatMul": 1}, {"batch": 1}, ())
    assert stage.peak_rss_bytes > 20 << 20
    folder = tmp_path / "net.engines" / "cpu"
    assert read_model_report(folder).stages["net"] == stage
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    for where in (path, str(path), folder, folder.parent):
        model = intaglio.load(where)
        np.testing.assert_allclose(model.run({"x": x})["y"], x @ weight(), rtol=1e-5)
    assert (model.inputs[0].name, model.inputs[0].dtype, model.inputs[0].shape) == ("x", "float32", ("batch", 4))
    assert [output.name for output in model.outputs] == ["y"]
    assert model.run({"x": x}, ["y"]).keys() == {"y"}
    with pytest.raises(InputError, match="net: has no output 'z'; there are y"):
        model.run({"x": x}, ["y", "z"])
    for feeds, message in [
        ({"a": x}, r"inputs are missing: \['x'\]; or unknown: \['a'\]"),
        ({"x": x.astype(np.float64)}, "x is float64, expected float32"),
        ({"x": x[:, :3]}, r"x has the shape \[5, 3\], expected \['batch', 4\]"),
        ({"x": x[:0]}, "batch is 0, expected 1 to"),
    ]:
        with pytest.raises(InputError, match=message):
            model.run(feeds)


@in_this_process
@pytest.mark.parametrize(
    ("shape", "dims", "shown"),
    [
        ((-1, 4), ["x_dim0"], ("x_dim0", 4)),
        ((None, 4), ["x_dim0"], ("x_dim0", 4)),
        (("", 4), ["x_dim0"], ("x_dim0", 4)),
        (("?", "?"), ["x_dim0", "x_dim1"], ("x_dim0", "x_dim1")),
        (("None", 4), ["x_dim0"], ("x_dim0", 4)),
        (("a.b/c 0", 4), ["a.b/c 0"], ("a.b/c 0", 4)),
        (("2*s, 1", 4), ["x_dim0"], ("x_dim0", 4)),
        (("x_dim1", None), ["x_dim1", "x_dim1_"], ("x_dim1", "x_dim1_")),
        ((2, 4), [], (2, 4)),
        (None, [], None),
    ],
)
def test_dims(shape: Any, dims: list[str], shown: Any, tmp_path: Path) -> None:
    """Each file as onnxruntime takes it, with names for dims that have none."""
    path = product(tmp_path / "net.onnx", shape)
    stage = compiled(path)
    assert stage.operators == {"MatMul": 1}, stage.notes
    model = intaglio.load(path)
    assert model.inputs[0].shape == shown
    assert model.dims == {name: Dim(min=1, max=NO_MAXIMUM) for name in dims}
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    np.testing.assert_array_equal(model.run({"x": x})["y"], onnxruntime.InferenceSession(path).run(None, {"x": x})[0])


@in_this_process
def test_a_name_stands_for_one_size(tmp_path: Path) -> None:
    path = unary(tmp_path / "sum.onnx", "Sum", [("n", "?"), ("n", "?"), ("n", 1)])
    compiled(path)
    model = intaglio.load(path)
    assert list(model.dims) == ["n", "x0_dim1", "x1_dim1"]
    ones = np.ones
    found = model.run({"x0": ones((2, 3), np.float32), "x1": ones((2, 1), np.float32), "x2": ones((2, 1), np.float32)})
    assert found["y"].tolist() == [[3, 3, 3]] * 2
    with pytest.raises(InputError, match=r"x1 has the shape \[1, 3\].* with {'n': 2"):
        model.run({"x0": ones((2, 3), np.float32), "x1": ones((1, 3), np.float32), "x2": ones((2, 1), np.float32)})


@in_this_process
def test_initializers_among_the_inputs_are_no_inputs(tmp_path: Path) -> None:
    def old(message: onnx.ModelProto) -> None:
        value = message.graph.input.add()
        value.name, value.type.tensor_type.elem_type = "w", onnx.TensorProto.FLOAT
        for size in (4, OUT):
            value.type.tensor_type.shape.dim.add().dim_value = size

    path = product(tmp_path / "net.onnx", edit=old)
    compiled(path)
    assert [tensor.name for tensor in intaglio.load(path).inputs] == ["x"]


@in_this_process
def test_shapes_bound_what_runs_and_what_is_tried(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx", ("p.0", "p.1"), rows=5)
    # At p.1 = 1 the product does not fit; 5 is no size that is tried unasked.
    stage = compiled(path)
    assert (stage.operators, stage.trial_sizes) == ({}, {})
    assert len(stage.notes) == 1
    assert stage.notes[0].startswith("the trial run was not possible: p.0=1, p.1=1: ")
    assert "with --shapes" in stage.notes[0]
    assert 5 not in TRIAL_SIZES
    stage = compiled(path, shapes="p.0=2:3:8, p.1=5")
    assert (stage.trial_sizes, stage.notes) == ({"p.0": 2, "p.1": 5}, ())
    assert stage.operators == {"MatMul": 1}
    model = intaglio.load(path)
    model.run({"x": np.ones((8, 5), np.float32)})
    for size in (1, 9):
        with pytest.raises(InputError, match=f"p.0 is {size}, expected 2 to 8"):
            model.run({"x": np.ones((size, 5), np.float32)})
    with pytest.raises(InputError, match=r"the dim 'height' is unknown; there are p\.0, p\.1"):
        compiled(path, shapes="height=3")


@in_this_process
def test_sizes_are_tried_until_one_fits(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx", ("batch", "height", 4))
    convolution = unary(tmp_path / "pool.onnx", "GlobalMaxPool", [("n", 3, "h")])
    assert compiled(path).trial_sizes == {"batch": 1, "height": 1}
    assert compiled(convolution).trial_sizes == {"n": 1, "h": 1}

    # A reshape that needs 64 elements a row.
    def reshape(message: onnx.ModelProto) -> None:
        shape = message.graph.initializer[0]
        shape.CopyFrom(onnx.numpy_helper.from_array(np.array([-1, 16, 4], np.int64), "w"))
        message.graph.node[0].op_type = "Reshape"
        message.graph.output[0].type.tensor_type.shape.dim.add()

    stage = compiled(product(tmp_path / "reshape.onnx", ("batch", "length"), edit=reshape))
    assert (stage.trial_sizes, stage.operators) == ({"batch": 1, "length": 64}, {"Reshape": 1})


@in_this_process
def test_outputs_that_are_not_finite_on_zeros_are_a_note(tmp_path: Path) -> None:
    stage = compiled(unary(tmp_path / "log.onnx", "Log", [("n",)]))
    assert stage.notes == ("fed with zeros, the outputs y are not finite",)
    assert stage.operators == {"Log": 1}


def test_a_crash_of_the_trial_run_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = product(tmp_path / "net.onnx")
    said = {"loaded": True}, {"trying": {"batch": 1}}
    _instead(monkeypatch, "".join(f"print({json.dumps(json.dumps(line))}, flush=True);" for line in said) + "kill()")
    (note,) = compiled(path).notes
    assert note == "the trial run was not possible: onnxruntime was ended by signal 8 at {'batch': 1}"


def test_a_crash_of_the_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = product(tmp_path / "net.onnx")
    _instead(monkeypatch, "kill()")
    with pytest.raises(CompileError, match=r"net\.onnx: onnxruntime was ended by signal 8 while building"):
        compiled(path)
    assert not list(tmp_path.glob("net.engines/*"))


def _instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    real = subprocess.run
    program = f"import os; kill = lambda: os.kill(os.getpid(), 8); {program}"
    monkeypatch.setattr(child.subprocess, "run", lambda _command, **kw: real([sys.executable, "-c", program], **kw))


def _custom_opset(message: onnx.ModelProto) -> None:
    message.opset_import[0].version = 99


def _new_ir(message: onnx.ModelProto) -> None:
    message.ir_version = 99


def _unknown_input(message: onnx.ModelProto) -> None:
    message.graph.node[0].input[0] = "nowhere"


def _sequence(message: onnx.ModelProto) -> None:
    message.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1


def _data_type(message: onnx.ModelProto) -> None:
    message.graph.initializer[0].data_type = 77


def _untyped(message: onnx.ModelProto) -> None:
    message.graph.input[0].type.Clear()


def _negative(message: onnx.ModelProto) -> None:
    message.graph.initializer[0].dims[0] = -4


def _wrong_op(message: onnx.ModelProto) -> None:
    message.graph.node[0].op_type = "Matmul"


def _of_type(dtype: ir.DataType) -> Callable[[onnx.ModelProto], None]:
    def edit(message: onnx.ModelProto) -> None:
        message.graph.input[0].type.tensor_type.elem_type = dtype

    return edit


@in_this_process
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_custom_opset, r"asks for opset 99; onnx .* knows up to \d\d\. Update"),
        (_new_ir, r"has the IR version 99; onnx .* knows up to"),
        (_unknown_input, "^net.onnx fails onnx.checker: .*nowhere"),
        (_wrong_op, "fails onnx.checker: .*Matmul"),
        (_sequence, "the input 'x' is a sequence; only tensors"),
        (_untyped, "the input 'x' is a untyped value; only tensors"),
        (_data_type, "'w' has the data type 77, which is unknown"),
        (_negative, r"the tensor 'w' has the shape \[-4, 3\]"),
        (_of_type(ir.DataType.STRING), "the input 'x' is string, which an engine for cpu does not take"),
        (_of_type(ir.DataType.BFLOAT16), "the input 'x' is bfloat16, which an engine for cpu does not take"),
        (_of_type(ir.DataType.INT4), "the input 'x' is int4, which an engine for cpu does not take"),
        (_of_type(ir.DataType.INT64), "^net.onnx: onnxruntime cannot load it: .*tensor.int64. and tensor.float"),
    ],
)
def test_models_that_are_refused(edit: Any, message: str, tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx", edit=edit)
    with pytest.raises(CompileError, match=message) as caught:
        intaglio.compile(path)
    assert "net.onnx" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("net.engines/*"))


@in_this_process
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xff no protobuf", "is no ONNX file, or is damaged or cut short"),
        (b"GGUF\3\0\0\0", "is no ONNX file, or is damaged or cut short"),
        (b"", "is empty; expected an ONNX file"),
        (None, "cannot be read .No such file or directory.; expected an ONNX file"),
    ],
)
def test_files_that_are_no_models(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CompileError, match=message):
        intaglio.compile(path)


@pytest.mark.parametrize("place", ["input", "op_type", "dim"])
def test_texts_that_are_no_utf8(place: str, tmp_path: Path) -> None:
    message = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[dim_QQ] input_QQ) => (float[n] y) '
        "{ y = op_type_QQ(input_QQ) }"
    ).SerializeToString()
    path = tmp_path / "net.onnx"
    path.write_bytes(message.replace(f"{place}_QQ".encode(), f"{place}_".encode() + b"\xff\xfe"))
    with pytest.raises(CompileError, match=rf"net.onnx: holds the text b'{place}_.xff.xfe', which is no UTF-8"):
        read_onnx(path)


@in_this_process
def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    whole = path.read_bytes()
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CompileError, match=r"net\.onnx"):
            intaglio.compile(path)


@in_this_process
def test_a_file_past_the_limit_of_protobuf_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with path.open("wb") as file:
        file.truncate(2**31 + 5)
    with pytest.raises(CompileError, match=r"has 2\.0 GiB, and a protobuf file ends at 2 GiB.*external data"):
        intaglio.compile(path)


@in_this_process
def test_domains(tmp_path: Path) -> None:
    path = unary(tmp_path / "net.onnx", "Frobnicate", [("n",)], domain="org.others")
    with pytest.raises(CompileError, match=r"domains that onnxruntime .* does not have .*org\.others: Frobnicate"):
        intaglio.compile(path)
    compiled(unary(path, "Frobnicate", [("n",)], domain="org.others", function=True))
    assert intaglio.load(path).run({"x0": np.ones(3, np.float32)})["y"].tolist() == [1, 1, 1]
    compiled(unary(path, "QuickGelu", [("n",)], domain="com.microsoft"))
    with pytest.raises(CompileError, match="Frobnicate"):
        intaglio.compile(unary(path, "Frobnicate", [("n",)], domain="com.microsoft"))


@in_this_process
@pytest.mark.parametrize("external", ["w.bin", "parts/w.bin", "engine.json"])
def test_external_data_becomes_part_of_the_engine(external: str, tmp_path: Path) -> None:
    path = product(tmp_path / "a" / "net.onnx", external=external) if (tmp_path / "a").mkdir() is None else None
    assert path is not None
    stage = compiled(path)
    assert (stage.weight_bytes, stage.operators) == (48, {"MatMul": 1})
    inside = tmp_path / "a" / "net.engines" / "cpu" / "model" / external
    assert inside.stat().st_ino == (path.parent / external).stat().st_ino, "the weights are there twice"
    shutil.move(tmp_path / "a" / "net.engines", tmp_path / "moved")
    shutil.rmtree(tmp_path / "a")
    x = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(intaglio.load(tmp_path / "moved").run({"x": x})["y"], x @ weight(), rtol=1e-6)


@in_this_process
def test_external_data_that_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = product(tmp_path / "net.onnx", external="w.bin")
    monkeypatch.setattr(os, "access", lambda *_: False)
    compiled(path)
    assert (tmp_path / "w.bin").stat().st_nlink == 1
    intaglio.load(path).run({"x": np.ones((1, 4), np.float32)})


@in_this_process
def test_a_download_cache_of_links(tmp_path: Path) -> None:
    """Graph and data as links into one folder of blobs, as download caches keep them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    product(tmp_path / "blobs" / "b0", external="w.bin")
    (tmp_path / "blobs" / "w.bin").rename(tmp_path / "blobs" / "b1")
    for name, blob in (("net.onnx", "b0"), ("w.bin", "b1")):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{blob}")
    path = tmp_path / "snapshot" / "net.onnx"
    compiled(path)
    intaglio.load(path).run({"x": np.ones((1, 4), np.float32)})


def _set_external(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def edit(message: onnx.ModelProto) -> None:
        for entry in message.graph.initializer[0].external_data:
            if entry.key == key:
                entry.value = value

    return edit


@in_this_process
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *(
            (_set_external("location", where), "which is no path inside the model's folder")
            for where in ("../w.bin", "/etc/passwd", "a/../../w.bin", "", "..\\w.bin", "C:w.bin")
        ),
        (_set_external("location", "other.bin"), r"other\.bin: external data is missing"),
        (_set_external("location", "*/_ORT_MEM_ADDR_/*"), "external data is missing"),
        (_set_external("location", "net.onnx"), "names itself as its external data"),
        (_set_external("offset", "8"), r"w\.bin: has 48 bytes, but the tensors in net\.onnx need 56"),
        (_set_external("offset", "-8"), "takes 48 bytes, but its external data has offset -8, length 48"),
        (_set_external("length", "40"), "takes 48 bytes, but its external data has offset 0, length 40"),
        (_set_external("length", "many"), "has no number as offset or length"),
    ],
)
def test_external_data_that_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 64)
    (tmp_path / "a").mkdir()
    path = product(tmp_path / "a" / "net.onnx", external="w.bin", edit=edit)
    with pytest.raises(CompileError, match=message):
        intaglio.compile(path)
    assert not list(path.parent.glob("net.engines/*"))


@in_this_process
def test_external_data_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = product(tmp_path / "a" / "net.onnx", external="w.bin")
    (tmp_path / "a" / "w.bin").rename(tmp_path / "secret")
    (tmp_path / "a" / "w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(CompileError, match=r"links to .*secret, outside the model's folder"):
        intaglio.compile(path)


@in_this_process
def test_the_second_compile_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = product(tmp_path / "net.onnx", external="w.bin")
    first = compiled(path)

    def fail(*_: Any) -> None:
        raise AssertionError("was built again")

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "build_model", fail)
        assert compiled(path) == first.model_copy(update={"from_cache": True})
        for change in ({"shapes": "batch=2"}, {}):
            if not change:
                (tmp_path / "w.bin").write_bytes(b"\1" * 48)
            with pytest.raises(AssertionError, match="was built again"):
                compiled(path, **change)
    for entry in (cache.cache_folder() / "engines").iterdir():
        (entry / "report.json").write_text("{}")
    assert not compiled(path).from_cache


def test_a_failed_compile_leaves_the_old_engine(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    compiled(path)
    folder = tmp_path / "net.engines" / "cpu"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    product(path, edit=_wrong_op)
    with pytest.raises(CompileError):
        intaglio.compile(path)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert [file.name for file in folder.parent.iterdir()] == ["cpu"]


@in_this_process
def test_where_the_engine_goes(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    compiled(path, output=tmp_path / "out")
    assert is_model_engine(tmp_path / "out" / "cpu")
    assert not (tmp_path / "net.engines").exists()
    compiled(path, output=tmp_path / "out", shapes="batch=2")
    with pytest.raises(EngineError, match=rf"no engine there; build it with `intaglio compile {path} --target cpu`"):
        intaglio.load(path)
    # What else is there stays.
    other = product(tmp_path / "other.onnx")
    with pytest.raises(CompileError, match="holds the engine of another model; choose another folder"):
        intaglio.compile(other, output=tmp_path / "out")
    (tmp_path / "mine" / "cpu").mkdir(parents=True)
    compiled(other, output=tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine" / "cpu")
    (tmp_path / "mine" / "cpu").mkdir()
    (tmp_path / "mine" / "cpu" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for output, error in (("mine", CompileError), ("file", (CompileError, OutputError))):
        with pytest.raises(error, match=r"is no engine of an ONNX file|cannot be written"):
            intaglio.compile(other, output=tmp_path / output)
    assert (tmp_path / "mine" / "cpu" / "thesis.txt").read_text() == "x"
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="an output folder is for ONNX files"):
        intaglio.compile(tmp_path / "folder", output=tmp_path / "out")


def _edit_json(file: Path, *path_and_value: Any) -> None:
    *path, last, value = path_and_value
    content = inner = json.loads(file.read_text())
    for key in path:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(content))


@in_this_process
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p, e: _edit_json(e / "engine.json", "identity", "compiler", "onnxruntime 1.0"), "compiler: onnxrunt"),
        (lambda p, e: _edit_json(e / "engine.json", "identity", "device", "Darwin arm64"), "device: Darwin arm64"),
        (lambda p, e: product(p, (None, 4)), r"net\.onnx: has changed since the engine was built"),
        (lambda p, e: (p.parent / "w.bin").write_bytes(b"\1" * 48), r"w\.bin: has changed since the engine"),
        (lambda p, e: (p.parent / "w.bin").unlink(), r"w\.bin: is missing"),
        (lambda p, e: (e / "model" / "net.onnx").write_bytes(b""), r"model/net\.onnx: has changed"),
        (lambda p, e: (e / "model" / "w.bin").unlink(), r"model/w\.bin: is missing"),
        (lambda p, e: (e / "engine.json").unlink(), "no engine there; build it"),
    ],
)
def test_an_engine_that_does_not_match_is_refused(change: Any, named: str, tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx", external="w.bin")
    intaglio.compile(path)
    change(path, tmp_path / "net.engines" / "cpu")
    with pytest.raises(EngineError, match=rf"{named}.*`intaglio compile {path} --target cpu`"):
        intaglio.load(path)


@in_this_process
def test_the_command_that_rebuilds_says_how_it_was_built(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    intaglio.compile(path, output=tmp_path / "out", shapes="batch=2")
    os.utime(path)  # touched, not changed
    intaglio.load(tmp_path / "out")
    product(path, (None, 4))
    command = f'`intaglio compile {path} --target cpu --shapes "batch=2" -o {tmp_path / "out"}`'
    with pytest.raises(EngineError, match=command):
        intaglio.load(tmp_path / "out")
    path.unlink()
    intaglio.load(tmp_path / "out").run({"x": np.ones((2, 4), np.float32)})
    (tmp_path / "out" / "cpu" / "engine.json").write_text("{}")
    with pytest.raises(EngineError, match="is damaged or of another version"):
        intaglio.load(tmp_path / "out" / "cpu")
    with pytest.raises(EngineError, match=r"nowhere\.onnx: no such file"):
        intaglio.load(tmp_path / "nowhere.onnx")
    with pytest.raises(InputError, match="the target 'abacus' is unknown"):
        intaglio.load(path, target="abacus")


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    described = read_onnx(product(tmp_path / "net.onnx", constant=True))
    assert (described.producer, described.ir_version, described.opsets) == ("others", 10, {"ai.onnx": 20})
    assert described.sizes_by_dtype() == {("float32", "constant node"): [48]}
    assert described.operators == {"Constant": 1, "MatMul": 1}
    described = read_onnx(product(tmp_path / "net.onnx", external="w.bin"))
    (tmp_path / "w.bin").unlink()
    assert described.external_files == {"w.bin": 48}
    assert described.sizes_by_dtype() == {("float32", "initializer, external"): [48]}
    described = read_onnx(unary(tmp_path / "f.onnx", "Frobnicate", [("n",)], domain="org.others"))
    assert described.custom_domains == {"org.others": ["Frobnicate"]}


@in_this_process
def test_loading_imports_no_graph_library(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    compiled(path)
    program = (
        "import sys, numpy, intaglio\n"
        "intaglio.load(sys.argv[1]).run({'x': numpy.ones((1, 4), 'float32')})\n"
        "assert not {'onnx', 'onnx_ir', 'onnxscript', 'torch'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_killed_compile_leaves_the_old_engine(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    compiled(path)
    before = read_model_engine(tmp_path / "net.engines" / "cpu")
    program = (
        "import os, signal, sys, intaglio\n"
        "kill = lambda event: os.kill(os.getpid(), signal.SIGKILL) if event.done == 1 else None\n"
        "intaglio.compile(sys.argv[1], shapes='batch=1:1:2', progress=kill)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    assert read_model_engine(tmp_path / "net.engines" / "cpu") == before
    intaglio.load(path)
    compiled(path)
    assert [file.name for file in (tmp_path / "net.engines").iterdir()] == ["cpu"]
