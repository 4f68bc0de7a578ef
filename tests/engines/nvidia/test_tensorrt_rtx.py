"""The target ``tensorrt-rtx``: engines built without a GPU, what is said of them, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_checkpoint
from coreml_models import model
from coreml_stages import export_demo, export_klein
from measure import intaglio as command_line
from tensorrt_rtx_builds import require_tensorrt_rtx

import intaglio
from intaglio.engines import child, tensorrt_rtx
from intaglio.engines.engine import open_engine, read_report
from intaglio.engines.identity import Identity, compile_command
from intaglio.engines.nvidia.building import lowered_inputs, lowered_model
from intaglio.engines.nvidia.cache_buffers import buffer, buffered_feeds, context_of
from intaglio.engines.nvidia.limits import BuildSize
from intaglio.engines.nvidia.options import RtxOptions, read_rtx_options
from intaglio.engines.nvidia.profiles import Range, profile, profiles_of
from intaglio.engines.shapes import check_feeds
from intaglio.errors import CancelledError, CompileError, EngineError, InputError, RuntimeMissingError
from intaglio.exporters.bundle import Dim, StageInfo, TensorInfo, read_bundle
from intaglio.progress import ProgressEvent

require_tensorrt_rtx()

SM = "86,89,120"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle", taps=True)
    return folder / "bundle"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def test_a_language_model_builds_for_three_generations_at_once(bundle: Path) -> None:
    report = intaglio.compile(bundle, "tensorrt-rtx", sm=SM, dtype="float16")
    assert report.compiler.startswith("TensorRT for RTX 1.")
    for stage in report.stages.values():
        assert stage.dtype == "float16, float32"
        assert (stage.attention_fused, stage.attention_total) == (0, 2)
        assert "2 of Attention as MatMul and Softmax: heads of 8 have no fused kernel" in stage.notes
        assert stage.package_bytes > stage.weight_bytes > 0
    assert read_report(bundle, "tensorrt-rtx") == report
    open_engine(bundle, "tensorrt-rtx")
    again = intaglio.compile(bundle, "tensorrt-rtx", sm="120,86,89", dtype="float16")
    assert all(stage.from_cache for stage in again.stages.values())
    portable = intaglio.compile(bundle, "tensorrt-rtx", dtype="float16")
    assert not any(stage.from_cache for stage in portable.stages.values())


@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-5), ("float16", 5e-3)])
def test_the_graph_that_tensorrt_is_given_is_the_graph_of_the_bundle(
    bundle: Path, dtype: str | None, bound: float
) -> None:
    intaglio.compile(bundle, "tensorrt-rtx", dtype=dtype)
    compared = intaglio.parity(bundle, "tensorrt-rtx", bound=bound)
    assert compared.first_divergent is None
    assert {d.name for d in compared.differences} >= {"logits", "model.norm"}


@pytest.mark.parametrize("export", [export_klein, export_demo])
def test_pictures(export: Callable[..., Path], tmp_path: Path) -> None:
    stages = ["text_encoder", "transformer", "vae_decoder", "vae_encoder"]
    bundle = export(tmp_path, stages=stages)
    exact = intaglio.compile(bundle, "tensorrt-rtx", sm=SM)
    assert exact.stages["transformer"].attention_fused == 0
    compared = intaglio.parity(bundle, "tensorrt-rtx", batch=1, bound=1e-5)
    assert compared.first_divergent is None
    assert set(compared.stages) == set(stages)
    report = intaglio.compile(bundle, "tensorrt-rtx", sm=SM, dtype="float16", shapes=["batch=1", "batch=2"])
    assert 4.1 < report.stages["transformer"].quantized_bits_per_weight < 4.4
    compared = intaglio.parity(bundle, "tensorrt-rtx", batch=1, bound=5e-3, min_cosine=0.9999)
    assert compared.first_divergent is None


def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    intaglio.export(smollm2_gguf, tmp_path / "bundle", stages=["generate"])
    report = intaglio.compile(tmp_path / "bundle", "tensorrt-rtx", sm=SM, dtype="float16")
    stage = report.stages["generate"]
    assert (stage.attention_fused, stage.attention_total) == (30, 30)
    # Blocks of 32 with a scale of float16 and what the group has added in float32; of the embedding's 8 bits, scales of
    # float16 for the head and of float32 for the look-up.
    linear, embedding = 106_168_320, 28_311_552
    assert stage.quantized_bits_per_weight == pytest.approx(
        (5.5 * linear + 9.5 * embedding) / (linear + embedding), 1e-3
    )
    told = [note for note in stage.notes if note.startswith("weights: ")]
    assert "28,311,552 as int8 at 9.5 bits (model.embed_tokens.weight); 106,168,320 as int4 at 5.5 bits;" in told[0]
    size = BuildSize(stage.weight_bytes, sum(stage.operators.values()))
    assert size.least_bytes <= stage.peak_rss_bytes <= size.peak_bytes
    assert any("only a machine with a GPU can tell" in note for note in report.notes)


def test_each_set_of_sizes_is_a_profile(bundle: Path) -> None:
    """What the session checks of sizes, and what the profiles hold, is the same."""
    report = intaglio.compile(bundle, "tensorrt-rtx", shapes=["batch=1:2:2,sequence=1", "batch=1,sequence=4:8:16"])
    assert report.stages["generate"].profiles == 2
    identity = open_engine(bundle, "tensorrt-rtx").info.identities["generate"]
    stage = read_bundle(bundle).stages["generate"]
    context = context_of(stage.inputs, identity.shapes)
    model, _ = lowered_model(bundle / stage.file, RtxOptions(), context)
    profiles = profiles_of(lowered_inputs(model, stage.inputs), identity.variants)
    assert profiles[1]["input_ids"] == Range((1, 4), (1, 8), (1, 16))
    assert profiles[0]["attention_mask"] == Range((1, context), (2, context), (2, context))
    assert profiles[0]["past_key_values.0.key"] == Range((1, 2, context, 8), (2, 2, context, 8), (2, 2, context, 8))
    assert profiles[0]["position"] == Range((1,), (1,), (1,))
    pasts = [tensor for tensor in stage.inputs if tensor.name.startswith("past_key_values.")]
    for batch, sequence, past in itertools.product((1, 2, 3), (1, 2, 4, 16, 17), (0, 5, context - 1, context)):
        whole = {name: np.zeros((batch, sequence), np.int64) for name in ("input_ids", "position_ids")}
        whole["attention_mask"] = np.zeros((batch, past + sequence), np.int64)
        whole |= {tensor.name: np.zeros((batch, 2, past, 8), np.float32) for tensor in pasts}
        for dims, ranges in zip(identity.variants, profiles, strict=True):
            assert _is_checked("generate", stage, dims, whole) == _is_in(ranges, whole, past, context), (
                batch,
                sequence,
            )


def _is_checked(name: str, stage: StageInfo, dims: Mapping[str, Dim], feeds: Mapping[str, np.ndarray]) -> bool:
    try:
        check_feeds(name, stage, dims, feeds)
    except InputError:
        return False
    return True


def _is_in(ranges: Mapping[str, Range], whole: Mapping[str, np.ndarray], past: int, context: int) -> bool:
    others = {name: feed for name, feed in whole.items() if not name.startswith("past_key_values.")}
    try:
        feeds = buffered_feeds("generate", others, past, context)
    except InputError:
        return False
    feeds |= {name: buffer(feed, context) for name, feed in whole.items() if name not in others}
    assert feeds.keys() == ranges.keys()
    return all(
        least <= size <= most
        for name, feed in feeds.items()
        for least, size, most in zip(ranges[name].min, feed.shape, ranges[name].max, strict=True)
    )


def test_a_cache_is_as_long_as_its_tokens_come_to(bundle: Path) -> None:
    report = intaglio.compile(bundle, "tensorrt-rtx", shapes="batch=1,past_sequence=0:0:12,sequence=1:1:4")
    assert report.stages["generate"].profiles == 1
    identity = open_engine(bundle, "tensorrt-rtx").info.identities["generate"]
    assert context_of(read_bundle(bundle).stages["generate"].inputs, identity.shapes) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sm": "90"}, "--sm is '90', expected numbers among 75, 80, 86, 89, 120, 121.*take the target tensorrt"),
        ({"sm": "8.6"}, "--sm is '8.6', expected numbers among"),
        ({"sm": "8_6"}, "--sm is '8_6', expected numbers among"),
        ({"sm": "86,,89"}, "--sm is '86,,89', expected numbers among"),
        ({"dtype": "float8"}, "--dtype is 'float8', expected float16"),
        ({"weights": "lut"}, "--weights: is no option of the target tensorrt-rtx"),
        ({"accuracy": "fast"}, "tensorrt-rtx has exact"),
    ],
)
def test_options_that_there_are_not(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.compile(bundle, "tensorrt-rtx", **options)
    assert not (bundle / "engines").exists()


def test_options_of_another_target(bundle: Path) -> None:
    for target in ("cpu", "coreml", "cuda"):
        with pytest.raises(InputError, match=f"--sm: is no option of the target {target}"):
            intaglio.compile(bundle, target, sm="86")
    with pytest.raises(InputError, match="--refit: is no option of the target tensorrt-rtx"):
        intaglio.compile(bundle, "tensorrt-rtx", refit=True)
    with pytest.raises(InputError, match="--provider: is no option of the target tensorrt-rtx"):
        intaglio.compile(bundle, "tensorrt-rtx", provider="cuda")


def test_a_type_that_a_generation_lacks(tmp_path: Path) -> None:
    bundle = export_demo(tmp_path, stages=["transformer"])
    lacks = r"transformer: holds int4, which compute capability 7.5 lacks; .*Leave 75 out"
    with pytest.raises(CompileError, match=lacks):
        intaglio.compile(bundle, "tensorrt-rtx", sm="75,86")
    assert not (bundle / "engines/tensorrt-rtx").exists()


def _of_few_bits(data_type: int, bits: int) -> onnx.ModelProto:
    """A product with weights of a data type that is not NumPy's."""
    weight = onnx.TensorProto(name="w", data_type=data_type, dims=[64, 64], raw_data=bytes(64 * 64 * bits // 8))
    scale = onnx.numpy_helper.from_array(np.float32(1), "s")
    proto = model("g (float[8,64] x) => (float[8,64] y) { d = DequantizeLinear(w, s) y = MatMul(x, d) }", opset=21)
    proto.graph.initializer.extend([weight, scale])
    return proto


def test_types_of_foreign_files_that_a_generation_lacks(tmp_path: Path) -> None:
    onnx.save(_of_few_bits(onnx.TensorProto.FLOAT8E4M3FN, 8), tmp_path / "eight.onnx")
    with pytest.raises(
        CompileError, match=r"eight: holds float8e4m3fn, .* capability 8.0, 8.6 lacks; it begins at 8.9"
    ):
        intaglio.compile(tmp_path / "eight.onnx", "tensorrt-rtx", sm="80,86,89")
    for sm in ("89,120", None):
        stage = intaglio.compile(tmp_path / "eight.onnx", "tensorrt-rtx", sm=sm).stages["eight"]
        assert "float8e4m3fn" in stage.dtype and stage.package_bytes > 0
        is_noted = any("the portable engine runs from compute capability 8.9 on" in note for note in stage.notes)
        assert is_noted == (sm is None)
    text = "g (float[8,64] x) => (float[8,64] y) { a = Cast<to=16>(x) b = Tanh(a) y = Cast<to=1>(b) }"
    onnx.save(model(text), tmp_path / "half.onnx")
    with pytest.raises(CompileError, match=r"half: holds bfloat16, which compute capability 7.5 lacks.*Leave 75 out"):
        intaglio.compile(tmp_path / "half.onnx", "tensorrt-rtx", sm="75,86")
    assert intaglio.compile(tmp_path / "half.onnx", "tensorrt-rtx", sm="80").stages["half"].package_bytes > 0


def _left_behind(bundle: Path) -> list[Path]:
    """Of a build that came to nothing."""
    cached = (bundle.parent / "cache" / "engines").glob("*")
    return [*cached, *bundle.rglob(".*"), *(bundle / "engines").glob("*")]


def test_a_build_says_what_it_needs_and_how_far_it_is(bundle: Path) -> None:
    events: list[ProgressEvent] = []
    report = intaglio.compile(bundle, "tensorrt-rtx", progress=events.append)
    told = [event.note for event in events if event.note]
    assert len(told) == len(report.stages)
    assert re.fullmatch(r"generate: building takes about 0\.[34] GiB of memory", told[0])
    for stage in report.stages:
        for task in (f"lower {stage}", f"build {stage}"):
            done = [event.done for event in events if event.task == task]
            assert done == sorted(done)
            assert (done[0], done[-1]) == (0, next(event.total for event in events if event.task == task))
    first = next(i for i, event in enumerate(events) if event.task == "build generate")
    assert events.index(next(event for event in events if event.note)) < first


@pytest.mark.parametrize("how", ["false", "error", "interrupt"])
def test_a_build_can_be_cancelled(bundle: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **how: Any) -> subprocess.Popen[str]:
        started.append(real(*arguments, **how))
        return started[-1]

    def cancel(event: ProgressEvent) -> bool:
        if event.task != "build generate":
            return True
        if how == "error":
            raise ZeroDivisionError
        if how == "interrupt":
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(child.subprocess, "Popen", start)
    expected = {"false": CancelledError, "error": ZeroDivisionError, "interrupt": KeyboardInterrupt}[how]
    with pytest.raises(expected):
        intaglio.compile(bundle, "tensorrt-rtx", progress=cancel)
    assert [each.poll() for each in started] == [-signal.SIGKILL]
    assert _left_behind(bundle) == []


@pytest.mark.parametrize("progress", [None, lambda event: True])
@pytest.mark.parametrize(
    ("number", "said"),
    [(11, "one; two; three. That is a mistake of the compiler's own"), (9, "one; two; three. Systems end in this way")],
)
def test_a_compiler_that_crashes_is_an_error(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, progress: Any
) -> None:
    crash = tmp_path / "crash"
    crash.write_text(f"#!/bin/sh\nprintf 'zero\\none\\ntwo\\nthree\\n' >&2\nkill -{number} $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(crash))
    with pytest.raises(CompileError, match=f"^generate: TensorRT was ended by signal {number} while building: {said}"):
        intaglio.compile(bundle, "tensorrt-rtx", progress=progress)
    assert _left_behind(bundle) == []


def test_bindings_without_their_libraries(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "tensorrt_rtx_libs.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    lacks = r"cannot be imported \(libtensorrt_rtx.*tensorrt-rtx-cu13-libs. Install intaglio"
    with pytest.raises(CompileError, match=lacks):
        intaglio.compile(bundle, "tensorrt-rtx")
    assert _left_behind(bundle) == []


def test_operators_that_there_are_not_are_told_by_their_nodes(tmp_path: Path) -> None:
    text = """g (float[8] x, uint8[8] a) => (float[8] y, uint8[8] d, uint8[8] e) {
        [odd] y = Bernoulli(x)
        [left] b = BitShift<direction="LEFT">(a, a)  [right] d = BitShift<direction="RIGHT">(b, a)
        [joined] e = BitwiseOr(b, a)
    }"""
    onnx.save(model(text, opset=18), tmp_path / "net.onnx")
    lacks = (
        "net: TensorRT cannot read the graph: it has no operator "
        r"Bernoulli \(node odd\); BitShift \(node left, right\); BitwiseOr \(node joined\). Compile for another target"
    )
    with pytest.raises(CompileError, match=lacks):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"net.onnx", "net.engines"}
    assert not any((tmp_path / "net.engines").iterdir())


def test_what_is_not_known_before_a_run(tmp_path: Path) -> None:
    for name, text, message in (
        ("shape", "g (float[8,64] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }", "values of the input 's'"),
        ("rank", "g (float x) => (float y) { y = Tanh(x) }", "the input 'x' is of unknown rank"),
    ):
        proto = model(text)
        if name == "rank":
            proto.graph.input[0].type.tensor_type.ClearField("shape")
        onnx.save(proto, tmp_path / f"{name}.onnx")
        with pytest.raises(CompileError, match=message):
            intaglio.compile(tmp_path / f"{name}.onnx", "tensorrt-rtx")


def test_an_onnx_file_of_others(tmp_path: Path) -> None:
    onnx.save(model("g (float[batch,3] x) => (float[batch,3] y) { y = Tanh(x) }"), tmp_path / "net.onnx")
    with pytest.raises(
        CompileError, match=r"'batch' of the input 'x' has no greatest size.*--shapes batch=MIN:OPT:MAX"
    ):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")
    with pytest.raises(CompileError, match=r"'batch' of the input 'x' is 3000000000.*counts to 2147483647"):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx", shapes="batch=1:2:3000000000")
    stage = intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx", shapes="batch=1:2:4").stages["net"]
    assert stage.operators == {"Tanh": 1}
    assert stage.package_bytes > 0


@pytest.mark.parametrize(
    "body",
    [
        "q = Transpose<perm=[0, 2, 1, 3]>(x) k = Transpose<perm=[0, 2, 1, 3]>(x) y = Attention(q, k, q)",
        "q = Relu(x) k = Relu(x) y = Attention(q, k, x)",
        "k = Mul(x, one) v = Tanh(x) y = Attention(x, k, v)",
        "c = Cast<to=1>(x) k = Cast<to=10>(c) v = Tanh(x) y = Attention(x, k, v)",
    ],
)
def test_attention_of_what_becomes_one_tensor(tmp_path: Path, body: str) -> None:
    """The fused op of queries and keys that are one tensor crashes the builder."""
    text = f"g (float16[1,16,16,64] x) => (float16[1,16,16,64] y) <float16 one = {{1}}> {{ {body} }}"
    onnx.save(model(text, opset=23), tmp_path / "net.onnx")
    stage = intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx").stages["net"]
    assert (stage.attention_fused, stage.attention_total) == (0, 1)
    assert stage.package_bytes > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[4] x) => (float[4] y) { a = Add(x, y) y = Relu(a) }", "fails onnx.checker: .*topologically sorted"),
        ("g (float[4] x) => (float[4] y) { y = Relu(x) y = Tanh(x) }", "fails onnx.checker: .*'y' has been used"),
        ("g (float[4] x) => (float[4] x) { z = Relu(x) }", "the output 'x' is an input.*put an Identity before it"),
        ("g (float[4] x) => () { z = Relu(x) }", "has no outputs"),
        ("g (double[4] x) => (double[4] y) { y = Relu(x) }", "'x' is float64, which an engine for tensorrt-rtx does"),
    ],
)
def test_foreign_files_that_are_no_models(tmp_path: Path, text: str, message: str) -> None:
    onnx.save(model(text), tmp_path / "net.onnx")
    with pytest.raises(CompileError, match=message):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000])
