"""LoRA on engines of full TensorRT while they are loaded, on a stand-in, against checkpoints merged by NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from cuda_stand_in import check_nothing_is_left
from gpu_stand_in import TensorRT, stand_in
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import intaglio
from intaglio.engines.nvidia.device import used_bytes
from intaglio.errors import EngineError, InputError
from intaglio.scripts.main import app

ROOT = Path(__file__).parents[2]
TEXT = "that is the question"
RANK, ALPHA = 3, 6.0
MODULES = {
    "a": [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "v_proj")],
    "b": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
}


nothing_is_left = pytest.fixture(check_nothing_is_left, autouse=True)


@pytest.fixture(scope="module")
def trt() -> Iterator[TensorRT]:
    with pytest.MonkeyPatch.context() as patch:
        yield stand_in(patch, "tensorrt")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As diffusers writes them, with the checkpoint's own names."""
    folder, rng, weights = tmp_path_factory.mktemp("adapters"), np.random.default_rng(5), tiny_checkpoint.tensors()
    for name, modules in MODULES.items():
        held: dict[str, np.ndarray] = {}
        for module in modules:
            rows, columns = weights[f"{module}.weight"].shape
            held[f"{module}.lora_A.weight"] = rng.normal(scale=0.2, size=(RANK, columns)).astype(np.float32)
            held[f"{module}.lora_B.weight"] = rng.normal(scale=0.2, size=(rows, RANK)).astype(np.float32)
            held[f"{module}.alpha"] = np.array(ALPHA, np.float32)
        save_file(held, folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in MODULES}


@pytest.fixture(scope="module")
def writer(trt: TensorRT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
    intaglio.compile(folder / "bundle", "tensorrt", refit=True)
    return folder / "bundle"


def merged_scores(adapters: Mapping[Path, float], folder: Path) -> tuple[float, ...]:
    """What the CPU's engine makes of a checkpoint that has the adapters in its weights, summed in float64."""
    weights = {name: array.astype(np.float64) for name, array in tiny_checkpoint.tensors().items()}
    for file, strength in adapters.items():
        held = load_file(file)
        for name in held:
            if name.endswith(".lora_B.weight"):
                module = name.removesuffix(".lora_B.weight")
                product = held[name].astype(np.float64) @ held[f"{module}.lora_A.weight"]
                weights[f"{module}.weight"] += strength * ALPHA / RANK * product
    rounded = {name: array.astype(np.float32) for name, array in weights.items()}
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint", weights=rounded), folder / "bundle")
    intaglio.compile(folder / "bundle")
    return intaglio.load(folder / "bundle", threads=1).score(TEXT).logprobs


def test_one_adapter_after_another(writer: Path, trt: TensorRT, adapters: Mapping[str, Path], tmp_path: Path) -> None:
    a, b = str(adapters["a"]), str(adapters["b"])
    pipe = intaglio.load(writer, "tensorrt", lora={a: 0.7, b: 0.0})
    first = pipe.score(TEXT).logprobs
    np.testing.assert_allclose(first, merged_scores({adapters["a"]: 0.7}, tmp_path / "a"), rtol=1e-4, atol=1e-4)
    pipe.set_strengths({b: -0.5})
    np.testing.assert_allclose(
        pipe.score(TEXT).logprobs, merged_scores({adapters["b"]: -0.5}, tmp_path / "b"), rtol=1e-4, atol=1e-4
    )
    pipe.set_strengths({a: 0.7})
    assert pipe.score(TEXT).logprobs == first, "nothing is left of the other"
    pipe.set_strengths({a: 0.7, b: 0.3})
    both = {adapters["a"]: 0.7, adapters["b"]: 0.3}
    np.testing.assert_allclose(pipe.score(TEXT).logprobs, merged_scores(both, tmp_path / "ab"), rtol=1e-4, atol=1e-4)
    # Recorded runs are recorded anew, and a stage that is loaded later has what was set last.
    expected = pipe.score(TEXT).logprobs
    assert [pipe.score(TEXT).logprobs for _ in range(3)] == [expected] * 3
    text = pipe("The capital", max_new_tokens=5)
    pipe.set_strengths({})
    assert pipe.score(TEXT).logprobs == intaglio.load(writer, "tensorrt").score(TEXT).logprobs
    assert intaglio.load(writer, "tensorrt", lora={a: 0.7, b: 0.3})("The capital", max_new_tokens=5) == text
    del pipe
    assert trt.driver.used == 0


def test_recordings_have_the_new_weights(writer: Path, trt: TensorRT, adapters: Mapping[str, Path]) -> None:
    pipe, file = intaglio.load(writer, "tensorrt", lora={str(adapters["a"]): 1.0}), str(adapters["a"])
    for _ in range(3):
        pipe.score(TEXT)
    recordings = trt.driver.recordings
    pipe.set_strengths({file: 0.5})
    for _ in range(3):
        pipe.score(TEXT)
    assert trt.driver.recordings == recordings + 1


def test_what_is_refused(writer: Path, trt: TensorRT, adapters: Mapping[str, Path], tmp_path: Path) -> None:
    file = str(adapters["a"])
    intaglio.compile(writer, "tensorrt-rtx")
    with pytest.raises(
        InputError, match=r"target tensorrt alone, and this one is tensorrt-rtx; export the bundle with"
    ):
        intaglio.load(writer, "tensorrt-rtx", lora={file: 1.0})
    with pytest.raises(InputError, match=r"strength of .*a\.safetensors is nan, expected a number"):
        intaglio.load(writer, "tensorrt", lora={file: float("nan")})
    with pytest.raises(InputError, match=r"b\.safetensors: is no adapter of this pipeline, which has .*a\.safetensors"):
        intaglio.load(writer, "tensorrt", lora={file: 1.0}).set_strengths({str(adapters["b"]): 1.0})
    other = tmp_path / "other.safetensors"
    pair = {"model.layers.9.q.lora_A.weight": np.ones((1, 4), np.float32)}
    save_file({**pair, "model.layers.9.q.lora_B.weight": np.ones((4, 1), np.float32)}, other)
    with pytest.raises(
        InputError, match=r"1 of 1 modules are none of generate and score's|none of score and generate's"
    ):
        intaglio.load(writer, "tensorrt", lora={str(other): 1.0})
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle", "tensorrt", dtype="float16")
    again = (
        rf"--refit.* build again with `intaglio compile {tmp_path}/bundle --target tensorrt --dtype float16 --refit`"
    )
    with pytest.raises(EngineError, match=again):
        intaglio.load(tmp_path / "bundle", "tensorrt", lora={file: 1.0})


@pytest.mark.parametrize(("dtype", "rounding", "too_much"), [("float16", 2.0**-11, 1e6), ("bfloat16", 2.0**-8, 1e39)])
def test_a_half_engine_rounds_once(
    trt: TensorRT, adapters: Mapping[str, Path], tmp_path: Path, dtype: str, rounding: float, too_much: float
) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle", "tensorrt", dtype=dtype, refit=True)
    pipe = intaglio.load(tmp_path / "bundle", "tensorrt", lora={str(adapters["a"]): 0.7})
    pipe.score(TEXT)
    engine = pipe._sessions["score"]._plan._engine
    weights, held = tiny_checkpoint.tensors(), adapters["a"]
    pairs = load_file(held)
    for module in MODULES["a"]:
        product = pairs[f"{module}.lora_B.weight"] @ pairs[f"{module}.lora_A.weight"]
        expected = weights[f"{module}.weight"].astype(np.float64) + 0.7 * ALPHA / RANK * product
        found = engine.model.graph.initializers[f"{module}.weight.{dtype}"].const_value.numpy()
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rounding, atol=1e-6)
    with pytest.raises(InputError, match=f"has values that {dtype} does not hold; give them less"):
        pipe.set_strengths({str(adapters["a"]): too_much})
    held = used_bytes()
    with pytest.raises(InputError, match="give them less") as raised:
        intaglio.load(tmp_path / "bundle", "tensorrt", lora={str(adapters["a"]): too_much}).score(TEXT)
    assert used_bytes() == held, f"nothing is left, though {raised} has a traceback"
    pipe.set_strengths({str(adapters["a"]): 0.7})


