"""What a package stores of packed weights: how much, each once, the same bytes from every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import coreml_weights
import numpy as np
import onnx_ir as ir
import pytest
from coreml_weights import TERNARY, VOCABULARY, WIDTH, initializer, random_rows

from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.evaluator.package import read_program
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.stats import weight_stats
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN

ORDERS = ("lut", "lut-compact", "lut-fp16", "int4")
COUNT = VOCABULARY * WIDTH + 2 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("model") / "tied.onnx"
    return path, coreml_weights.write_tied_model(path)


@pytest.fixture(scope="module")
def packages(model: tuple[Path, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of packages, each written by a process of its own, in which sets have an order of their own."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        subprocess.run(
            [sys.executable, coreml_weights.__file__, str(model[0]), str(folder)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed + 1)},
        )
    return folders


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("order", ORDERS)
def test_two_processes_write_the_same_bytes(packages: list[Path], order: str) -> None:
    one, two = (_files(folder / f"{order}.mlpackage") for folder in packages)
    assert one == two
    assert {Path(name).name for name in one} == {"Manifest.json", "model.mlmodel", "weight.bin"}


@pytest.mark.parametrize("order", ORDERS)
def test_values(model: tuple[Path, np.ndarray], packages: list[Path], order: str) -> None:
    evaluator = Evaluator(packages[0] / f"{order}.mlpackage")
    (found,) = evaluator.run({"ids": np.arange(VOCABULARY, dtype=np.int32)}).values()
    assert np.linalg.norm(found - model[1]) <= 1e-6 * np.linalg.norm(model[1])


# Two bits and a float16 scale for 128 ternary weights, and what a form adds; four bits, a scale and an offset for 64.
LAYER_BYTES = {
    "lut": WIDTH * WIDTH * (2 + 16 / 128) / 8 + WIDTH * 2 * 4 / 2,  # a table of int8 for both
    "lut-compact": WIDTH * WIDTH * (2 + 16 / 128) / 8,
    "lut-fp16": WIDTH * WIDTH * (2 + 64 / 128) / 8,
    "int4": WIDTH * WIDTH * (4 + 16 / 128) / 8,
}


@pytest.mark.parametrize("order", ORDERS)
def test_statistics_count_what_is_stored(packages: list[Path], order: str) -> None:
    package = packages[0] / f"{order}.mlpackage"
    stats = weight_stats(package)
    assert stats.quantized.count == COUNT
    # Each product of MIL has a bias: here zeros, as many as there are rows, in the dtype of the unpacked weight.
    assert stats.weights.count == COUNT + WIDTH + VOCABULARY
    assert stats.weights.bytes == stats.quantized.bytes + WIDTH * 2 + VOCABULARY * 4 + 2 * 64
    stored = 2 * LAYER_BYTES[order] + VOCABULARY * WIDTH * (4 + 2 * 32 / 64) / 8
    # A record of 64 bytes for each blob, of which there are 3 of the table and 2 of a layer, or 5 of both.
    assert stored + 7 * 64 <= stats.quantized.bytes <= stored + 8 * 64
    assert stats.quantized.bits == pytest.approx(stats.quantized.bytes * 8 / COUNT)
    (weights,) = package.rglob("weight.bin")
    assert 64 <= weights.stat().st_size - stats.weights.bytes <= 64 * 11  # a header, and what fills up to 64 bytes
    assert stats.bytes == sum(len(data) for data in _files(package).values())
    # The table is one weight for both of its readers.
    assert (stats.ops["gather"], stats.ops["linear"], stats.fused_attentions) == (1, 3, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_weight_with_two_readers_is_unpacked_once(packages: list[Path], order: str) -> None:
    block = read_program(packages[0] / f"{order}.mlpackage").functions["main"].block
    unpacking = [op.type for op in block.all_operations() if op.type.startswith("constexpr_")]
    assert len(unpacking) == 1 + 2 * (2 if order in ("lut", "lut-compact") else 1)


def _quantized_convolution(dtype: ir.DataType, x: ir.Value) -> ir.Model:
    rng = np.random.default_rng()
    shape = (16, 32, 3, 3)
    codes = rng.integers(-8, 8, shape).astype(dtype.numpy())
    weights = [
        initializer("codes", codes),
        initializer("scale", rng.uniform(0.01, 0.02, 16).astype(np.float32)),
    ]
    unpacked = ir.node("DequantizeLinear", weights, {"axis": 0})
    made = ir.node("Conv", [x, unpacked.outputs[0]], {"pads": [1, 1, 1, 1]})
    for node in (unpacked, made):
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    made.outputs[0].name = "y"
    graph = ir.Graph([x], made.outputs, nodes=[unpacked, made], initializers=weights, opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(("dtype", "bits"), [(ir.DataType.INT8, 8), (ir.DataType.INT4, 4)], ids=["int8", "int4"])
def test_convolutions_stay_compressed(dtype: ir.DataType, bits: int, tmp_path: Path) -> None:
    x = ir.Value(name="x", shape=ir.Shape([1, 32, 6, 5]), type=ir.TensorType(ir.DataType.FLOAT))
    model = _quantized_convolution(dtype, x)
    unpacked = np.asarray(model.graph.initializers["codes"].const_value).astype(np.float64)  # type: ignore[arg-type]
    weight = unpacked * np.asarray(model.graph.initializers["scale"].const_value).reshape(-1, 1, 1, 1)
    path = tmp_path / "conv.mlpackage"
    write_package(convert(model, "conv.onnx"), path)
    stats = weight_stats(path)
    assert stats.quantized.count == stats.weights.count == weight.size
    assert stats.quantized.bytes == weight.size * bits // 8 + 16 * 4 + 2 * 64
    fed = np.random.default_rng().standard_normal((1, 32, 6, 5)).astype(np.float32)
    (found,) = Evaluator(path).run({"x": fed}).values()
    padded = np.pad(fed, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    wanted = np.einsum("bchwij,ocij->bohw", windows, weight)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def _one_product(folder: Path) -> Path:
    x = ir.Value(name="x", shape=ir.Shape([4, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT))
    held = coreml_weights.parts("w", random_rows(WIDTH, WIDTH, TERNARY))
    node = ir.node("GroupedQuantMatMul", [x, *held], coreml_weights.attributes(TERNARY), domain=DOMAIN)
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=held, opset_imports={"": 23, DOMAIN: 1}, name="g")
    ir.save(ir.Model(graph, ir_version=11), folder / "m.onnx", external_data="w.data", size_threshold_bytes=0)
    return folder / "m.onnx"


def test_weights_that_are_gone_when_the_package_is_written(tmp_path: Path) -> None:
    path = _one_product(tmp_path)
    converted = convert(ir.load(path), "m.onnx")
    (tmp_path / "w.data").unlink()
    with pytest.raises(CompileError, match=r"m\.onnx: the weight 'w\.codes' cannot be read"):
        write_package(converted, tmp_path / "m.mlpackage")
    assert not (tmp_path / "m.mlpackage").exists()


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    path = _one_product(tmp_path)
    converted = convert(ir.load(path), "m.onnx")
    os.truncate(tmp_path / "w.data", 100)
    with pytest.raises(CompileError, match=r"m\.onnx: the weight 'w\.codes' cannot be read"):
        write_package(converted, tmp_path / "m.mlpackage")