def test_names_that_an_engine_cannot_have(tmp_path: Path, name: str) -> None:
    proto = model("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    proto.graph.input[0].name = proto.graph.node[0].input[0] = name
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(CompileError, match=r"^net: the name .* has (3|5000) bytes.*rename it in the model"):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")


def test_what_the_parser_says_is_not_of_the_driver(tmp_path: Path) -> None:
    """A build needs none, but TensorRT names one that is too old with every error of its own."""
    text = """g (float16[1,4,8,64] q, float16[1,4,8,64] k, bool[3,5] m) => (float16[1,4,8,64] y) {
        y = Attention(q, k, k, m)
    }"""
    onnx.save(model(text, opset=23), tmp_path / "net.onnx")
    with pytest.raises(CompileError, match=r"mask must be broadcastable.*or compile for another target") as caught:
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")
    assert "Cuda" not in str(caught.value)


def test_without_tensorrt_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise tensorrt_rtx.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tensorrt_rtx.importlib.metadata, "version", absent)
    with pytest.raises(RuntimeMissingError, match=r"extra `tensorrt-rtx`: from a checkout, pip install"):
        intaglio.compile(bundle, "tensorrt-rtx")


def test_the_command_that_builds_again_builds_the_same(bundle: Path) -> None:
    given = ["batch=1,sequence=1", "batch=1:2:4"]
    intaglio.compile(bundle, "tensorrt-rtx", sm="86,89", dtype="float16", shapes=given)
    file = bundle / "engines/tensorrt-rtx/score.engine"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(EngineError, match=r"score.engine is not what was built; build again with") as caught:
        open_engine(bundle, "tensorrt-rtx")
    arguments = shlex.split(str(caught.value).split("`")[1])
    assert arguments[:3] == ["intaglio", "compile", str(bundle)]
    done = command_line(*arguments[1:], "--json")
    assert done.returncode == 0, done.stderr
    assert all(stage["from_cache"] for stage in json.loads(done.stdout)["stages"].values())
    assert file.read_bytes() == content
    shown = command_line(*arguments[1:])
    assert "attention as one op" in shown.stdout and "0 of 2" in shown.stdout
    assert "only a machine with a GPU can tell" in " ".join(shown.stdout.split())
    info = bundle / "engines/tensorrt-rtx/engine.json"
    info.write_text(info.read_text().replace("TensorRT for RTX 1.", "TensorRT for RTX 0.", 1))
    with pytest.raises(EngineError, match=r"\(compiler: TensorRT for RTX 0.*, now TensorRT for RTX 1.*\); build again"):
        open_engine(bundle, "tensorrt-rtx")


