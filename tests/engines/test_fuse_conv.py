"""``FuseConvPass``: tiny decoders and small graphs before and after, through onnxruntime.

Bounds of relative L2: 2e-2 in tiles of bfloat16, 2e-5 with Winograd's transforms, 5e-6 in exact float32 (float32 sums
of a whole decoder in any two orders differ by nearly as much).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript import GraphBuilder
from stage_runner import write_stages
from vae_stages import FULL, tiny_vae

from intaglio.engines import cpu
from intaglio.engines.lowering.fuse_conv import FuseConvPass
from intaglio.kernels.cpu.library import library_path

BOUNDS = {"amx": 2e-2, "avx512": 2e-5, "portable": 2e-5}
EXACT = 5e-6
CONFIG = {**FULL, "decoder_block_out_channels": (16, 32, 40, 40), "norm_num_groups": 8}


def session(model: ir.Model, folder: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    options.register_custom_ops_library(str(library_path()))
    data = ir.serde.serialize_model(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def outputs(model: ir.Model, feeds: dict[str, np.ndarray], folder: Path | None = None) -> dict[str, np.ndarray]:
    loaded = session(model, folder)
    names = [o.name for o in loaded.get_outputs()]
    return dict(zip(names, loaded.run(names, feeds), strict=True))


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.fixture(params=BOUNDS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    graph, op, x = started((1, 4, 4, 4))
    try:
        session(finished(graph, op.Conv(x, constant(graph, "w", (4, 4, 3, 3))), fast=True))
    except Exception as error:
        if "this machine or this build lacks" in str(error):
            pytest.skip(f"{request.param} is not to be had here")
        raise
    return request.param


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    tiny_vae(folder / "checkpoint", **CONFIG)
    write_stages(folder / "checkpoint", folder)
    write_stages(folder / "checkpoint", folder / "taps", ["vae_decoder"], taps=True)
    return folder


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def compared(graph: Path, feeds: dict[str, np.ndarray], fast: bool) -> tuple[dict[str, float], ir.Model]:
    """Relative L2 of every output, fused against not, and the fused graph."""
    model = ir.load(graph)
    assert FuseConvPass(fast=fast)(model).modified
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FuseConvPass, "call", lambda _, given: ir.passes.PassResult(given, modified=False))
        expected = outputs(cpu.lower(ir.load(graph), "exact"), feeds, graph.parent)
        found = outputs(cpu.lower(model, "exact"), feeds, graph.parent)
    assert list(found) == list(expected)
    assert all(found[n].shape == expected[n].shape for n in expected)
    return {name: relative(found[name], expected[name]) for name in expected}, model


def test_a_tiny_decoder(stages: Path, instruction_set: str) -> None:
    latents = np.random.default_rng(0).normal(size=(2, 32, 5, 7)).astype(np.float32)
    errors, model = compared(stages / "vae_decoder.onnx", {"latents": latents}, fast=True)
    assert errors["sample"] <= BOUNDS[instruction_set]
    left = kinds(model)
    assert not {"Conv", "GroupNormalization", "Sigmoid", "Resize"} & set(left)
    # Each convolution, and each norm but the one before attention, which is not before a convolution.
    assert (left["FusedConv"], left["GroupStatistics"]) == (36, 29)
    fused = [node for node in model.graph if node.op_type == "FusedConv"]
    assert sum(len(node.inputs) > 8 and node.inputs[8] is not None for node in fused) == 14
    assert sum(node.attributes["upsample"].as_int() == 2 for node in fused) == 3


def test_exact_replaces_what_follows_upsampling(stages: Path, instruction_set: str) -> None:
    latents = np.random.default_rng(1).normal(size=(1, 32, 4, 6)).astype(np.float32)
    errors, model = compared(stages / "vae_decoder.onnx", {"latents": latents}, fast=False)
    assert errors["sample"] <= EXACT
    assert (kinds(model)["FusedConv"], kinds(model)["Conv"], kinds(model)["Resize"]) == (3, 33, 0)


def test_taps_are_kept(stages: Path, instruction_set: str) -> None:
    latents = np.random.default_rng(2).normal(size=(1, 32, 4, 5)).astype(np.float32)
    errors, model = compared(stages / "taps" / "vae_decoder.onnx", {"latents": latents}, fast=True)
    assert len(errors) == 11
    assert max(errors.values()) <= BOUNDS[instruction_set]
    # The norm that is a tap stays a value, and so does what follows it.
    assert kinds(model)["Sigmoid"] == 1
    assert kinds(model)["GroupStatistics"] == 28


def test_bands_with_given_statistics(stages: Path, instruction_set: str) -> None:
    rng = np.random.default_rng(3)
    names = [*sorted(p.stem for p in stages.glob("vae_tiles_up*.onnx")), "vae_tiles_out"]
    assert len(names) == 15
    sizes = {"batch": 2, "halo_rows": 9, "band_rows": 7, "band_width": 38}
    for name in names:
        feeds = {}
        for given in ir.load(stages / f"{name}.onnx").graph.inputs:
            assert given.shape is not None and given.name is not None
            shape = [d if isinstance(d, int) else sizes[str(d.value)] for d in given.shape]
            array = rng.normal(0.5, 1, size=shape)
            feeds[given.name] = (array**2 if given.name == "variance" else array).astype(np.float32)
            if given.name == "row_mask":
                feeds[given.name] = (np.arange(9) > 1).astype(np.float32)
        errors, model = compared(stages / f"{name}.onnx", feeds, fast=True)
        assert max(errors.values()) <= BOUNDS[instruction_set], name
        assert set(kinds(model)) <= {"FusedConv", "GroupStatistics"}, name


def started(shape: tuple[int | str, ...], opset: int = 23) -> tuple[ir.Graph, Any, ir.Value]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="graph")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    graph.inputs.append(x)
    return graph, GraphBuilder(graph).op, x


def constant(graph: ir.Graph, name: str, shape: tuple[int, ...]) -> ir.Value:
    array = np.random.default_rng(len(graph.initializers)).normal(size=shape).astype(np.float32)
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    value.const_value = ir.tensor(array, name=name)
    graph.register_initializer(value)
    return value


def finished(graph: ir.Graph, *results: ir.Value, fast: bool | None = None) -> ir.Model:
    for i, result in enumerate(results):
        result.name, result.dtype = f"y{i}", ir.DataType.FLOAT
        graph.outputs.append(result)
    model = ir.Model(graph, ir_version=11)
    if fast is not None:
        FuseConvPass(fast=fast)(model)
    return model


def picture(value: ir.Value, like: ir.Value, channels: int | None = None) -> ir.Value:
    """The builder infers no shape of what it does not know."""
    assert like.shape is not None
    dims = list(like.shape)
    dims[1] = dims[1] if channels is None else channels
    value.shape, value.dtype = ir.Shape(dims), ir.DataType.FLOAT
    return value


def norm_and_silu(graph: ir.Graph, op: Any, x: ir.Value, prefix: str = "n") -> tuple[ir.Value, ir.Value, ir.Value]:
    weights = [constant(graph, f"{prefix}_{kind}", (6,)) for kind in ("weight", "bias")]
    normed = picture(op.GroupNormalization(x, *weights, num_groups=3), x)
    gate = picture(op.Sigmoid(normed), x)
    return normed, gate, picture(op.Mul(normed, gate), x)


def convolved(graph: ir.Graph, op: Any, x: ir.Value, name: str = "w", **attributes: Any) -> ir.Value:
    weight, bias = constant(graph, name, (6, 6, 3, 3)), constant(graph, f"{name}_bias", (6,))
    return picture(op.Conv(x, weight, bias, **{"pads": [1, 1, 1, 1], "kernel_shape": [3, 3], **attributes}), x)


Build = Callable[[ir.Graph, Any, ir.Value], tuple[ir.Value, ...]]


def whole(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    return (op.Add(x, convolved(graph, op, norm_and_silu(graph, op, x)[2])),)


def sum_is_read_twice(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    y = convolved(graph, op, norm_and_silu(graph, op, x)[2])
    return (op.Add(y, x), op.Mul(y, y))


def activation_is_read_twice(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    _, _, activation = norm_and_silu(graph, op, x)
    return (convolved(graph, op, activation), convolved(graph, op, activation, "v"))


def norm_is_an_output(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    normed, _, activation = norm_and_silu(graph, op, x)
    return (convolved(graph, op, activation), normed)


def gate_is_an_output(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    _, gate, activation = norm_and_silu(graph, op, x)
    return (convolved(graph, op, activation), gate)


def gate_of_another_norm(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    normed = norm_and_silu(graph, op, x)[0]
    gate = norm_and_silu(graph, op, picture(op.Mul(x, x), x), "other")[1]
    return (convolved(graph, op, picture(op.Mul(normed, gate), x)),)


def broadcast_sum(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    return (op.Add(convolved(graph, op, x), constant(graph, "channels", (1, 6, 1, 1))),)


def sum_with_itself(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    y = convolved(graph, op, x)
    return (op.Add(y, y),)


def upsampled_otherwise(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    scales = op.Constant(value_floats=[1.0, 1.0, 2.0, 2.0])
    kept = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    large = op.Resize(x, None, scales, nearest_mode="ceil", **kept)
    return (convolved(graph, op, picture(large, x)),)


def cut_without_upsampling(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    ends = [op.Constant(value_ints=[n]) for n in (1, -1, 2)]
    return (convolved(graph, op, picture(op.Slice(x, *ends), x)),)


def upsampled(op: Any, x: ir.Value) -> ir.Value:
    kept = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    assert x.shape is not None
    large = op.Resize(x, None, op.Constant(value_floats=[1.0, 1.0, 2.0, 2.0]), **kept)
    large.shape, large.dtype = ir.Shape([*list(x.shape)[:2], "height2", "width2"]), ir.DataType.FLOAT
    return large


def cut_rows(op: Any, x: ir.Value, start: int, end: int) -> ir.Value:
    ends = [op.Constant(value_ints=[n]) for n in (start, end, 2)]
    return picture(op.Slice(x, *ends), x)


def cut_where_a_pad_is(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    return (convolved(graph, op, cut_rows(op, upsampled(op, x), 1, -1)),)


def cut_where_no_pad_is(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    return (convolved(graph, op, cut_rows(op, upsampled(op, x), 1, -1), pads=[0, 1, 0, 1]),)


def cut_below_a_pad(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    return (convolved(graph, op, cut_rows(op, upsampled(op, x), 0, -1), pads=[1, 1, 0, 1]),)


def sum_of_unnamed_rows(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    """What inference knows of bands: the sum has the shape of the value beside the convolution."""
    y = convolved(graph, op, x)
    y.shape = ir.Shape(["batch", 6, None, None])
    return (picture(op.Add(x, y), x),)


def sum_of_unnamed_rows_with_one(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    row = op.ReduceMean(x, [2])
    row.shape, row.dtype = ir.Shape(["batch", 6, 1, "width"]), ir.DataType.FLOAT
    y = convolved(graph, op, x)
    y.shape = ir.Shape(["batch", 6, None, None])
    return (picture(op.Add(y, row), x),)


def sum_with_one_row(graph: ir.Graph, op: Any, x: ir.Value) -> tuple[ir.Value, ...]:
    row = op.ReduceMean(x, [2])
    assert x.shape is not None
    row.shape, row.dtype = ir.Shape([*list(x.shape)[:2], "rows", x.shape[3]]), ir.DataType.FLOAT
    return (op.Add(convolved(graph, op, x), row),)


# What is left besides FusedConv, and how many of those there are.
GRAPHS: dict[str, tuple[Build, int, Counter[str]]] = {
    "whole": (whole, 1, Counter(GroupStatistics=1)),
    "sum is read twice": (sum_is_read_twice, 1, Counter(GroupStatistics=1, Add=1, Mul=1)),
    "activation is read twice": (activation_is_read_twice, 2, Counter(GroupNormalization=1, Sigmoid=1, Mul=1)),
    "norm is an output": (norm_is_an_output, 1, Counter(GroupNormalization=1, Sigmoid=1, Mul=1)),
    "gate is an output": (gate_is_an_output, 1, Counter(GroupNormalization=1, Sigmoid=1, Mul=1)),
    "gate of another norm": (gate_of_another_norm, 1, Counter(GroupNormalization=2, Sigmoid=2, Mul=4)),
    "broadcast sum": (broadcast_sum, 1, Counter(Add=1)),
    "sum with itself": (sum_with_itself, 1, Counter(Add=1)),
    "upsampled otherwise": (upsampled_otherwise, 1, Counter(Resize=1, Constant=1)),
    "cut without upsampling": (cut_without_upsampling, 1, Counter(Slice=1, Constant=3)),
    "cut where a pad is": (cut_where_a_pad_is, 1, Counter(Resize=1, Slice=1)),
    "cut where no pad is": (cut_where_no_pad_is, 1, Counter()),
    "cut below a pad": (cut_below_a_pad, 1, Counter()),
    "sum of unnamed rows": (sum_of_unnamed_rows, 1, Counter()),
    "sum of unnamed rows with one": (sum_of_unnamed_rows_with_one, 1, Counter(ReduceMean=1, Add=1)),
    "sum with one row": (sum_with_one_row, 1, Counter(ReduceMean=1, Add=1)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_something_else_reads_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", "portable")
    build, fused, rest = GRAPHS[name]

    def made() -> ir.Model:
        graph, op, x = started(("batch", 6, "height", "width"))
        return finished(graph, *build(graph, op, x))

    model = made()
    # GroupNormalization has no kernel of its own and its body is exact enough here.
    feeds = {"x": np.random.default_rng(4).normal(size=(2, 6, 9, 34)).astype(np.float32)}
    expected = outputs(made(), feeds)
    assert FuseConvPass(fast=True)(model).modified
    left = kinds(model)
    assert left.pop("FusedConv") == fused
    assert {k: n for k, n in left.items() if k != "Constant"} == {k: n for k, n in rest.items() if k != "Constant"}
    for key, value in outputs(model, feeds).items():
        assert relative(value, expected[key]) <= 2e-5, key
    assert not FuseConvPass(fast=True)(model).modified


@pytest.mark.parametrize(
    "attributes",
    [{"strides": [2, 2]}, {"dilations": [2, 2]}, {"group": 2}, {"auto_pad": "SAME_UPPER"}],
    ids=lambda a: next(iter(a)),
)
def test_other_convolutions_are_left_alone(attributes: dict[str, Any]) -> None:
    graph, op, x = started((1, 6, 8, 8))
    weight = constant(graph, "w", (6, 6 // attributes.get("group", 1), 3, 3))
    model = finished(graph, op.Conv(x, weight, **attributes))
    assert not FuseConvPass(fast=True)(model).modified
    assert "intaglio" not in model.graph.opset_imports


@pytest.mark.parametrize(("size", "is_taken"), [((8, 8), True), ((5, 13), False)], ids=str)
def test_kernels_of_more_taps_are_left_alone(size: tuple[int, int], is_taken: bool) -> None:
    graph, op, x = started((1, 6, 16, 16))
    model = finished(graph, op.Conv(x, constant(graph, "w", (6, 6, *size))))
    assert FuseConvPass(fast=True)(model).modified == is_taken


def test_a_weight_that_is_given_is_left_alone() -> None:
    graph, op, x = started((1, 6, 8, 8))
    weight = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([6, 6, 3, 3]))
    graph.inputs.append(weight)
    assert not FuseConvPass(fast=True)(finished(graph, op.Conv(x, weight))).modified
    half = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="half")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape([1, 6, 8, 8]))
    half.inputs.append(x)
    y = GraphBuilder(half).op.Conv(x, constant(half, "w", (6, 6, 3, 3)))
    assert not FuseConvPass(fast=True)(finished(half, y)).modified
