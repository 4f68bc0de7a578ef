"""Compile: the cache, the identity, and what is left behind when something goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from measure import intaglio as command_line

import intaglio
from intaglio.engines import cache, child, cpu
from intaglio.engines.engine import open_engine, read_report
from intaglio.engines.shapes import smallest_feeds
from intaglio.errors import CompileError, EngineError, InputError, OutputError, RuntimeMissingError


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path / "cache"))
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    return tmp_path / "bundle"


def from_cache(report: Any) -> dict[str, bool]:
    return {name: stage.from_cache for name, stage in report.stages.items()}


def test_the_second_compile_comes_from_the_cache_and_reads_no_weight(bundle: Path) -> None:
    first = intaglio.compile(bundle)
    assert from_cache(first) == {"generate": False, "score": False}
    # As many bytes as before, and none of them a weight: a build that read them would run on them and fail.
    size = (bundle / "weights.data").stat().st_size
    (bundle / "weights.data").write_bytes(b"\xff" * size)
    second = intaglio.compile(bundle)
    assert from_cache(second) == {"generate": True, "score": True}
    assert {n: s.model_copy(update={"from_cache": False}) for n, s in second.stages.items()} == first.stages


def test_building_does_read_the_weights(bundle: Path) -> None:
    """What makes the test above one that can fail."""
    size = (bundle / "weights.data").stat().st_size
    (bundle / "weights.data").write_bytes(b"\xff" * size)
    with pytest.raises(CompileError, match="not finite at the smallest shapes"):
        intaglio.compile(bundle)


def test_a_changed_stage_rebuilds_one_stage(bundle: Path, tmp_path: Path) -> None:
    intaglio.compile(bundle)
    intaglio.export(tmp_path / "checkpoint", bundle, stages=["score"], hidden_states=[1])
    assert from_cache(intaglio.compile(bundle)) == {"score": False}
    intaglio.export(tmp_path / "checkpoint", bundle)
    assert from_cache(intaglio.compile(bundle)) == {"generate": True, "score": True}


@pytest.mark.parametrize("damage", ["artifact", "entry.json"])
def test_a_damaged_cache_entry_is_built_again(bundle: Path, damage: str) -> None:
    intaglio.compile(bundle)
    for entry in (cache.cache_folder() / "engines").iterdir():
        (entry / damage).write_bytes(b"{}")
    assert from_cache(intaglio.compile(bundle)) == {"generate": False, "score": False}


def test_a_cache_that_cannot_be_written_only_costs_time(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", "/proc/nothing")
    for _ in range(2):
        assert from_cache(intaglio.compile(bundle)) == {"generate": False, "score": False}


def test_report(bundle: Path) -> None:
    report = intaglio.compile(bundle)
    assert read_report(bundle, "cpu") == report
    stage = report.stages["generate"]
    weights = sum(t.size for t in tiny_checkpoint.tensors().values())
    assert (stage.weight_count, stage.weight_bytes, stage.bits_per_weight) == (weights, 4 * weights, 32.0)
    assert (stage.attention_fused, stage.attention_total) == (2, 2)
    assert stage.operators["FusedAttention"] == 2
    assert stage.peak_rss_bytes > 20 << 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b, e: _edit(b / "bundle.json", "weights", "sha256", "0" * 64), "weights_sha256"),
        (lambda b, e: _edit(e / "engine.json", "identities", "score", "compiler", "onnxruntime 1.0"), "compiler"),
        (
            lambda b, e: _edit(e / "engine.json", "identities", "score", "device", "Darwin arm64"),
            "device: Darwin arm64",
        ),
        (lambda b, e: _edit(e / "engine.json", "identities", "score", "graph_sha256", "0" * 64), "graph_sha256"),
        (lambda b, e: (e / "engine.json").write_text("{}"), "damaged or of another version"),
        (lambda b, e: (e / "score.onnx").unlink(), r"score\.onnx is missing"),
        (lambda b, e: (e / "engine.json").unlink(), "no engine there"),
    ],
)
def test_an_engine_that_does_not_match_is_refused(bundle: Path, change: Any, named: str) -> None:
    intaglio.compile(bundle)
    change(bundle, bundle / "engines" / "cpu")
    with pytest.raises(EngineError, match=rf"{named}.*`intaglio compile {bundle} --target cpu`"):
        intaglio.load(bundle)


def test_an_engine_that_does_not_match_is_still_shown(bundle: Path) -> None:
    intaglio.compile(bundle)
    _edit(bundle / "bundle.json", "weights", "sha256", "0" * 64)
    done = command_line("inspect", bundle / "engines" / "cpu")
    assert done.returncode == 2
    assert "identity of score" in done.stdout
    assert "was built from something else (weights_sha256" in done.stderr


def _edit(file: Path, *path_and_value: Any) -> None:
    *path, last, value = path_and_value
    content = json.loads(file.read_text())
    inner = content
    for key in path:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(content))


def test_a_graph_that_was_edited_is_not_compiled(bundle: Path) -> None:
    with (bundle / "score.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CompileError, match=r"score\.onnx: is not the graph that bundle\.json names"):
        intaglio.compile(bundle)


def test_a_failed_compile_leaves_the_old_engine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intaglio.compile(bundle)
    before = {p.name: p.read_bytes() for p in (bundle / "engines" / "cpu").iterdir()}

    def fail(*_: Any) -> None:
        raise CompileError("no")

    monkeypatch.setattr(cpu, "build", fail)
    with pytest.raises(CompileError):
        intaglio.compile(bundle, shapes="batch=1")
    assert {p.name: p.read_bytes() for p in (bundle / "engines" / "cpu").iterdir()} == before
    assert [p.name for p in (bundle / "engines").iterdir()] == ["cpu"]


def test_a_killed_compile_leaves_the_old_engine(bundle: Path) -> None:
    intaglio.compile(bundle)
    before = {p.name: p.read_bytes() for p in (bundle / "engines" / "cpu").iterdir()}
    program = (
        "import os, signal, sys, intaglio\n"
        "kill = lambda event: os.kill(os.getpid(), signal.SIGKILL) if event.done == 1 else None\n"
        "intaglio.compile(sys.argv[1], shapes='batch=1:1:2', progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, bundle], check=False)
    assert done.returncode == -signal.SIGKILL
    assert {p.name: p.read_bytes() for p in (bundle / "engines" / "cpu").iterdir()} == before
    intaglio.load(bundle)
    intaglio.compile(bundle)
    assert [p.name for p in (bundle / "engines").iterdir()] == ["cpu"]


def test_a_crash_of_the_compiler_is_an_error_and_not_ours(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "import os; os.kill(os.getpid(), 11)"
    real = subprocess.run
    monkeypatch.setattr(child.subprocess, "run", lambda _command, **kw: real([sys.executable, "-c", crash], **kw))
    with pytest.raises(CompileError, match="was ended by signal 11"):
        intaglio.compile(bundle)


def test_modules_in_the_working_folder_are_not_imported(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle.parent / "json.py").write_text("raise SystemExit('not the standard library')")
    monkeypatch.chdir(bundle.parent)
    intaglio.compile(bundle)


def test_whatever_the_system_refuses_is_an_output_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OutputError, match=r"No space left on device.*free space"):
        intaglio.compile(bundle)
    assert not list((bundle / "engines").iterdir())


def test_without_onnxruntime_the_error_says_what_to_install(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeMissingError, match=r"pip install '\.\[cpu\]'"):
        intaglio.compile(bundle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "abacus"}, "the target 'abacus' is unknown; there are cpu, coreml, tensorrt, tensorrt-rtx, cuda"),
        ({"accuracy": "sloppy"}, "accuracy 'sloppy': cpu has exact, fast"),
        ({"shapes": "batch"}, "'batch' is not NAME=VALUE"),
        ({"shapes": "height=512"}, "the dim 'height' is unknown; there are batch, sequence"),
        ({"shapes": "batch=2:1:4"}, "must rise, within 1 to 1024"),
        ({"shapes": "sequence=1:8:65"}, "must rise, within 1 to 64"),
        ({"shapes": "total_sequence=3"}, "total_sequence is past_sequence [+] sequence, so it cannot be set"),
    ],
)
def test_arguments_out_of_range(bundle: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.compile(bundle, **arguments)
    assert not (bundle / "engines" / "cpu").exists()


def test_shapes_bound_what_runs(bundle: Path) -> None:
    intaglio.compile(bundle, shapes="batch=1,sequence=1:8:16")
    session = open_engine(bundle).load("score")
    feeds = smallest_feeds(session.stage, session.dims)
    session.run(feeds)
    for shape, message in [((2, 1), "batch is 2, expected 1 to 1"), ((1, 17), "sequence is 17, expected 1 to 16")]:
        with pytest.raises(InputError, match=message):
            session.run({name: np.ones(shape, np.int64) for name in feeds})


def test_wrong_feeds_are_named(bundle: Path) -> None:
    intaglio.compile(bundle)
    engine = open_engine(bundle)
    session = engine.load("generate")
    feeds = smallest_feeds(session.stage, session.dims)
    with pytest.raises(InputError, match=r"inputs are missing: \['position_ids'\]"):
        session.run({k: v for k, v in feeds.items() if k != "position_ids"})
    with pytest.raises(InputError, match=r"or unknown: \['ids'\]"):
        session.run({**feeds, "ids": np.zeros(1)})
    with pytest.raises(InputError, match="input_ids is float32, expected int64"):
        session.run({**feeds, "input_ids": np.zeros((1, 1), np.float32)})
    with pytest.raises(InputError, match=r"position_ids has the shape \[1, 2\], expected \['batch', 'sequence'\]"):
        session.run({**feeds, "position_ids": np.zeros((1, 2), np.int64)})
    with pytest.raises(InputError, match=r"total_sequence is 2, expected past_sequence [+] sequence = 1"):
        session.run({**feeds, "attention_mask": np.ones((1, 2), np.int64)})
    with pytest.raises(EngineError, match="has no stage 'paint', only generate, score"):
        engine.load("paint")


def test_the_lowered_graph_cannot_run_without_the_kernel(tmp_path: Path) -> None:
    """Bound to kernels, a graph has no body to fall back on, which would unpack every weight."""
    from intaglio.engines.lowering.bind_kernels import BindKernelsPass
    from intaglio.kernels.functions import grouped_quant_matmul

    model = _quantized_model(bits=4)
    assert grouped_quant_matmul().identifier() in model.functions
    BindKernelsPass(["GroupedQuantMatMul"], [4])(model)
    assert not model.functions
    with pytest.raises(CompileError, match=r"GroupedQuantMatMul of 4 bits; the kernels read \[2\]"):
        BindKernelsPass(["GroupedQuantMatMul"], [2])(_quantized_model(bits=4))
    import onnxruntime

    with pytest.raises(Exception, match="GroupedQuantMatMul"):
        onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())


def _quantized_model(bits: int) -> ir.Model:
    from onnxscript import GraphBuilder

    from intaglio.kernels.functions import grouped_quant_matmul
    from intaglio.kernels.grouped_quant import DOMAIN

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23, DOMAIN: 1}, name="linear")
    builder = GraphBuilder(graph)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 32]))
    graph.inputs.append(x)
    parts = {
        "codes": np.zeros((8, 32 * bits // 8), np.uint8),
        "scales": np.ones((8, 1), np.float16),
        "offsets": np.zeros((), np.float16),
    }
    values = [builder.op.initializer(ir.tensor(part, name=name)) for name, part in parts.items()]
    y = builder.op.call(grouped_quant_matmul(), x, *values, bits=bits, group_size=32, zero_point=0)
    y.dtype, y.shape = ir.DataType.FLOAT, ir.Shape(["batch", 8])
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=11, functions=tuple(builder.functions.values()))