def test_the_command_line(
    writer: Path, trt: TensorRT, adapters: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = adapters["a"]
    expected = intaglio.load(writer, "tensorrt", lora={str(file): -2.0})("x", max_new_tokens=6).text
    arguments = ["run", str(writer), "x", "--target", "tensorrt", "--max-new-tokens", "6", "--quiet"]
    done = CliRunner().invoke(app, [*arguments, "--lora", f"{file}:-2"])
    assert done.exit_code == 0, done.output
    assert done.stdout == expected + "\n"
    assert CliRunner().invoke(app, arguments).stdout != done.stdout
    for given, message in (
        (["--lora", "none.safetensors"], "--lora none.safetensors: there is no such file"),
        (["--lora", str(file), "--lora", f"{file}:2"], "is given twice"),
        (["--lora", str(file), "--target", "cpu"], "--lora is for the target tensorrt, and this one is cpu"),
        (["--lora", str(file), "--target", "cuda"], "--lora is for the target tensorrt, and this one is cuda"),
    ):
        done = CliRunner().invoke(app, [*arguments, *given])
        assert isinstance(done.exception, InputError) and message in str(done.exception)


def test_an_engine_that_is_compiled_for_a_run_takes_adapters(
    trt: TensorRT, adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    arguments = ["run", str(tmp_path / "bundle"), "x", "--target", "tensorrt", "--max-new-tokens", "2"]
    done = CliRunner().invoke(app, [*arguments, "--lora", str(adapters["a"])])
    assert done.exit_code == 0, done.output
    assert intaglio.load(tmp_path / "bundle", "tensorrt").engine.options == {"refit": "yes"}
