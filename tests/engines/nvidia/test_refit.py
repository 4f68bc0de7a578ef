"""LoRA on a loaded engine: what is written to it, by NumPy; the engine itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tiny_checkpoint
from cuda_stand_in import Driver, check_nothing_is_left
from gpu_stand_in import ILogger, TensorRT, write_plan
from safetensors.numpy import save_file

import intaglio
from intaglio.engines.nvidia import refit as module
from intaglio.engines.nvidia.refit import BaseWeights, EngineWeights, LoraTerm, Refit
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes.lora import read_terms

ROWS, COLUMNS, RANK = 12, 8, 3


nothing_is_left = pytest.fixture(check_nothing_is_left, autouse=True)


class Engine:
    """Weights that are exchanged, and a bundle's that are not."""

    def __init__(self, dtype: object = np.float32) -> None:
        self.random = np.random.default_rng()
        self.base = {f"layers.{i}.weight": self.matrix(ROWS, COLUMNS).astype(dtype) for i in range(4)}
        self.base["head.lora_A.weight"] = self.matrix(5, COLUMNS).astype(dtype)
        self.base["head.lora_B.weight"] = np.zeros((ROWS, 5), dtype)
        # A column of the branch is an adapter that was exported with the bundle.
        self.base["head.lora_B.weight"][:, 1] = 1
        self.held = {name: array.copy() for name, array in self.base.items()}
        self.writes: list[list[str]] = []
        self.failing = False
        self.refit = Refit(lambda name: self.base[name].copy(), self.base, self.write)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return self.random.standard_normal((rows, columns)).astype(np.float32)

    def term(self, rank: int = RANK) -> LoraTerm:
        return LoraTerm(self.matrix(rank, COLUMNS), self.matrix(ROWS, rank), 0.5)

    def write(self, arrays: Mapping[str, np.ndarray], current: Callable[[str], np.ndarray]) -> None:
        if self.failing:
            raise EngineError("TensorRT cannot")
        self.writes.append(list(arrays))
        self.current = current
        self.held.update(arrays)

    def is_base(self, *but: str) -> bool:
        return all(np.array_equal(self.held[name], self.base[name]) for name in self.base if name not in but)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_adapter_after_another_leaves_no_residue(dtype: object) -> None:
    engine = Engine(dtype)
    a = {"layers.0.weight": engine.term(), "layers.1.weight": engine.term()}
    b = {"layers.1.weight": engine.term(), "layers.2.weight": engine.term(2)}
    engine.refit.add("a", a)
    engine.refit.add("b", b)
    assert engine.refit.set_strengths({"a": 0.8}) == ["layers.0.weight", "layers.1.weight"]
    first = {name: array.copy() for name, array in engine.held.items()}
    for name, term in a.items():
        expected = engine.base[name].astype(np.float64) + 0.4 * (term.up.astype(np.float64) @ term.down)
        assert first[name].dtype == dtype and engine.is_base(*a)
        bound = {2: 2.0**-11, 4: 1e-6}[np.dtype(dtype).itemsize] if dtype != ml_dtypes.bfloat16 else 2.0**-8
        assert np.linalg.norm(first[name].astype(np.float64) - expected) <= bound * np.linalg.norm(expected)
    assert engine.refit.set_strengths({"b": 1.0}) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert engine.is_base(*b) and engine.refit.strengths == {"b": 1.0}
    engine.refit.set_strengths({"a": 0.8})
    assert all(np.array_equal(engine.held[name], first[name]) for name in first)
    engine.refit.set_strengths({})
    assert engine.is_base() and engine.refit.strengths == {}


def test_only_what_changes_is_written() -> None:
    engine = Engine()
    engine.refit.add("a", {"layers.0.weight": engine.term()})
    engine.refit.add("b", {"layers.1.weight": engine.term()})
    engine.refit.set_strengths({"a": 1.0, "b": 1.0})
    assert engine.refit.set_strengths({"a": 1.0, "b": 0.5}) == ["layers.1.weight"]
    assert engine.refit.set_strengths({"b": 0.5, "a": 1.0}) == []
    assert engine.refit.set_strengths({"a": 0.0, "b": 0.5}) == ["layers.0.weight"]
    engine.refit.remove("b")
    assert engine.is_base()
    with pytest.raises(InputError, match="'b' is unknown; there are a"):
        engine.refit.set_strengths({"b": 1.0})


