"""Packages as a whole: manifest, features, states, functions, control flow, errors, taps."""

import ast
import json
import re
import shutil
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from mil_packages import build, error, numbers, run, save

from intaglio.engines.coreml import evaluator as package
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.evaluator.registry import OPS
from intaglio.errors import EngineError

F32 = "float32"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``tanh(x @ weight.T) + b`` of x and b; the weight lies in the weight file."""
    weight = numbers(5, 4)

    def body(x, b):
        return mb.add(x=mb.tanh(x=mb.linear(x=x, weight=weight), name="inner"), y=b)

    path = save(build(body, {"x": ((3, 4), F32), "b": ((5,), F32)}), tmp_path_factory.mktemp("m") / "m.mlpackage")
    return path, weight


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "copy.mlpackage"))


def test_only_protobuf_classes_of_coremltools_are_imported():
    files = sorted(Path(package.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(name == "coremltools.proto" for name in names if name and name.startswith("coremltools")), file


def test_outputs_and_taps(saved):
    path, weight = saved
    x, b = numbers(3, 4), numbers(5)
    evaluator = Evaluator(path)
    found = evaluator.run({"x": x, "b": b}, taps=["inner"])
    expected = np.tanh(x.astype(np.float64) @ weight.T.astype(np.float64))
    assert list(found) == ["y0", "inner"]
    assert error(found["inner"], expected) <= 1e-6
    assert error(found["y0"], expected + b) <= 1e-6
    assert found["y0"].dtype == np.float32
    with pytest.raises(EngineError, match="no value 'outer' to tap"):
        evaluator.run({"x": x, "b": b}, taps=["outer"])
    # Other widths are converted where they fit.
    again = evaluator.run({"x": x.astype(np.float64), "b": b})
    np.testing.assert_array_equal(again["y0"], found["y0"])


def test_feeds_that_do_not_fit(saved):
    evaluator = Evaluator(saved[0])
    x, b = numbers(3, 4), numbers(5)
    for feeds, message in (
        ({"x": x}, "the input 'b' is missing; the inputs are"),
        ({"x": x, "b": b, "c": b}, "there is no input 'c'"),
        ({"x": x.T, "b": b}, r"'x' has shape \[4, 3\], expected \[3, 4\]"),
        ({"x": x.astype(np.int32), "b": b}, "'x' is int32, expected float32"),
    ):
        with pytest.raises(EngineError, match=message):
            evaluator.run(feeds)
    with pytest.raises(EngineError, match="has no function 'other'; it has"):
        evaluator.run({"x": x, "b": b}, function="other")


def test_integers_that_do_not_fit(tmp_path):
    path = save(build(lambda i: mb.add(x=i, y=1), {"i": ((2,), "int32")}), tmp_path / "m.mlpackage")
    evaluator = Evaluator(path)
    np.testing.assert_array_equal(evaluator.run({"i": np.array([1, 2], np.int64)})["y0"], [2, 3])
    with pytest.raises(EngineError, match="holds integers that int32 cannot"):
        evaluator.run({"i": np.array([1, 2**31], np.int64)})


def test_damaged_packages(copied):
    manifest = copied / "Manifest.json"
    whole = json.loads(manifest.read_text())
    model = next(key for key, item in whole["itemInfoEntries"].items() if item["path"].endswith(".mlmodel"))
    other = next(key for key in whole["itemInfoEntries"] if key != model)

    def fails(message, **changes):
        manifest.write_text(json.dumps({**whole, **changes}))
        with pytest.raises(EngineError, match=message):
            Evaluator(copied)

    entries = whole["itemInfoEntries"]
    fails("is of version '2.0.0', expected '1.0.0'", fileFormatVersion="2.0.0")
    fails("names the root model 'X'", rootModelIdentifier="X")
    fails("is not listed", itemInfoEntries={model: entries[model]})
    fails("which does not exist", itemInfoEntries={**entries, "X": {"path": "com.apple.CoreML/gone"}})
    fails("outside of the package", itemInfoEntries={**entries, "X": {"path": "../../secret"}})
    fails("is damaged", itemInfoEntries={**entries, other: {}})
    manifest.write_text("{")
    with pytest.raises(EngineError, match="is damaged"):
        Evaluator(copied)
    manifest.write_text(json.dumps(whole))
    spec = copied / "Data" / entries[model]["path"]
    spec.write_bytes(spec.read_bytes()[:-7])
    with pytest.raises(EngineError, match=r"model\.mlmodel is damaged"):
        Evaluator(copied)
    manifest.unlink()
    with pytest.raises(EngineError, match="is not a Core ML package"):
        Evaluator(copied)


def changed(path, change):
    """The package with its spec changed by ``change(main block)``."""
    from coremltools.proto import Model_pb2

    file = path / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec = Model_pb2.Model.FromString(file.read_bytes())
    function = spec.mlProgram.functions["main"]
    change(function.block_specializations[function.opset])
    file.write_bytes(spec.SerializeToString())
    return Evaluator(path)


def operation(block, kind):
    return next(item for item in block.operations if item.type == kind)


def test_unknown_ops_and_arguments_are_named(copied):
    def unknown_op(block):
        operation(block, "tanh").type = "tanh_of_tomorrow"

    def unknown_argument(block):
        item = operation(block, "tanh_of_tomorrow")
        item.type = "tanh"
        item.inputs["alpha"].CopyFrom(item.inputs["x"])

    feeds = {"x": numbers(3, 4), "b": numbers(5)}
    with pytest.raises(EngineError, match=r"the op 'tanh_of_tomorrow' \('inner'\) is not supported"):
        changed(copied, unknown_op).run(feeds)
    with pytest.raises(EngineError, match="tanh 'inner' has an argument 'alpha', which is not known here"):
        changed(copied, unknown_argument).run(feeds)


def test_declared_types_are_checked(copied):
    def narrower(block):
        operation(block, "tanh").outputs[0].type.tensorType.dimensions[0].constant.size = 2

    def integer(block):
        kind = operation(block, "tanh").outputs[0].type.tensorType
        kind.dimensions[0].constant.size = 3
        kind.dataType = 23

    feeds = {"x": numbers(3, 4), "b": numbers(5)}
    with pytest.raises(EngineError, match=r"tanh 'inner' gives shape \[3, 5\], the program declares \[2, 5\]"):
        changed(copied, narrower).run(feeds)
    with pytest.raises(EngineError, match="tanh 'inner' computes float32, the program declares int32"):
        changed(copied, integer).run(feeds)


def test_float16_conversion_of_a_whole_network(tmp_path):
    """Default passes and float16, as a model is shipped: near the float32 numbers, and not equal to them."""
    weights = [numbers(32, 16) / 4, numbers(32, 32) / 6, numbers(8, 32) / 6]
    x = numbers(5, 16)

    def body(x):
        for weight in weights[:-1]:
            x = mb.layer_norm(x=mb.gelu(x=mb.linear(x=x, weight=weight)), axes=[-1], epsilon=1e-5)
        return mb.softmax(x=mb.linear(x=x, weight=weights[-1]))

    model = ct.convert(
        build(body, {"x": (x.shape, F32)}), source="milinternal", convert_to="mlprogram", skip_model_load=True,
        minimum_deployment_target=ct.target.iOS18, compute_precision=ct.precision.FLOAT16,
    )  # fmt: skip
    model.save(str(tmp_path / "m.mlpackage"))
    evaluator = Evaluator(tmp_path / "m.mlpackage")
    (found,) = evaluator.run({"x": x}).values()
    expected = torch.from_numpy(x).double()
    for weight in weights[:-1]:
        expected = torch.nn.functional.gelu(expected @ torch.from_numpy(weight).double().T)
        expected = torch.nn.functional.layer_norm(expected, [32])
    expected = torch.softmax(expected @ torch.from_numpy(weights[-1]).double().T, -1)
    assert 1e-5 < error(found, expected.numpy()) <= 5e-3


def test_flexible_shapes(tmp_path):
    ranged, listed = tmp_path / "ranged.mlpackage", tmp_path / "listed.mlpackage"
    for path, shape in (
        (ranged, ct.Shape((1, ct.RangeDim(2, 6), 4))),
        (listed, ct.EnumeratedShapes([(1, 2, 4), (1, 5, 4)])),
    ):
        length = ct.converters.mil.mil.get_new_symbol()
        program = build(
            lambda x: [mb.reduce_sum(x=x, axes=[1]), mb.shape(x=mb.concat(values=[x, x], axis=1))],
            {"x": ((1, length, 4), F32)},
        )
        save(program, path, inputs=[ct.TensorType(name="x", shape=shape)])
    for length in (2, 5):
        x = numbers(1, length, 4)
        for path in (ranged, listed):
            found = Evaluator(path).run({"x": x})
            assert error(found["y0"], x.sum(1)) <= 1e-6
            np.testing.assert_array_equal(found["y1"], [1, 2 * length, 4])
    with pytest.raises(EngineError, match=r"has shape \[1, 7, 4\], expected \[1, 2\.\.6, 4\]"):
        Evaluator(ranged).run({"x": numbers(1, 7, 4)})
    with pytest.raises(EngineError, match=r"has shape \[1, 3, 4\], expected one of \[1, 2, 4\], \[1, 5, 4\]"):
        Evaluator(listed).run({"x": numbers(1, 3, 4)})


def test_a_cache_as_state(tmp_path):
    """Two steps of a cache of float16: what the first wrote, the second reads."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 2), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.int32),
            mb.StateTensorSpec((4, 2), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )  # fmt: skip
    def program(row, at, cache):
        begin = mb.concat(values=[at, [0]], axis=0)
        end = mb.concat(values=[mb.add(x=at, y=1), [2]], axis=0)
        before = mb.read_state(input=cache)
        filled = mb.slice_update(x=before, update=row, begin=begin, end=end)
        total = mb.reduce_sum(x=mb.coreml_update_state(state=cache, value=filled), axes=[0], name="total")
        # What was read first stays what it was.
        return total, mb.reduce_sum(x=before, axes=[0], name="before")

    evaluator = Evaluator(save(program, tmp_path / "m.mlpackage"))
    state = evaluator.make_state()
    assert {name: (array.dtype, array.shape) for name, array in state.items()} == {"cache": (np.float16, (4, 2))}
    rows = np.random.default_rng().standard_normal((2, 1, 2)).astype(np.float16)
    for step, row in enumerate(rows):
        found = evaluator.run({"row": row, "at": np.array([step], np.int32)}, state=state)
        assert error(found["before"], rows[:step].astype(np.float64).sum((0, 1))) <= 1e-3
        np.testing.assert_array_equal(state["cache"][step], row[0])
    assert error(found["total"], rows.astype(np.float64).sum((0, 1))) <= 1e-3
    assert not state["cache"][2:].any()
    assert not evaluator.make_state()["cache"].any()
    feeds = {"row": rows[0], "at": np.zeros(1, np.int32)}
    with pytest.raises(EngineError, match="the state 'cache' was not given; make it with make_state"):
        evaluator.run(feeds)
    with pytest.raises(EngineError, match=r"the state 'cache' is float32 \[4, 2\], expected FLOAT16"):
        evaluator.run(feeds, state={"cache": np.zeros((4, 2), np.float32)})


