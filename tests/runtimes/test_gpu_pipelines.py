"""Pictures and texts through sessions on a GPU that is stood in for: those of the CPU, from the graph TensorRT gets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from cuda_stand_in import check_nothing_is_left
from gpu_stand_in import TensorRT, stand_in
from klein_pipeline import pixels

import intaglio
from intaglio.engines import tensorrt, tensorrt_rtx
from intaglio.engines.engine import open_engine
from intaglio.engines.nvidia.device import used_bytes
from intaglio.engines.nvidia.gpu import Gpu
from intaglio.engines.target import session_options
from intaglio.errors import EngineError, InputError

ROOT = Path(__file__).parents[2]
STAGES = ("text_encoder", "transformer", "vae_decoder")
OPTIONS: dict[str, Any] = {"seed": 3, "num_inference_steps": 3, "guidance_scale": 3.0}
CONTEXT = 160
TARGETS = ("tensorrt-rtx", "tensorrt")


nothing_is_left = pytest.fixture(check_nothing_is_left, autouse=True)


@pytest.fixture(params=TARGETS)
def trt(request: pytest.FixtureRequest) -> Iterator[TensorRT]:
    with pytest.MonkeyPatch.context() as patch:
        yield stand_in(patch, request.param)


@pytest.fixture
def target(trt: TensorRT) -> str:
    return "tensorrt-rtx" if trt.is_rtx else "tensorrt"


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo painter, compiled for the CPU and the stand-in; for reading only."""
    folder = tmp_path_factory.mktemp("painter") / "bundle"
    intaglio.export(ROOT / "demo" / "emoji", folder, stages=STAGES)
    intaglio.compile(folder)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        for target in TARGETS:
            intaglio.compile(folder, target, shapes="batch=1:1:2,height=64,width=64")
    return folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder, likewise."""
    folder = tmp_path_factory.mktemp("decoder")
    checkpoint = tiny_checkpoint.write(folder / "checkpoint", config={"max_position_embeddings": CONTEXT})
    intaglio.export(checkpoint, folder / "bundle")
    intaglio.compile(folder / "bundle")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        for target in TARGETS:
            intaglio.compile(folder / "bundle", target, shapes="batch=1:1:2")
    return folder / "bundle"


def test_a_picture_is_that_of_the_cpu(painter: Path, trt: TensorRT, target: str) -> None:
    pipe = intaglio.load(painter, target)
    found, expected = pipe("red apple", **OPTIONS), intaglio.load(painter, threads=1)("red apple", **OPTIONS)
    assert np.linalg.norm(found.latents - expected.latents) <= 1e-5 * np.linalg.norm(expected.latents)
    assert np.abs(pixels(found.images) - pixels(expected.images)).max() <= 1
    # Six runs of the transformer, of which all but the first are recorded ones.
    assert trt.driver.launches == (0 if trt.is_rtx else 5 + 1)
    pipe.unload()
    assert trt.driver.used == 0


def test_stages_leave_in_turn_within_a_budget(painter: Path, trt: TensorRT, target: str) -> None:
    most = intaglio.load(painter, target, memory_budget=1 << 30)
    expected = most("red apple", **OPTIONS)
    assert {*most._sessions} == set(STAGES), "all fit"
    largest = max((painter / "engines" / target / f"{stage}.engine").stat().st_size for stage in STAGES)
    pipe = intaglio.load(painter, target, memory_budget=largest + (2 << 20))
    most.unload()
    np.testing.assert_array_equal(pipe("red apple", **OPTIONS).latents, expected.latents)
    assert (pipe._sessions, trt.driver.used) == ({}, 0)
    with pytest.raises(InputError, match=r"the memory budget is 1 MiB of the GPU, and .* needs \d+ MiB beside the"):
        intaglio.load(painter, target, memory_budget=1 << 20)("red apple", **OPTIONS)


@pytest.mark.parametrize("writes_in_place", [True, False])
def test_texts_are_those_of_the_cpu(writer: Path, trt: TensorRT, target: str, writes_in_place: bool) -> None:
    trt.writes_in_place = writes_in_place
    ours, theirs = intaglio.load(writer, target), intaglio.load(writer, threads=1)
    for prompt in ("The capital of France is", "x", "a" * 70):
        assert ours(prompt, max_new_tokens=8) == theirs(prompt, max_new_tokens=8)
    together = ["To be or not to be", "a"]
    assert ours.batch(together, max_new_tokens=4) == theirs.batch(together, max_new_tokens=4)
    np.testing.assert_allclose(ours.score("that is").logprobs, theirs.score("that is").logprobs, rtol=1e-4, atol=1e-4)
    assert (trt.driver.launches > 12) == (not trt.is_rtx), "steps are recorded ones"


def test_a_cache_that_is_given_whole(writer: Path, trt: TensorRT, target: str) -> None:
    stage = open_engine(writer, target).load("generate")
    reference = open_engine(writer).load("generate", threads=1)
    rng = np.random.default_rng()
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, 256, (2, 3)),
        "attention_mask": np.ones((2, 8), np.int64),
        "position_ids": np.tile(np.arange(5, 8), (2, 1)),
    }
    for tensor in stage.stage.inputs:
        if tensor.name.startswith("past_key_values."):
            shape = [2, tensor.shape[1], 5, tensor.shape[3]]
            feeds[tensor.name] = rng.standard_normal(shape).astype(np.float32)
    found, expected = stage.run(feeds), reference.run(feeds)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value), name


def test_a_picture_that_fails_leaves_nothing_behind(painter: Path, trt: TensorRT, target: str) -> None:
    pipe = intaglio.load(painter, target, keep_loaded=False)

    def fail(step: int, picture: object) -> None:
        trt.driver.interrupt = KeyboardInterrupt

    try:
        pipe("red apple", preview=fail, **OPTIONS)
    except KeyboardInterrupt:  # whose traceback holds all that was under way
        assert (trt.driver.used, trt.driver.graphs, used_bytes()) == (0, {}, 0)
    else:
        pytest.fail("it was not interrupted")
    expected = intaglio.load(painter, target)("red apple", **OPTIONS)
    np.testing.assert_array_equal(pipe("red apple", **OPTIONS).latents, expected.latents)
    full = trt.driver.total
    trt.driver.total = trt.driver.most_bytes // 2
    with pytest.raises(
        EngineError, match=r"the GPU \(Stand-in GPU\) has not enough memory: .* needs \d+ MiB, and \d+ of"
    ):
        pipe("red apple", **OPTIONS)
    trt.driver.total = full
    np.testing.assert_array_equal(pipe("red apple", **OPTIONS).latents, expected.latents)


def test_a_cache_of_halves(writer: Path, trt: TensorRT, target: str, tmp_path: Path) -> None:
    shutil.copytree(writer, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines"))
    intaglio.compile(tmp_path / "bundle", target, shapes="batch=1:1:2", dtype="float16")
    engine, rng = open_engine(tmp_path / "bundle", target), np.random.default_rng()
    stage, reference = engine.load("generate"), engine.load_for_parity("generate")
    feeds: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, 256, (1, 3)),
        "attention_mask": np.ones((1, 8), np.int64),
        "position_ids": np.arange(5, 8)[None],
    }
    for tensor in stage.stage.inputs:
        if tensor.name.startswith("past_key_values."):
            feeds[tensor.name] = rng.standard_normal([1, tensor.shape[1], 5, tensor.shape[3]]).astype(tensor.dtype)
    found, expected = stage.run(feeds), reference.run(feeds)
    assert {name: array.dtype for name, array in found.items()} == {n: array.dtype for n, array in expected.items()}
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value), name


def test_a_context_that_is_full(writer: Path, trt: TensorRT, target: str) -> None:
    stage = open_engine(writer, target).load("generate")
    with pytest.raises(InputError, match="batch is 3, and the engine was compiled for 1 to 2"):
        stage.new_cache(3)
    cache = stage.new_cache(1)
    cache.length = CONTEXT - 1
    feeds = {
        "input_ids": np.zeros((1, 2), np.int64),
        "attention_mask": np.ones((1, CONTEXT + 1), np.int64),
        "position_ids": np.zeros((1, 2), np.int64),
    }
    with pytest.raises(InputError, match=r"total_sequence is 161, and the engine was compiled for 1 to 160\. Compile"):
        stage.run_with_cache(feeds, ["logits"], cache)
    assert cache.length == CONTEXT - 1


def test_an_engine_of_another_gpu_or_version(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = stand_in(monkeypatch, "tensorrt")
    engine = open_engine(writer, "tensorrt")
    again = rf'build again with `intaglio compile {writer} --target tensorrt --shapes "batch=1:1:2"`'
    monkeypatch.setattr(trt, "__version__", "10.17.0.1")
    with pytest.raises(
        EngineError, match=rf"built by TensorRT 10\.16\.1\.11, and TensorRT 10\.17\.0\.1 is what .*{again}"
    ):
        engine.load("score")
    monkeypatch.setattr(tensorrt, "find_gpu", lambda: Gpu("Another GPU", 90, 1 << 30, "13.0"))
    built = r"was built on Stand-in GPU, compute capability 8\.6, and this is Another GPU, compute capability 9\.0"
    with pytest.raises(EngineError, match=rf"{built}: .*{again}"):
        engine.load("score")
    with pytest.raises(EngineError, match=rf"device: Stand-in GPU, .*, now Another GPU, .*; {again}"):
        open_engine(writer, "tensorrt")


@pytest.mark.parametrize("module", [tensorrt, tensorrt_rtx])
def test_no_gpu_is_said_with_what_was_looked_for(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from intaglio.engines.nvidia import driver

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", absent)
    with pytest.raises(
        EngineError, match=r"no NVIDIA GPU to run on: the driver's library lib\S+ cannot be loaded .*/dev/"
    ):
        module.check_runs()


def test_the_budget_is_told_to_targets_on_a_gpu_alone() -> None:
    assert session_options("tensorrt-rtx", memory_budget=5) == {"memory_budget": 5}
    assert session_options("cpu", memory_budget=5) == session_options("tensorrt-rtx") == {}
    with pytest.raises(InputError, match="threads is for the target cpu, and this one is tensorrt-rtx"):
        session_options("tensorrt-rtx", threads=1)