@pytest.mark.parametrize("options", [{"sm": "90"}, {"dtype": "float8"}, {"$(id)": "1"}])
def test_options_that_no_build_had(bundle: Path, options: dict[str, str]) -> None:
    intaglio.compile(bundle, "tensorrt-rtx")
    info = bundle / "engines/tensorrt-rtx/engine.json"
    content = json.loads(info.read_text())
    for identity in content["identities"].values():
        identity["options"] = options
    info.write_text(json.dumps(content))
    with pytest.raises(EngineError, match=r"engine.json: is damaged .*; build again with `intaglio compile") as caught:
        intaglio.parity(bundle, "tensorrt-rtx")
    assert "--" not in str(caught.value).split("build again")[1].replace("--target tensorrt-rtx", "")


def test_a_child_whose_parent_has_ended_builds_nothing(bundle: Path) -> None:
    """It may end before the child has imported what tells it so."""
    command = [sys.executable, "-P", "-m", "intaglio.engines.nvidia.building", str(os.getppid())]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_files_that_may_not_grow(bundle: Path) -> None:
    program = "from intaglio.scripts.entry import main; main()"
    limited = f"ulimit -f 8; exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} compile {bundle}"
    done = subprocess.run(
        ["bash", "-c", f"{limited} --target tensorrt-rtx"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    said = "error: File too large, while generate.onnx was built; the system or a limit (ulimit -f) allows no files"
    assert said in done.stderr
    assert not any((bundle / "engines").iterdir())


def test_repeated_capabilities_are_all_taken(tmp_path: Path) -> None:
    onnx.save(model("g (float[3] x) => (float[3] y) { y = Tanh(x) }"), tmp_path / "net.onnx")
    done = command_line("compile", str(tmp_path / "net.onnx"), "--target=tensorrt-rtx", "--sm=89", "--sm=86,120", "-q")
    assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "net.engines/tensorrt-rtx/engine.json").read_text())
    assert info["identity"]["options"] == {"sm": "86,89,120"}


