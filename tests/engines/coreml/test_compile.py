"""``compile --target coreml``: engines of bundles and of ONNX files, their options, sizes, reports and identities."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_checkpoint
from coreml_models import model
from coreml_stages import export_klein

import intaglio
from intaglio.engines import child, coreml
from intaglio.engines.coreml import sizes
from intaglio.engines.coreml.description import read_description
from intaglio.engines.engine import open_engine, read_report
from intaglio.engines.model_engine import load_model, read_model_engine
from intaglio.engines.shapes import CONTEXT, fit_context
from intaglio.errors import CompileError, EngineError, InputError, RuntimeMissingError
from intaglio.exporters.bundle import Dim, read_bundle

NET = """g (float[batch,3] x) => (float[batch,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle", taps=True)
    return folder / "bundle"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path / "cache"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_language_model_is_compiled_compared_and_taken_from_the_cache(bundle: Path) -> None:
    report = intaglio.compile(bundle, "coreml")
    assert report.compiler.startswith("coremltools ")
    score, generate = report.stages["score"], report.stages["generate"]
    assert (score.dtype, score.deployment_target, score.functions) == ("float32", "iOS18", ("main",))
    assert (score.attention_fused, score.attention_total) == (2, 2)
    assert generate.functions == ("decode", "prefill")
    assert (generate.attention_fused, generate.attention_total) == (4, 4)
    assert generate.notes == ("the key-value cache is a state of 64 tokens, float16; one text at a time",)
    assert 0 < score.weight_bytes < score.package_bytes
    assert score.bits_per_weight == pytest.approx(32, abs=1)
    assert read_report(bundle, "coreml") == report

    compared = intaglio.parity(bundle, "coreml", batch=1)
    assert compared.first_divergent is None
    assert {d.name for d in compared.differences} >= {"logits", "model.norm"}
    assert max(d.relative_l2 for d in compared.differences) <= 1e-5

    built = bytes_of(bundle / "engines/coreml")
    again = intaglio.compile(bundle, "coreml")
    assert all(stage.from_cache for stage in again.stages.values())
    packages = {name: content for name, content in built.items() if ".mlpackage" in name}
    assert packages == {n: c for n, c in bytes_of(bundle / "engines/coreml").items() if ".mlpackage" in n}


def test_an_entry_of_the_cache_that_was_changed_is_built_anew(bundle: Path, tmp_path: Path) -> None:
    described = read_bundle(bundle)
    (bundle / "bundle.json").write_text(
        described.model_copy(update={"stages": {"score": described.stages["score"]}}).model_dump_json()
    )
    intaglio.compile(bundle, "coreml")
    built = bytes_of(bundle / "engines/coreml/score.mlpackage")
    (weights,) = (tmp_path / "cache").rglob("weight.bin")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not intaglio.compile(bundle, "coreml").stages["score"].from_cache
    assert bytes_of(bundle / "engines/coreml/score.mlpackage") == built


def test_what_was_changed_after_compiling_is_told(bundle: Path) -> None:
    intaglio.compile(bundle, "coreml", weights="int4")
    package = bundle / "engines/coreml/score.mlpackage"
    manifest = package / "Manifest.json"
    kept = manifest.read_bytes()
    manifest.write_bytes(kept + b" ")
    with pytest.raises(EngineError, match=r"score.mlpackage is not what was built.*--target coreml .*--weights int4"):
        open_engine(bundle, "coreml")
    manifest.write_bytes(kept)
    open_engine(bundle, "coreml")
    shutil.rmtree(package)
    with pytest.raises(EngineError, match=r"score.mlpackage is missing; build again with"):
        open_engine(bundle, "coreml")


def test_weights_that_were_changed_after_compiling_are_told(bundle: Path) -> None:
    intaglio.compile(bundle, "coreml", shapes="batch=1,past_sequence=0:1:31")
    weights = bundle / "engines/coreml/score.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(weights.read_bytes())
    weights.unlink()  # so that the cache keeps its own
    weights.write_bytes(content)
    open_engine(bundle, "coreml")
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    again = r'--target coreml --shapes "batch=1,past_sequence=0:1:31" --deployment-target iOS18 --weights lut`'
    with pytest.raises(EngineError, match=rf"score.mlpackage is not what was built; build again with .*{again}"):
        open_engine(bundle, "coreml")


def test_a_decoder_of_one_token_a_call(bundle: Path) -> None:
    report = intaglio.compile(bundle, "coreml", shapes="sequence=1")
    assert report.stages["generate"].functions == ("main",)
    intaglio.compile(bundle)
    logits = []
    for target in ("coreml", "cpu"):
        session = open_engine(bundle, target).load_for_parity("generate")
        cache = session.new_cache(1)
        for i, token in enumerate([3, 1, 4]):
            ids, mask = np.array([[token]]), np.ones((1, i + 1), np.int64)
            feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.array([[i]])}
            found = session.run_with_cache(feeds, ["logits"], cache)["logits"]
        logits.append(found)
    assert np.linalg.norm(logits[0] - logits[1]) <= 5e-3 * np.linalg.norm(logits[1])


def test_sets_of_sizes_share_the_longest_cache(bundle: Path) -> None:
    report = intaglio.compile(bundle, "coreml", shapes=["past_sequence=0:0:15", "past_sequence=0:0:31"])
    assert report.stages["generate"].notes == (
        "a key-value cache has one length: all sets of sizes share the longest",
        "the key-value cache is a state of 32 tokens, float16; one text at a time",
    )


def test_a_cache_is_compared_as_what_it_is(bundle: Path) -> None:
    report = intaglio.compile(bundle, "coreml", shapes="batch=2")
    assert report.stages["generate"].notes == (
        "the key-value cache is a state of 64 tokens, float16; 2 texts at a time",
    )
    compared = intaglio.parity(bundle, "coreml", stage="generate", batch=2)
    assert compared.first_divergent is None
    assert compared.bound == 1e-2
    with pytest.raises(InputError, match=r"past_sequence=0:0:0: the greatest size is 0, expected 1 or more"):
        intaglio.compile(bundle, "coreml", shapes="past_sequence=0")


def test_a_full_disk_is_told(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, sys; from intaglio.engines.coreml import building, package\n"
        "def full(*_): raise OSError(28, 'No space left on device', '/there/weight.bin')\n"
        "package._write = full; sys.exit(building.main())"
    )
    real = subprocess.run
    monkeypatch.setattr(child.subprocess, "run", lambda _command, **kw: real([sys.executable, "-c", program], **kw))
    message = "/there/weight.bin: No space left on device, while generate.onnx was built; free space"
    with pytest.raises(CompileError, match=message):
        intaglio.compile(bundle, "coreml")


def test_a_bfloat16_bundle_is_not_narrowed(tmp_path: Path) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle", dtype="bfloat16")
    with pytest.raises(CompileError, match=r"generate: computes in bfloat16, and --dtype float16 narrows float32"):
        intaglio.compile(tmp_path / "bundle", "coreml", dtype="float16")


def test_an_engine_runs_on_macs_only(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intaglio.compile(bundle, "coreml")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(EngineError, match="Core ML runs on macOS 15 or later, and this is another system"):
        intaglio.load(bundle, "coreml").score("one two")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "lut-tiny"}, "--weights is 'lut-tiny', expected lut or lut-compact or lut-fp16 or int4"),
        ({"dtype": "bfloat16"}, "--dtype is 'bfloat16', expected float16"),
        ({"deployment_target": "iOS17"}, "--deployment-target is 'iOS17', expected iOS18 or iOS26"),
        ({"accuracy": "fast"}, "accuracy 'fast': coreml has exact"),
        ({"shapes": ["batch=1", "batch=1"]}, "--shapes: the same sizes are given twice"),
        ({"shapes": "heigth=1"}, "the dim 'heigth' is unknown"),
        ({"shapes": "batch=1,batch=2"}, "--shapes: batch is given twice"),
    ],
)
def test_options_that_there_are_not(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.compile(bundle, "coreml", **options)
    assert not (bundle / "engines").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "lut"}, "--weights: is no option of the target cpu"),
        ({"dtype": "float16"}, "cpu computes in the bundle's dtype; export with --dtype"),
        ({"shapes": ["batch=1", "batch=2"]}, "cpu takes every size in a range"),
    ],
)
def test_options_of_coreml_are_not_those_of_cpu(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.compile(bundle, "cpu", **options)


def test_several_sets_of_sizes_are_functions_that_share_weights(tmp_path: Path) -> None:
    bundle = export_klein(tmp_path, stages=["transformer", "vae_decoder"], hidden_states=())
    fixed = "batch=1,width=32,text_tokens=8"
    sizes_of = [f"{fixed},height=32,image_tokens=4", f"{fixed},height=64,image_tokens=8"]
    one = intaglio.compile(bundle, "coreml", shapes=sizes_of[0])
    both = intaglio.compile(bundle, "coreml", shapes=sizes_of)
    assert one.stages["transformer"].functions == ("main",)
    assert both.stages["transformer"].functions == ("image_tokens4", "image_tokens8")
    assert both.stages["vae_decoder"].functions == ("latent_height2", "latent_height4")
    for stage in both.stages:
        assert both.stages[stage].weight_bytes == one.stages[stage].weight_bytes
    assert set(read_description(bundle / "engines/coreml/transformer.mlpackage").functions) == {
        "image_tokens4",
        "image_tokens8",
    }
    for height in (32, 64):
        report = intaglio.parity(bundle, "coreml", batch=1, height=height, width=32, tokens=8)
        assert report.first_divergent is None
        assert report.stages == ("transformer", "vae_decoder")
    assert intaglio.parity(bundle, "coreml", stage="vae_decoder").first_divergent is None
    with pytest.raises(InputError, match=r"the package has no function for the sizes .*; it has image_tokens4"):
        intaglio.parity(bundle, "coreml", batch=1, height=48, width=32, tokens=8)


def test_without_coremltools_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise coreml.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(coreml.importlib.metadata, "version", absent)
    with pytest.raises(RuntimeMissingError, match=r"its extra `coreml`: from a checkout, pip install '.\[coreml\]'"):
        intaglio.compile(bundle, "coreml")


def test_opening_an_engine_imports_neither_coremltools_nor_a_graph_library(bundle: Path) -> None:
    intaglio.compile(bundle, "coreml")
    program = (
        "import sys; from intaglio.engines.engine import open_engine; open_engine(sys.argv[1], 'coreml'); "
        "found = {'coremltools', 'torch', 'onnx', 'onnx_ir', 'onnxruntime'} & set(sys.modules); "
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, bundle], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


class TestOnnxFiles:
    def write(self, folder: Path, text: str = NET) -> Path:
        onnx.save(model(text), folder / "net.onnx")
        return folder / "net.onnx"

    def test_a_model_is_compiled_and_what_it_computes_compared(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        report = intaglio.compile(path, "coreml", shapes="batch=1:2:4")
        stage = report.stages["net"]
        assert (stage.weight_count, stage.functions) == (0, ("main",))  # six values are kept in the program itself
        folder = tmp_path / "net.engines/coreml"
        info = read_model_engine(folder)
        assert info.artifact == "net.mlpackage"
        assert not list(folder.rglob("*.onnx"))
        session = coreml.load_for_parity("net", folder / "model/net.mlpackage", folder, info.interface, info.identity)
        x = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ np.array([[1, 2], [3, 4], [5, 6]]), rtol=1e-6)
        with pytest.raises(InputError, match="batch is 5, expected 1 to 4"):
            session.run({"x": np.zeros((5, 3), np.float32)})
        assert intaglio.compile(path, "coreml", shapes="batch=1:2:4").stages["net"].from_cache
        with pytest.raises(EngineError, match="runs on macOS"):
            load_model(path, "coreml")

    def test_weights_that_an_engine_for_the_cpu_links_to(self, tmp_path: Path) -> None:
        path = tmp_path / "net.onnx"
        proto = model("g (float[2,300] x) => (float[2,300] y) { y = MatMul(x, w) }")
        weight = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(proto, path, save_as_external_data=True, location="net.data", size_threshold=0)
        intaglio.compile(path)
        assert (tmp_path / "net.data").stat().st_nlink == 2
        stage = intaglio.compile(path, "coreml").stages["net"]
        assert stage.weight_bytes >= weight.nbytes

    def test_a_dim_without_bounds_is_told_with_the_option_that_gives_them(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        with pytest.raises(CompileError, match=r"'batch' of the input 'x' has no greatest.*--shapes batch=MIN:OPT:MAX"):
            intaglio.compile(path, "coreml")
        assert not (tmp_path / "net.engines/coreml").exists()

    def test_dims_without_names_are_bounded_by_those_that_inspect_shows(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, NET.replace("batch", "?"))
        with pytest.raises(CompileError, match=r"'x_dim0' of the input 'x' has no greatest size.*--shapes x_dim0="):
            intaglio.compile(path, "coreml")
        assert intaglio.compile(path, "coreml", shapes="x_dim0=1:2:4").stages["net"].functions == ("main",)

    def test_integers_that_may_leave_int32_are_noted(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "g (int64[2] x) => (int64[2] y) { y = Mul(x, x) }")
        (note,) = intaglio.compile(path, "coreml").stages["net"].notes
        assert note == "int64 is computed in int32: what leaves its range is wrong"

    def test_functions_of_dims_with_odd_names(self, tmp_path: Path) -> None:
        proto = model(NET)
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "3-größe"
        onnx.save(proto, tmp_path / "net.onnx")
        report = intaglio.compile(tmp_path / "net.onnx", "coreml", shapes=["3-größe=1", "3-größe=2"])
        assert report.stages["net"].functions == ("_3_gr__e1", "_3_gr__e2")

    def test_an_entry_of_the_cache_of_another_version_is_built_anew(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        intaglio.compile(path, "coreml", shapes="batch=2")
        (entry,) = (tmp_path / "cache").rglob("entry.json")
        said = json.loads(entry.read_text())
        entry.write_text(json.dumps({**said, "report": {**said["report"], "colour": "blue"}}))
        assert not intaglio.compile(path, "coreml", shapes="batch=2").stages["net"].from_cache

    def test_a_changed_model_is_told(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        intaglio.compile(path, "coreml", shapes="batch=2", dtype=None)
        self.write(tmp_path, NET.replace("{1,", "{2,"))
        with pytest.raises(
            EngineError, match=r'has changed .*--target coreml --shapes "batch=2" --deployment-target iOS18'
        ):
            load_model(path, "coreml")

    def test_an_operator_that_there_is_not_is_told_by_node_and_way_out(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "g (float[2] x) => (float[2] y) { [odd] y = Bernoulli(x) }")
        with pytest.raises(CompileError, match=r"net: the node 'odd' \(Bernoulli, opset 17\) has no form in Core ML"):
            intaglio.compile(path, "coreml")


def test_conversion_takes_fixed_sizes_ranges_and_what_follows_from_them() -> None:
    dims = {
        "height": Dim(min=32, max=64, multiple_of=16),
        "width": Dim(min=64, max=64),
        "tokens": Dim(min=1, max=4096, expression="rows * width / 16"),
        "rows": Dim(min=1, max=4096, expression="height / 16"),
        "unused": Dim(min=1, max=2),
    }
    found = sizes.conversion_dims(dims, ["height", "width", "tokens"])
    assert found == {"height": Dim(min=32, max=64), "width": 64, "tokens": Dim(min=8, max=16)}
    fixed = {**dims, "height": Dim(min=32, max=32)}
    assert sizes.conversion_dims(fixed, ["tokens"]) == {"tokens": 8}


def test_functions_are_named_by_the_sizes_in_which_they_differ() -> None:
    sets = [{"batch": 1, "height": 512}, {"batch": 1, "height": Dim(min=64, max=256)}]
    assert [sizes.function_name(each, sets) for each in sets] == ["height512", "height64to256"]
    assert sizes.function_name(sets[0], sets[:1]) == "main"


def test_a_cache_is_bounded_unless_somebody_chose_its_length() -> None:
    declared = {
        "sequence": Dim(min=1, max=8192),
        "past_sequence": Dim(min=0, max=8191),
        "total_sequence": Dim(min=1, max=8192, expression="past_sequence + sequence"),
    }
    fitted = fit_context(declared, declared)
    assert (fitted["past_sequence"].max, fitted["total_sequence"].max) == (CONTEXT - 1, CONTEXT)
    chosen = {**declared, "past_sequence": Dim(min=0, max=4095)}
    assert fit_context(chosen, declared) == chosen
    calls = {**declared, "sequence": Dim(min=1, max=4096)}
    assert fit_context(calls, declared)["past_sequence"].max == 4095
    assert fit_context(calls, declared)["sequence"].max == 4096
    short = {name: dim.model_copy(update={"max": min(dim.max, 64)}) for name, dim in declared.items()}
    assert fit_context(short, short) == short