def test_adapters_add_up_in_whichever_order_they_are_named() -> None:
    engine = Engine()
    terms = {name: engine.term() for name in "ab"}
    for name, term in terms.items():
        engine.refit.add(name, {"layers.3.weight": term})
    engine.refit.set_strengths({"b": -1.0, "a": 2.0})
    first = engine.held["layers.3.weight"].copy()
    engine.refit.set_strengths({})
    engine.refit.set_strengths({"a": 2.0, "b": -1.0})
    assert np.array_equal(engine.held["layers.3.weight"], first)
    expected = engine.base["layers.3.weight"] + terms["a"].up @ terms["a"].down - 0.5 * terms["b"].up @ terms["b"].down
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)


def test_a_quantized_weight_has_them_in_the_free_part_of_its_branch() -> None:
    engine = Engine()
    terms = {"a": engine.term(3), "b": engine.term(1)}
    for name, term in terms.items():
        engine.refit.add(name, {"head.weight": term})
    assert engine.refit.set_strengths({"a": 2.0, "b": 1.0}) == ["head.lora_A.weight", "head.lora_B.weight"]
    down, up = engine.held["head.lora_A.weight"], engine.held["head.lora_B.weight"]
    expected = engine.base["head.lora_B.weight"] @ engine.base["head.lora_A.weight"]
    expected = expected + terms["a"].up @ terms["a"].down + 0.5 * terms["b"].up @ terms["b"].down
    np.testing.assert_allclose(up @ down, expected, rtol=1e-5, atol=1e-5)
    engine.refit.set_strengths({})
    assert engine.is_base()
    engine.refit.add("c", {"head.weight": engine.term(2)})
    with pytest.raises(InputError, match="rank 5 together, and its branch has room for 4"):
        engine.refit.set_strengths({"a": 1.0, "c": 1.0})
    assert engine.is_base()


def test_after_a_failure_all_that_is_not_known_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(module, "_BATCH_BYTES", 1)
    engine.refit.add("a", {f"layers.{i}.weight": engine.term() for i in range(3)})
    engine.refit.set_strengths({"a": 1.0})
    assert engine.writes == [["layers.0.weight"], ["layers.1.weight"], ["layers.2.weight"]]
    engine.failing = True
    with pytest.raises(EngineError):
        engine.refit.set_strengths({"a": 0.5})
    engine.held["layers.0.weight"][:] = np.nan  # whatever a refused exchange left there
    engine.failing = False
    assert engine.refit.set_strengths({"a": 1.0}) == ["layers.0.weight"]
    engine.failing = True
    with pytest.raises(EngineError):
        engine.refit.set_strengths({})
    engine.failing = False
    engine.refit.set_strengths({})
    assert engine.is_base()


def test_what_does_not_fit_is_refused() -> None:
    engine = Engine()
    with pytest.raises(InputError, match="cannot exchange: it is quantized"):
        engine.refit.add("a", {"other.weight": engine.term()})
    wrong = LoraTerm(engine.matrix(RANK, COLUMNS + 1), engine.matrix(ROWS, RANK), 1.0)
    with pytest.raises(InputError, match=r"adds \[12, 9\] to layers.0.weight, which is \[12, 8\]"):
        engine.refit.add("a", {"layers.0.weight": wrong})
    with pytest.raises(InputError, match="changes nothing"):
        engine.refit.add("a", {})
    engine.refit.add("a", {"layers.0.weight": engine.term()})
    with pytest.raises(InputError, match="there already"):
        engine.refit.add("a", {"layers.0.weight": engine.term()})
    with pytest.raises(InputError, match="expected a number"):
        engine.refit.set_strengths({"a": float("nan")})


def test_names_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), bundle)
    stage = next(iter(read_bundle(bundle).stages.values()))
    base = BaseWeights(bundle / stage.file)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = base(name).shape
    random = np.random.default_rng()
    down, up = (random.standard_normal(shape).astype(np.float32) for shape in ((2, columns), (rows, 2)))
    modules = {
        "transformer.model.layers.0.self_attn.q_proj": (".lora_A.weight", ".lora_B.weight"),
        "text_encoder.layers.0.self_attn.q_proj": (".lora_A.weight", ".lora_B.weight"),
        "lora_te_model_layers_0_self_attn_q_proj": (".lora_down.weight", ".lora_up.weight"),
    }
    for i, (spelling, (first, second)) in enumerate(modules.items()):
        file = tmp_path / f"{i}.safetensors"
        alpha = {f"{spelling}.alpha": np.array(1.0, np.float32)}
        save_file({f"{spelling}{first}": down, f"{spelling}{second}": up, **alpha}, file)
        terms = read_terms(file, [name, "model.layers.0.self_attn.k_proj.weight"])
        assert list(terms) == [name] and terms[name].scale == 0.5
        assert np.array_equal(terms[name].down, down) and np.array_equal(terms[name].up, up)
    with pytest.raises(InputError, match="1 of 1 modules are none of the stage's"):
        read_terms(file, ["model.layers.1.self_attn.q_proj.weight"])
    with pytest.raises(EngineError, match="no weight 'other'"):
        base("other")