def test_commands_run_nothing_that_a_dim_is_called() -> None:
    command = compile_command(Path("net.onnx"), "tensorrt-rtx", shapes=["$(id)=1", "n=1:2:3"])
    assert shlex.split(command)[-4:] == ["--shapes", "$(id)=1", "--shapes", "n=1:2:3"]
    assert "'$(id)=1'" in command
    with pytest.raises(CompileError, match=r"--shapes '\$\(id\)=N'"):
        profile([TensorInfo(name="x", dtype="float32", shape=("$(id)",))], {})


def test_switches_have_no_value_in_a_command() -> None:
    identity = Identity.model_construct(
        options={"dtype": "float16", "refit": "yes", "provider": "cuda"}, accuracy="exact"
    )
    command = compile_command(Path("a b"), "tensorrt", identity, ["x=1"])
    assert command == (
        "intaglio compile 'a b' --target tensorrt --shapes \"x=1\" --dtype float16 --refit --provider cuda"
    )


def test_profiles_hold_the_least_best_and_greatest_sizes() -> None:
    dims = {
        "batch": Dim(min=1, max=4, opt=2),
        "height": Dim(min=16, max=64),
        "rows": Dim(min=1, max=8, expression="height / 8"),
    }
    x = TensorInfo(name="x", dtype="float32", shape=("batch", 3, "rows"))
    assert profile([x], dims) == {"x": Range((1, 3, 2), (2, 3, 2), (4, 3, 8))}


def test_options_are_read_in_any_order() -> None:
    assert read_rtx_options({"sm": "120, 86"}).sm == (86, 120)
    assert read_rtx_options({}).sm == ()
