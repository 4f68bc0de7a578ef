"""The target ``tensorrt-rtx``: engines built without a GPU, what is said of them, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import tiny_checkpoint
from coreml_models import model
from coreml_stages import export_demo, export_klein

import intaglio
from intaglio.engines import child, tensorrt_rtx
from intaglio.engines.engine import open_engine, read_report
from intaglio.engines.nvidia.options import read_rtx_options
from intaglio.engines.nvidia.profiles import Range, profile
from intaglio.errors import CancelledError, CompileError, EngineError, InputError, RuntimeMissingError
from intaglio.exporters.bundle import Dim, TensorInfo
from intaglio.progress import ProgressEvent

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
    intaglio.export(smollm2_gguf, tmp_path / "bundle")
    report = intaglio.compile(tmp_path / "bundle", "tensorrt-rtx", sm=SM, dtype="float16")
    for stage in report.stages.values():
        assert (stage.attention_fused, stage.attention_total) == (30, 30)
        assert 4 < stage.quantized_bits_per_weight < 6  # its embedding has 8 bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sm": "90"}, "--sm is '90', expected numbers among 75, 80, 86, 89, 120, 121.*take the target tensorrt"),
        ({"sm": "8.6"}, "--sm is '8.6', expected numbers among"),
        ({"dtype": "float8"}, "--dtype is 'float8', expected float16"),
        ({"weights": "lut"}, "--weights: is no option of the target tensorrt-rtx"),
        ({"accuracy": "fast"}, "tensorrt-rtx has exact"),
    ],
)
def test_options_that_there_are_not(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.compile(bundle, "tensorrt-rtx", **options)
    assert not (bundle / "engines").exists()


def test_a_type_that_a_generation_lacks(tmp_path: Path) -> None:
    bundle = export_demo(tmp_path, stages=["transformer"])
    lacks = r"transformer: holds int4, which compute capability 7.5 lacks; .*Leave 75 out"
    with pytest.raises(CompileError, match=lacks):
        intaglio.compile(bundle, "tensorrt-rtx", sm="75,86")
    assert not (bundle / "engines/tensorrt-rtx").exists()


def test_a_build_says_how_far_it_is_and_can_be_cancelled(bundle: Path) -> None:
    events: list[ProgressEvent] = []

    def cancel(event: ProgressEvent) -> bool:
        events.append(event)
        return event.unit != "steps" or event.done < 2

    with pytest.raises(CancelledError, match=r"build generate: cancelled after 2 of \d+ steps"):
        intaglio.compile(bundle, "tensorrt-rtx", progress=cancel)
    assert [event.done for event in events if event.unit == "steps"] == [1, 2]
    assert not (bundle / "engines/tensorrt-rtx").exists()
    assert not list(bundle.rglob("*.partial*"))


def test_a_compiler_that_crashes_is_an_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run
    crash = "import os, sys; sys.stderr.write('out of ideas\\n'); sys.stderr.flush(); os.kill(os.getpid(), 11)"
    monkeypatch.setattr(child.subprocess, "run", lambda _command, **kw: real([sys.executable, "-c", crash], **kw))
    with pytest.raises(CompileError, match="generate: TensorRT was ended by signal 11 while building: out of ideas"):
        intaglio.compile(bundle, "tensorrt-rtx")
    assert not (bundle / "engines/tensorrt-rtx").exists()
    assert not list((bundle.parent / "cache").rglob("entry.json"))


def test_an_operator_that_there_is_not_is_told_by_its_node(tmp_path: Path) -> None:
    onnx.save(model("g (float[2] x) => (float[2] y) { [odd] y = Bernoulli(x) }"), tmp_path / "net.onnx")
    with pytest.raises(
        CompileError, match=r"net: TensorRT cannot read the graph: it has no operator Bernoulli \(node odd\)"
    ):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")


def test_an_onnx_file_of_others(tmp_path: Path) -> None:
    onnx.save(model("g (float[batch,3] x) => (float[batch,3] y) { y = Tanh(x) }"), tmp_path / "net.onnx")
    with pytest.raises(
        CompileError, match=r"'batch' of the input 'x' has no greatest size.*--shapes batch=MIN:OPT:MAX"
    ):
        intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx")
    stage = intaglio.compile(tmp_path / "net.onnx", "tensorrt-rtx", shapes="batch=1:2:4").stages["net"]
    assert stage.operators == {"Tanh": 1}
    assert stage.package_bytes > 0


def test_without_tensorrt_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise tensorrt_rtx.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tensorrt_rtx.importlib.metadata, "version", absent)
    with pytest.raises(RuntimeMissingError, match=r"extra `tensorrt-rtx`: from a checkout, pip install"):
        intaglio.compile(bundle, "tensorrt-rtx")


def test_a_damaged_engine_is_told(bundle: Path) -> None:
    intaglio.compile(bundle, "tensorrt-rtx", sm="86")
    file = bundle / "engines/tensorrt-rtx/score.engine"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EngineError, match=r"score.engine is not what was built; build again with .*--sm 86"):
        open_engine(bundle, "tensorrt-rtx")


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
