"""The target ``tensorrt`` as far as a machine without a GPU shows it: what TensorRT is asked, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from fused_graphs import Graph

import intaglio
from intaglio.engines import identity, tensorrt
from intaglio.engines.identity import _lowering_hash
from intaglio.engines.nvidia import building, gpu, plugins
from intaglio.engines.nvidia.full import has_few_rows, refittable
from intaglio.engines.nvidia.limits import BuildSize
from intaglio.engines.nvidia.lower import lower
from intaglio.engines.nvidia.monitor import progress_monitor
from intaglio.engines.nvidia.options import FullOptions
from intaglio.engines.nvidia.profiles import Range
from intaglio.engines.nvidia.stats import handed_over
from intaglio.engines.nvidia.timing_cache import TimingCache
from intaglio.errors import CompileError, EngineError, InputError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat

_DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "NVIDIA H100"); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 85899345920; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


def _driver(folder: Path, init: int = 0, count: int = 1) -> str:
    (folder / "driver.c").write_text(_DRIVER)
    library = folder / f"driver-{init}-{count}.so"
    defined = [f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run(["gcc", "-shared", "-fPIC", *defined, "-o", library, folder / "driver.c"], check=True)
    return str(library)


def test_the_gpu_is_told_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVER", _driver(tmp_path))
    assert gpu.find_gpu() == gpu.Gpu("NVIDIA H100", 90, 80 << 30, "13.1")
    assert tensorrt.device() == "NVIDIA H100, compute capability 9.0"
    monkeypatch.setattr(gpu, "_DRIVER", _driver(tmp_path, init=100))
    with pytest.raises(EngineError, match=r"cuInit of .* gives the error 100"):
        gpu.find_gpu()
    monkeypatch.setattr(gpu, "_DRIVER", _driver(tmp_path, count=0))
    with pytest.raises(EngineError, match="lists none"):
        gpu.find_gpu()


def test_without_a_gpu_it_says_what_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVER", "libcuda-that-is-not-there.so.1")
    monkeypatch.setattr(tensorrt, "_WHEELS", ("tensorrt-that-is-not-there",))
    bundle = tmp_path / "bundle"
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), bundle)
    with pytest.raises(
        EngineError, match=r"libcuda-that-is-not-there.so.1 cannot be loaded .* tensorrt-rtx builds on any"
    ):
        intaglio.compile(bundle, target="tensorrt")
    assert not (bundle / "engines" / "tensorrt").exists()


def test_the_options() -> None:
    assert tensorrt.check_options({}, 1) == {}
    assert tensorrt.check_options({"dtype": "float16", "refit": "yes"}, 2) == {"dtype": "float16", "refit": "yes"}
    for given, message in (
        ({"sm": "86"}, "builds for the GPU of this machine; tensorrt-rtx takes --sm"),
        ({"dtype": "int8"}, "--dtype is 'int8', expected float16"),
        ({"refit": "perhaps"}, "--refit is 'perhaps'"),
        ({"deployment_target": "iOS18"}, "--deployment-target: is no option of the target tensorrt"),
    ):
        with pytest.raises(InputError, match=message):
            tensorrt.check_options(given, 1)


def test_without_tensorrt_the_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVER", _driver(tmp_path))
    monkeypatch.setattr(tensorrt, "_WHEELS", ("tensorrt-that-is-not-there", "nor-this"))
    with pytest.raises(RuntimeMissingError, match="there is none of tensorrt-that-is-not-there, nor-this"):
        tensorrt.compiler()


def test_a_change_of_the_kernels_changes_the_engines() -> None:
    found = [file for pattern in tensorrt.SOURCES for file in Path(tensorrt.__file__).parent.glob(pattern)]
    assert {"ternary.py", "plugins.py", "ptx.py", "plugin.py", "building.py"} <= {file.name for file in found}
    assert _lowering_hash("tensorrt") != _lowering_hash("tensorrt-rtx")


@pytest.mark.parametrize(("target", "changes"), [("tensorrt", True), ("tensorrt-rtx", False)])
def test_another_triton_builds_again(monkeypatch: pytest.MonkeyPatch, target: str, changes: bool) -> None:
    """The identity stays: an engine needs no Triton."""
    built = identity.Identity(
        target=target, graph_sha256="", weights_sha256="", dtype="float16", accuracy="exact", shapes={}, compiler="",
        lowering_sha256="", device="",
    )  # fmt: skip
    before = built.key()
    monkeypatch.setattr(identity, "_version", lambda package: "another")
    assert (built.key() != before) == changes


def _model() -> ir.Model:
    """A dense product, a transposed one and a ternary one, of rows ``[batch, tokens]``."""
    half = ir.TensorType(ir.DataType.FLOAT16)
    x = ir.Value(name="x", type=half, shape=ir.Shape(["batch", "tokens", 64]))
    arrays = {
        "a.weight": np.zeros((64, 64), np.float16), "b.weight": np.zeros((64, 64), np.float16),
        "c.weight.codes": np.zeros((8, 16), np.uint8), "c.weight.scales": np.ones((8, 1), np.float16),
        "c.weight.offsets": np.zeros((), np.float16),
    }  # fmt: skip
    values = {
        name: ir.Value(name=name, const_value=ir.Tensor(array, name=name), shape=ir.Shape(array.shape),
                       type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        for name, array in arrays.items()
    }  # fmt: skip
    first = ir.node("MatMul", [x, values["a.weight"]])
    turned = ir.node("Transpose", [values["b.weight"]], {"perm": [1, 0]})
    second = ir.node("MatMul", [first.outputs[0], turned.outputs[0]])
    stated = {"bits": 2, "group_size": 64, "zero_point": 1}
    third = ir.node(
        "GroupedQuantMatMul", [second.outputs[0], *(values[f"c.weight.{n}"] for n in ("codes", "scales", "offsets"))],
        stated, domain=DOMAIN,
    )  # fmt: skip
    for i, node in enumerate((first, turned, second, third)):
        node.outputs[0].name, node.outputs[0].type = f"value_{i}", half
        node.outputs[0].shape = ir.Shape(
            [64, 64] if node is turned else ["batch", "tokens", 8 if node is third else 64]
        )
    graph = ir.Graph(
        [x], [third.outputs[0]], nodes=[first, turned, second, third], initializers=list(values.values()),
        opset_imports={"": 23, DOMAIN: 1}, name="model",
    )  # fmt: skip
    return ir.Model(graph, ir_version=11)


def test_rows_of_every_profile_choose_the_plugin() -> None:
    model = _model()
    assert has_few_rows(model, [{"batch": 1, "tokens": 1}, {"batch": 2, "tokens": 8}])
    assert not has_few_rows(model, [{"batch": 1, "tokens": 1}, {"batch": 1, "tokens": 17}])
    assert not has_few_rows(model, [{"batch": 1}])
    assert not has_few_rows(model, []), "of which nothing is known"


@pytest.mark.parametrize(("tokens", "op_type"), [(16, "GroupedQuantMatMulFewRows"), (512, "GroupedQuantMatMul")])
def test_what_tensorrt_is_given(tmp_path: Path, tokens: int, op_type: str) -> None:
    path = tmp_path / "model.onnx"
    ir.save(_model(), path)
    model, notes = building.lowered_model(path, FullOptions(), largest=[{"batch": 1, "tokens": tokens}])
    assert op_type in {node.op_type for node in model.graph} and "1 ternary products as a plugin" in notes
    assert refittable(model, {"a.weight", "b.weight"}) == ["a.weight", "b.weight"]
    handed = handed_over(model)
    # Two bits a code, and a scale of 16 for 64 of them.
    assert (handed.quantized_count, handed.quantized_bytes) == (8 * 64, 8 * 16 + 8 * 2)
    assert handed.for_report()["quantized_bits_per_weight"] == 2.25
    assert handed.weight_count == 2 * 64 * 64 + 8 * 64


def test_what_lowering_makes_of_a_packed_weight_is_not_exchanged() -> None:
    graph = Graph({"x": ["rows", 256]}, {"x": ir.DataType.FLOAT16})
    form = GroupedQuantFormat(4, 64, 0)
    codes, scales, offsets = graph.table(24, 256, "a.weight", form)
    y = graph.op.GroupedQuantMatMul(graph["x"], codes, scales, offsets, **vars(form), _domain=DOMAIN)
    y.dtype, y.shape = ir.DataType.FLOAT16, ir.Shape(["rows", 24])
    model = graph.model(y=y)
    weights = set(model.graph.initializers)
    lower(model, "tensorrt")
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 2, "of the weight, and of the sums of groups"
    assert refittable(model, weights) == []


class _Config:
    """TensorRT's, as far as caches and flags go; ``accepts`` are the caches that fit."""

    def __init__(self, accepts: tuple[bytes, ...] = (b"",)) -> None:
        self.accepts, self.cache, self.flags, self.profiles = accepts, None, [], []
        self.progress_monitor: Any = None

    def create_timing_cache(self, content: bytes) -> bytes:
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache in self.accepts:
            self.cache = cache
        return cache in self.accepts

    def get_timing_cache(self) -> Any:
        return type("Cache", (), {"serialize": lambda _: memoryview(b"measured")})()

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles.append(profile)


