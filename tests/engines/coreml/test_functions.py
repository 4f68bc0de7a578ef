"""Several functions in one package, against coremltools' own way to join them."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path

import coremltools as ct
import numpy as np
import onnx
import pytest
from coreml_models import model, packaged
from coremltools.proto import Model_pb2
from peak_memory import peak_memory

from intaglio.engines.coreml.description import PackageDescription, describe
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.functions import merge_functions
from intaglio.engines.coreml.package import write_package
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
HEIGHT, WIDTH = 48, 64
GRAPH = f"""g (float[rows,{HEIGHT}] x) => (float[rows,{WIDTH}] y) {{
    d = DequantizeLinear<axis = 0, block_size = 16>(q, s) t = MatMul(x, w) u = MatMul(x, d) y = Add(t, u) }}"""
SIZES = {"short": 2, "long": 5}


def graph() -> onnx.ModelProto:
    """Products with a weight of float32 and with one of 4 bits in blocks."""
    rng = np.random.default_rng(3)
    proto = model(GRAPH, opset=21)
    weights = {
        "w": rng.standard_normal((HEIGHT, WIDTH)).astype(np.float32),
        "s": rng.random((HEIGHT // 16, WIDTH)).astype(np.float32),
    }
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    codes = rng.integers(-8, 8, HEIGHT * WIDTH)
    packed = (codes[0::2] & 15) | ((codes[1::2] & 15) << 4)
    proto.graph.initializer.append(
        onnx.TensorProto(
            name="q", data_type=onnx.TensorProto.INT4, dims=[HEIGHT, WIDTH], raw_data=packed.astype(np.uint8).tobytes()
        )
    )
    return proto


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("functions")
    paths = {name: folder / f"{name}.mlpackage" for name in SIZES}
    for name, path in paths.items():
        write_package(packaged(graph(), {"rows": SIZES[name]}), path)
    return paths


def digests(package: Path) -> dict[str, str]:
    files = (file for file in package.rglob("*") if file.is_file())
    return {str(file.relative_to(package)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def spec(package: Path) -> Model_pb2.Model:
    return Model_pb2.Model.FromString((package / MODEL).read_bytes())


def test_each_function_computes_what_its_package_did(packages: dict[str, Path], tmp_path: Path) -> None:
    merge_functions(packages, tmp_path / "m.mlpackage")
    evaluator = Evaluator(tmp_path / "m.mlpackage")
    assert set(evaluator.program.functions) == set(SIZES)
    assert evaluator.program.default_function == "short"
    for name, rows in SIZES.items():
        x = np.random.default_rng().standard_normal((rows, HEIGHT)).astype(np.float32)
        expected = Evaluator(packages[name]).run({"x": x})["y"]
        np.testing.assert_array_equal(evaluator.run({"x": x}, name)["y"], expected)
    # The default one is that of two rows.
    assert evaluator.run({"x": np.zeros((2, HEIGHT), np.float32)})["y"].shape == (2, WIDTH)


def test_weights_are_stored_once_and_nothing_depends_on_the_day(packages: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.mlpackage"
    merge_functions(packages, path)
    first = digests(path)
    # The second function has no weights of its own.
    assert (path / WEIGHTS).read_bytes() == (packages["short"] / WEIGHTS).read_bytes()
    merge_functions(packages, path)
    assert digests(path) == first
    assert [file.name for file in tmp_path.iterdir()] == ["m.mlpackage"]


def test_it_is_what_coremltools_makes(packages: dict[str, Path], tmp_path: Path) -> None:
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, package in packages.items():
        descriptor.add_function(str(package), "main", name)
    descriptor.default_function_name = "short"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "theirs.mlpackage"))
    merge_functions(packages, tmp_path / "ours.mlpackage")
    ours, theirs = spec(tmp_path / "ours.mlpackage"), spec(tmp_path / "theirs.mlpackage")
    ours.description.ClearField("metadata")
    assert ours.description == theirs.description
    assert ours.specificationVersion == theirs.specificationVersion
    ours_size, theirs_size = ((tmp_path / f"{who}.mlpackage" / WEIGHTS).stat().st_size for who in ("ours", "theirs"))
    assert ours_size == theirs_size


def test_a_package_of_one_function(packages: dict[str, Path], tmp_path: Path) -> None:
    merge_functions({"main": packages["long"]}, tmp_path / "m.mlpackage")
    x = np.random.default_rng().standard_normal((5, HEIGHT)).astype(np.float32)
    expected = Evaluator(packages["long"]).run({"x": x})["y"]
    np.testing.assert_array_equal(Evaluator(tmp_path / "m.mlpackage").run({"x": x})["y"], expected)


def test_weights_that_differ_are_kept_apart(packages: dict[str, Path], tmp_path: Path) -> None:
    other = graph()
    (weight,) = (tensor for tensor in other.graph.initializer if tensor.name == "w")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + 1, "w"))
    write_package(packaged(other, {"rows": 2}), tmp_path / "other.mlpackage")
    merge_functions({"one": packages["short"], "two": tmp_path / "other.mlpackage"}, tmp_path / "m.mlpackage")
    evaluator = Evaluator(tmp_path / "m.mlpackage")
    x = np.ones((2, HEIGHT), np.float32)
    found = [evaluator.run({"x": x}, name)["y"] for name in ("one", "two")]
    np.testing.assert_allclose(found[1] - found[0], HEIGHT, rtol=1e-4)


def test_memory_holds_one_weight_at_a_time(tmp_path: Path) -> None:
    count, size = 6, 1024
    proto = model(f"g (float[rows,{size}] x) => (float[rows,{size}] y) {{ y = Relu(x) }}")
    del proto.graph.node[:]
    names = ["x", *(f"h{i}" for i in range(1, count)), "y"]
    for i, (before, after) in enumerate(itertools.pairwise(names)):
        weight = np.random.default_rng(i).standard_normal((size, size)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{i}"))
        proto.graph.node.append(onnx.NodeProto(op_type="MatMul", input=[before, f"w{i}"], output=[after]))
    paths = {name: tmp_path / f"{name}.mlpackage" for name in SIZES}
    for name, path in paths.items():
        write_package(packaged(proto, {"rows": SIZES[name]}), path)
    with peak_memory() as peak:
        merge_functions(paths, tmp_path / "m.mlpackage")
    one = 4 * size * size
    assert peak.nbytes < 2.2 * one
    assert count * one < (tmp_path / "m.mlpackage" / WEIGHTS).stat().st_size < count * one * 1.01


def test_packages_without_weights(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.mlpackage" for name in SIZES}
    for path in paths.values():
        write_package(packaged(model("g (float[rows,3] x) => (float[rows,3] y) { y = Relu(x) }"), {"rows": 2}), path)
    merge_functions(paths, tmp_path / "m.mlpackage")
    assert not (tmp_path / "m.mlpackage" / WEIGHTS).parent.exists()
    x = np.array([[1, -1, 2], [-3, 0, 4]], np.float32)
    np.testing.assert_array_equal(Evaluator(tmp_path / "m.mlpackage").run({"x": x}, "long")["y"], np.maximum(x, 0))


def test_the_function_for_given_sizes() -> None:
    def function(rows: int | Dim, name: str = "rows"):
        sizes = {name: rows} if isinstance(rows, int) else {}
        return describe(packaged(graph(), {"rows": rows}), sizes)

    functions = {"short": function(2), "long": function(5), "any": function(Dim(min=8, max=16))}
    package = PackageDescription(default_function="short", functions=functions)
    assert functions["any"].inputs[0].shape == ("rows", HEIGHT)
    assert functions["any"].outputs[0].shape == ("rows", WIDTH)
    assert package.function_for({"rows": 5, "batch": 1}) == "long"
    assert package.function_for({"rows": 9}) == "any"
    for rows in (6, 7, 17):
        with pytest.raises(
            InputError, match=rf"no function for the sizes rows={rows}; it has short \(rows=2\); .*8..16"
        ):
            package.function_for({"rows": rows})
    x = np.ones((9, HEIGHT), np.float64)
    assert functions["any"].pack({"x": x})["x"].dtype == np.float32


def test_what_cannot_be_merged(packages: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.mlpackage"
    for names in ({}, {"a b": packages["short"]}, {"": packages["short"]}):
        with pytest.raises(InputError, match="functions of a package have names such as"):
            merge_functions(names, path)
    with pytest.raises(EngineError, match=r"none.mlpackage is not a Core ML package"):
        merge_functions({"main": tmp_path / "none.mlpackage"}, path)
    merge_functions(packages, path)
    before = digests(path)
    with pytest.raises(EngineError, match="holds 2 functions, expected a program with one"):
        merge_functions({"main": path}, path)
    broken = tmp_path / "broken.mlpackage"
    shutil.copytree(packages["short"], broken)
    whole = (broken / WEIGHTS).read_bytes()
    (broken / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(EngineError, match=r"weight.bin ends at \d+, a blob goes on"):
        merge_functions({"main": broken}, path)
    (broken / WEIGHTS).write_bytes(bytes(len(whole)))
    with pytest.raises(EngineError, match="no blob lies at"):
        merge_functions({"main": broken}, path)
    (broken / WEIGHTS).unlink()
    with pytest.raises(EngineError, match="cannot read the weight file"):
        merge_functions({"main": broken}, path)
    (broken / MODEL).write_bytes(b"\xff" * 9)
    with pytest.raises(EngineError, match="is not a Core ML package"):
        merge_functions({"main": broken}, path)
    assert digests(path) == before
