"""A loaded stage: which function runs, what goes in and out, and what is said where that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from intaglio.engines.coreml.description import DimRange, FunctionDescription, PackageDescription, TensorDescription
from intaglio.engines.coreml.session import CoreMLSession
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, StageInfo, TensorInfo

STAGE = StageInfo(
    file="double.onnx",
    sha256="0" * 64,
    inputs=(
        TensorInfo(name="x.in", dtype="float32", shape=("batch", "tokens")),
        TensorInfo(name="ids", dtype="int64", shape=("tokens",)),
        TensorInfo(name="time", dtype="float32", shape=()),
    ),
    outputs=(
        TensorInfo(name="y", dtype="float32", shape=("batch", "tokens")),
        TensorInfo(name="is_even", dtype="bool", shape=("tokens",)),
    ),
)
DIMS = {"batch": Dim(min=1, max=2), "tokens": Dim(min=1, max=8)}


def tensor(name: str, package_name: str, dtype: Any, package_dtype: Any, shape: tuple[int | str, ...]) -> Any:
    return TensorDescription(
        name=name, package_name=package_name, dtype=dtype, package_dtype=package_dtype, shape=shape
    )


def function(sizes: dict[str, int], dims: dict[str, DimRange] | None = None) -> FunctionDescription:
    return FunctionDescription(
        inputs=(
            tensor("x.in", "x_in", "float32", "float16", ("batch", "tokens")),
            tensor("ids", "ids", "int64", "int32", ("tokens",)),
            tensor("time", "time", "float32", "float32", ()),
        ),
        outputs=(
            tensor("y", "y_1", "float32", "float16", ("batch", "tokens")),
            tensor("is_even", "is_even", "bool", "int32", ("tokens",)),
        ),
        sizes=sizes,
        dims=dims or {},
    )


class Doubling:
    """Doubles, in the dtypes and names of the package."""

    def __init__(self, name: str) -> None:
        self.name, self.fed = name, dict[str, np.ndarray]()

    def predict(self, data: dict[str, np.ndarray], state: Any = None) -> Mapping[str, np.ndarray]:
        assert state is None
        self.fed = dict(data)
        data.clear()  # what Core ML's own does with a caller's dict is not to matter
        even = (self.fed["ids"] % 2 == 0).astype(np.int32)
        return {"y_1": self.fed["x_in"] * np.float16(2), "is_even": even, "more": even}

    def make_state(self) -> Any:
        raise AssertionError("there are no states")


def feeds(batch: int, tokens: int) -> dict[str, np.ndarray]:
    return {
        "x.in": np.arange(batch * tokens, dtype=np.float32).reshape(batch, tokens) / 8,
        "ids": np.arange(tokens),
        "time": np.float32(0.5),
    }


@pytest.fixture
def opened() -> list[Doubling]:
    return []


@pytest.fixture
def session(opened: list[Doubling]) -> CoreMLSession:
    functions = {
        "tokens2": function({"batch": 1, "tokens": 2}),
        "tokens4": function({"tokens": 4}, {"batch": DimRange(min=1, max=2)}),
    }

    def open_function(name: str) -> Doubling:
        opened.append(Doubling(name))
        return opened[-1]

    return CoreMLSession(
        "double", STAGE, DIMS, PackageDescription(default_function="tokens2", functions=functions), open_function
    )


def test_values_go_in_and_out_in_the_dtypes_and_names_of_the_package(
    session: CoreMLSession, opened: list[Doubling]
) -> None:
    given = feeds(1, 2)
    made = session.run(given)
    assert given.keys() == {"x.in", "ids", "time"}
    assert {name: (value.dtype, value.shape) for name, value in opened[0].fed.items()} == {
        "x_in": (np.float16, (1, 2)),
        "ids": (np.int32, (2,)),
        "time": (np.float32, (1,)),
    }
    assert {name: value.dtype for name, value in made.items()} == {"y": np.float32, "is_even": np.bool_}
    np.testing.assert_array_equal(made["y"], 2 * given["x.in"])
    np.testing.assert_array_equal(made["is_even"], [True, False])
    assert session.run(given, ["is_even"]).keys() == {"is_even"}
    assert session.run(given, [], resident=["y"]) == {}


def test_the_function_of_the_sizes_runs_and_is_loaded_once(session: CoreMLSession, opened: list[Doubling]) -> None:
    assert not opened
    for batch, tokens in ((2, 4), (1, 4), (1, 2), (2, 4)):
        assert session.run(feeds(batch, tokens))["y"].shape == (batch, tokens)
    assert [model.name for model in opened] == ["tokens4", "tokens2"]


def test_sizes_without_a_function_are_named(session: CoreMLSession, opened: list[Doubling]) -> None:
    with pytest.raises(InputError, match=r"no function for the sizes batch=1, tokens=3; it has tokens2 .*tokens4"):
        session.run(feeds(1, 3))
    with pytest.raises(InputError, match="batch=2, tokens=2"):
        session.run(feeds(2, 2))
    assert not opened


def test_wrong_feeds(session: CoreMLSession) -> None:
    given = feeds(1, 2)
    with pytest.raises(InputError, match="inputs are missing"):
        session.run({name: value for name, value in given.items() if name != "ids"})
    with pytest.raises(InputError, match="double: ids is int32, expected int64"):
        session.run({**given, "ids": given["ids"].astype(np.int32)})
    with pytest.raises(InputError, match="ids holds 4294967296, and Core ML's integers end at"):
        session.run({**given, "ids": np.array([0, 2**32])})
    with pytest.raises(InputError, match="tokens is 9, expected 1 to 8"):
        session.run(feeds(1, 9))


def test_outputs_that_there_are_not(session: CoreMLSession, opened: list[Doubling]) -> None:
    with pytest.raises(InputError, match="double: has no output 'z'; there are y, is_even"):
        session.run(feeds(1, 2), ["y", "z"])
    assert not opened


def test_what_fails_in_core_ml_names_the_stage(session: CoreMLSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Doubling, data: object, state: object = None) -> Mapping[str, np.ndarray]:
        raise RuntimeError("the neural engine is asleep")

    monkeypatch.setattr(Doubling, "predict", fail)
    with pytest.raises(EngineError, match="double: the run failed: the neural engine is asleep"):
        session.run(feeds(1, 2))
    monkeypatch.setattr(Doubling, "predict", lambda *_: {"other": np.zeros(2)})
    with pytest.raises(EngineError, match="double: Core ML gave no 'y_1', only other"):
        session.run(feeds(1, 2))


def test_a_stage_without_states_has_no_cache(session: CoreMLSession) -> None:
    assert session.new_cache(1) is None