def test_measurements_are_kept_for_the_next_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path))
    first, timing = _Config(), TimingCache("TensorRT 11.4", "NVIDIA H100")
    timing.attach(first)
    assert first.cache == b""
    timing.keep(first)
    second = _Config((b"measured",))
    TimingCache("TensorRT 11.4", "NVIDIA H100").attach(second)
    assert second.cache == b"measured"
    for other in (TimingCache("TensorRT 11.4", "NVIDIA A100"), TimingCache("TensorRT 11.5", "NVIDIA H100"), timing):
        refusing = _Config()
        other.attach(refusing)
        assert refusing.cache == b""
    assert [file.name for file in timing.path.parent.iterdir()] == [timing.path.name]


class _TensorRt:
    """What a build asks of TensorRT, written down."""

    NetworkDefinitionCreationFlag = type("Flags", (), {"STRONGLY_TYPED": 1})
    BuilderFlag = type("Flags", (), {"REFIT_INDIVIDUAL": "individual"})

    class ILogger:
        INTERNAL_ERROR, ERROR = "internal", "error"

    class IProgressMonitor:
        """Whose constructor TensorRT asks to be called."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known, self.marked, self.config = known, [], _Config()
        self.logger: Any = None
        self.flags = 0

    def Builder(self, logger: Any) -> Any:  # noqa: N802
        self.logger = logger
        return self

    def create_network(self, flags: int) -> Any:
        self.flags = flags
        return self

    num_inputs = 0

    def mark_weights_refittable(self, name: str) -> bool:
        self.marked.append(name)
        return name in self.known

    def OnnxParser(self, network: Any, logger: Any) -> Any:  # noqa: N802
        return type("Parser", (), {"parse_from_file": lambda _, path: True})()

    def create_builder_config(self) -> _Config:
        return self.config

    def create_optimization_profile(self) -> str:
        return "profile"

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        return b"plan"


def test_what_a_build_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CACHE", str(tmp_path))
    registered: list[Any] = []
    monkeypatch.setattr(plugins, "register_plugins", registered.append)
    trt, timing = _TensorRt(("a.weight",)), TimingCache("TensorRT", "GPU")
    options = FullOptions(refit=True)
    sizes = {"x": Range((1,), (1,), (1,))}
    plan = building._build_plan(
        trt, "stage", tmp_path / "stage.onnx", [sizes], options, BuildSize(0), exchanged=["a.weight"], timing=timing
    )
    assert bytes(plan) == b"plan" and registered == [trt] and trt.flags == 1 << 1
    assert trt.config.flags == ["individual"] and trt.marked == ["a.weight"]
    assert trt.config.profiles == ["profile"] and timing.path.read_bytes() == b"measured"
    with pytest.raises(CompileError, match="does not know the weight 'other'"):
        building._build_plan(trt, "stage", tmp_path / "stage.onnx", [sizes], options, BuildSize(0), exchanged=["other"])


def test_the_monitor_tells_steps_of_the_outermost_phase(capsys: pytest.CaptureFixture[str]) -> None:
    for says_steps in (True, False):
        told = progress_monitor(_TensorRt(()), "stage", says_steps=says_steps)
        told.phase_start("Building engine", None, 6)
        told.phase_start("Timing", "Building engine", 30)
        assert told.step_complete("Timing", 0)
        told.phase_finish("Timing")
        assert told.step_complete("Building engine", 0)
        captured = capsys.readouterr()
        expected = [{"progress": ["build stage", 1, 6, "steps", ""]}] if says_steps else []
        assert [json.loads(line) for line in captured.out.splitlines()] == expected
        assert captured.err.splitlines() == ["phase Building engine", "phase Timing"]