def test_what_others_hold_is_told() -> None:
    engine = Engine()
    engine.refit.add("a", {"layers.0.weight": engine.term(), "head.weight": engine.term()})
    engine.refit.add("b", {"layers.1.weight": engine.term()})
    engine.refit.set_strengths({"a": 1.0})
    engine.refit.set_strengths({"a": 1.0, "b": 1.0})
    for name in engine.held:
        if name != "layers.1.weight":
            assert np.array_equal(engine.current(name), engine.held[name]), name


def test_strengths_outlive_a_failure() -> None:
    engine = Engine()
    engine.refit.add("a", {"layers.0.weight": engine.term()})
    engine.refit.add("b", {"layers.0.weight": engine.term()})
    engine.failing = True
    with pytest.raises(EngineError):
        engine.refit.set_strengths({"a": 1.0, "b": 0.5})
    engine.failing = False
    engine.refit.remove("b")
    assert engine.refit.strengths == {"a": 1.0} and not engine.is_base()


class Loaded:
    """An engine of the stand-in, of two products and a bias, and what exchanges its weights."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng()
        half = [rng.standard_normal((4, 4)).astype(np.float16) for _ in range(3)]
        graph = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> g (float16[2,4] x) => (float16[2,4] y)'
            "{ h = MatMul(x, a) k = MatMul(h, b) y = MatMul(k, c) }"
        )
        graph.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for w, n in zip(half, "abc", strict=True))
        onnx.save(graph, folder / "g.onnx")
        self.base = dict(zip("abc", half, strict=True))
        self.trt = TensorRT(Driver(), is_rtx=False)
        runtime = self.trt.Runtime(ILogger())
        engine = runtime.deserialize_cuda_engine(write_plan(folder / "g.onnx", [{}], ["a", "b"]))
        assert engine is not None
        self.engine, self.weights = engine, EngineWeights(self.trt, engine, runtime.logger)

    def held(self, name: str) -> np.ndarray:
        tensor = self.engine.model.graph.initializers[name].const_value
        assert tensor is not None
        return tensor.numpy()

    def current(self, name: str) -> np.ndarray:
        return self.base[name]


def test_an_engine_is_given_its_own_dtype(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    assert loaded.weights.names == ("a", "b")
    new = np.arange(16, dtype=np.float32).reshape(4, 4).T
    loaded.weights({"a": new}, loaded.current)
    assert loaded.held("a").dtype == np.float16 and np.array_equal(loaded.held("a"), new)
    # In the exchange after, what the first one gave is gone.
    loaded.weights({"b": 2 * new}, loaded.current)
    assert np.array_equal(loaded.held("a"), new) and np.array_equal(loaded.held("b"), 2 * new)
    assert loaded.trt.exchanged == [["a"], ["b"]]
    with pytest.raises(EngineError, match="a: the engine holds 16 numbers"):
        loaded.weights({"a": np.zeros(5, np.float32)}, loaded.current)
    with pytest.raises(EngineError, match="c: TensorRT refuses"):
        loaded.weights({"c": new}, loaded.current)
    with pytest.raises(InputError, match="b: with these adapters it has values that float16 does not hold; give them"):
        loaded.weights({"a": 3 * new, "b": 1e6 * new}, loaded.current)
    assert np.array_equal(loaded.held("a"), new), "together or not at all"


def test_weights_that_the_engine_joined_are_exchanged_together(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    loaded.trt.joined = [{"a", "b"}]
    loaded.weights({"a": np.ones((4, 4), np.float32)}, loaded.current)
    assert loaded.trt.exchanged == [["a", "b"]] and (loaded.held("a") == 1).all()
    assert np.array_equal(loaded.held("b"), loaded.base["b"])