def test_functions_that_share_weights(tmp_path):
    weight = numbers(6, 4)
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, rows in (("short", 2), ("long", 5)):
        path = save(
            build(lambda x: mb.linear(x=x, weight=weight), {"x": ((rows, 4), F32)}), tmp_path / f"{name}.mlpackage"
        )
        descriptor.add_function(str(path), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "short"
    both = tmp_path / "both.mlpackage"
    ct.utils.save_multifunction(descriptor, str(both))
    evaluator = Evaluator(both)
    assert set(evaluator.program.functions) == {"short", "long"}
    assert evaluator.program.default_function == "short"
    for name, rows in (("short", 2), ("long", 5)):
        x = numbers(rows, 4)
        assert error(evaluator.run({"x": x}, function=name)["y0"], x @ weight.T) <= 1e-6


def test_branches_and_loops(tmp_path):
    x = numbers(3)

    def body(x, n):
        n = mb.squeeze(x=n)
        positive = mb.greater(x=n, y=0)
        # Blocks see the values around them.
        doubled = mb.add(x=x, y=x)
        chosen = mb.cond(
            pred=positive, _true_fn=lambda: mb.mul(x=doubled, y=3.0), _false_fn=lambda: mb.sub(x=doubled, y=1.0)
        )
        count, total = mb.while_loop(
            _cond=lambda i, total: mb.less(x=i, y=n),
            _body=lambda i, total: (
                mb.add(x=i, y=1),
                mb.add(x=total, y=mb.mul(x=doubled, y=mb.cast(x=i, dtype="fp32"))),
            ),
            loop_vars=(mb.sub(x=n, y=n), mb.sub(x=x, y=x)),
        )
        return [chosen, count, total]

    program = build(body, {"x": ((3,), F32), "n": ((1,), "int32")})
    evaluator = Evaluator(save(program, tmp_path / "m.mlpackage"))
    for n in (4, 0):
        found = list(evaluator.run({"x": x, "n": np.array([n], np.int32)}).values())
        assert error(found[0], 6 * x if n else 2 * x - 1) <= 1e-6
        assert found[1] == n
        assert error(found[2], 2 * x * sum(range(n))) <= 1e-6


def test_lists(tmp_path):
    x = numbers(3, 2)

    def body(x):
        ls = mb.make_list(init_length=3, elem_shape=(2,), dynamic_length=False)
        for place in (2, 0):
            row = mb.slice_by_index(
                x=x, begin=[place, 0], end=[0, 0], end_mask=[False, True], squeeze_mask=[True, False]
            )
            ls = mb.list_write(ls=ls, index=place, value=row)
        ls = mb.list_scatter(ls=ls, indices=[1], value=mb.slice_by_size(x=x, begin=[0, 0], size=[1, 2]))
        return [mb.list_read(ls=ls, index=1), mb.list_gather(ls=ls, indices=[2, 0, 1]), mb.list_length(ls=ls)]

    found = run(tmp_path, body, {"x": x})
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_array_equal(found[1], x[[2, 0, 0]])
    assert found[2] == 3


def test_every_op_is_covered_by_a_test():
    """Each registered op is named in one of the evaluator's tests, as the builder calls it or in a table."""
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_evaluator*.py"))
    named = set(re.findall(r"\bmb\.(\w+)", text)) | set(re.findall(r'"(\w+)"', text))
    # These the builder writes by itself.
    written = {"const", "write_state"}
    missing = [name for name in OPS if not {name, name.removeprefix("reduce_")} & (named | written)]
    assert missing == []
