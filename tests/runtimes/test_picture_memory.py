"""Stages of the picture pipeline that come and go, and what a memory budget makes of a call."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from klein_pipeline import PROMPT, SMALL, picture, pixels

import intaglio
from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.engine import Engine
from intaglio.errors import CancelledError, InputError
from intaglio.runtimes import memory_plan, text_to_image
from intaglio.runtimes.memory_plan import MemoryPlan, plan_memory
from intaglio.runtimes.picture_request import Work, make_request
from intaglio.runtimes.text_to_image import TextToImagePipeline


@pytest.fixture(scope="module")
def pipe(klein: Path) -> TextToImagePipeline:
    return intaglio.load(klein)  # type: ignore[return-value]


def test_stages_stay_until_they_are_dropped(klein: Path) -> None:
    pipe = intaglio.load(klein)
    assert not pipe._sessions
    first = pipe(PROMPT, seed=1, **SMALL)
    assert set(pipe._sessions) == {"text_encoder", "transformer", "vae_decoder"}
    assert first.timings.keys() == {"load", "text_encoder", "transformer", "vae_decoder", "total"}
    pipe.unload("transformer")
    assert set(pipe._sessions) == {"text_encoder", "vae_decoder"}
    pipe.unload()
    assert not pipe._sessions
    np.testing.assert_array_equal(pixels(pipe(PROMPT, seed=1, **SMALL).images), pixels(first.images))


def test_stages_can_leave_in_turn(klein: Path) -> None:
    pipe = intaglio.load(klein, keep_loaded=False)
    loaded: list[set[str]] = []
    pipe(PROMPT, image=picture(32, 32), seed=1, progress=lambda _: loaded.append(set(pipe._sessions)), **SMALL)
    assert not pipe._sessions
    assert max(map(len, loaded)) == 1
    with pytest.raises(CancelledError, match="paint: cancelled after 1 of 2 steps"):
        pipe(PROMPT, progress=lambda event: event.task != "paint" or event.done < 1, **SMALL)
    assert not pipe._sessions


def test_plans_get_thriftier_as_the_budget_shrinks(pipe: TextToImagePipeline) -> None:
    work = make_request(pipe.model, ["a", "b"], {"height": 1024, "width": 1024, "seed": 1}).work

    def plan(budget: int | None) -> MemoryPlan:
        return plan_memory(pipe.engine, work, budget, keep_loaded=True)

    assert plan(None) == MemoryPlan(True, None, None, plan(None).peak)
    plans = [plan(plan(None).peak)]
    assert (plans[0].keep_loaded, plans[0].rows, plans[0].band_rows) == (True, 2, None)
    # A byte less than the last needed, until nothing is left to save.

    def press() -> None:
        while True:
            plans.append(plan(plans[-1].peak - 1))
            assert plans[-1].peak < plans[-2].peak

    with pytest.raises(InputError) as refused:
        press()
    thrift = [(not p.keep_loaded, p.band_rows is not None) for p in plans]
    assert thrift == sorted(thrift)
    assert thrift[-1] == (True, True)
    assert {p.rows for p in plans} == {1, 2}
    bands = [p.band_rows for p in plans if p.band_rows is not None]
    assert bands == sorted(bands, reverse=True)
    needed = re.search(r"this needs (\d+) MiB", str(refused.value))
    assert needed
    assert plan(int(needed[1]) << 20).band_rows


def test_a_budget_that_is_named_does(klein: Path) -> None:
    with pytest.raises(InputError, match="the memory budget is 16 MiB, and this needs") as refused:
        intaglio.load(klein, memory_budget=16 << 20)(PROMPT, seed=1, **SMALL)
    needed = re.search(r"this needs (\d+) MiB", str(refused.value))
    assert needed
    thrifty = intaglio.load(klein, memory_budget=int(needed[1]) << 20)
    output = thrifty([PROMPT, "a lake"], seed=1, **SMALL)
    assert not thrifty._sessions
    expected = intaglio.load(klein)([PROMPT, "a lake"], seed=1, **SMALL)
    assert np.abs(pixels(output.images) - pixels(expected.images)).max() <= 1


def test_large_pictures_are_decoded_in_bands(pipe: TextToImagePipeline) -> None:
    large = make_request(pipe.model, "x", {"height": 4096, "width": 4096}).work
    assert plan_memory(pipe.engine, large, None, keep_loaded=True).band_rows
    whole = make_request(pipe.model, "x", {"height": 4096, "width": 4096, "tiled": False}).work
    assert plan_memory(pipe.engine, whole, None, keep_loaded=True).band_rows is None


def test_previews_references_and_starts_count(pipe: TextToImagePipeline) -> None:
    def peak(**options: Any) -> int:
        request = make_request(pipe.model, "x", {"height": 256, "width": 256, **options}).work
        return plan_memory(pipe.engine, request, None, keep_loaded=False).peak

    reference = picture(1024, 1024)
    assert peak(preview=lambda i, image: None) > peak()
    assert peak(image=[reference]) > peak()
    assert peak(image=[reference] * 3) > peak(image=[reference])


@pytest.fixture
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds nothing, so that plans depend on the pictures alone."""
    monkeypatch.setattr(text_to_image, "rss_bytes", lambda: 0)


def test_what_earlier_calls_left_leaves_first(klein: Path, small_process: None) -> None:
    pipe = intaglio.load(klein)
    large: dict[str, Any] = {"height": 128, "width": 128, "image": picture(32, 32)}
    work = make_request(pipe.model, PROMPT, large).work
    pipe.memory_budget = plan_memory(pipe.engine, work, None, keep_loaded=True).peak - 1
    pipe(PROMPT, seed=1, **SMALL)
    assert set(pipe._sessions) == {"text_encoder", "transformer", "vae_decoder"}
    loaded: list[set[str]] = []
    pipe(PROMPT, seed=1, progress=lambda _: loaded.append(set(pipe._sessions)), **large)
    assert max(map(len, loaded)) == 1
    assert not pipe._sessions
    # Whatever fits stays, but for stages that have no part in the call.
    pipe.memory_budget = 1 << 40
    pipe.encode_image(picture(32, 32))
    pipe(PROMPT, seed=1, **SMALL)
    assert set(pipe._sessions) == {"text_encoder", "transformer", "vae_decoder"}
    pipe.memory_budget = None
    pipe.encode_image(picture(32, 32))
    pipe(PROMPT, seed=1, **SMALL)
    assert len(pipe._sessions) == 4


def test_parts_heed_the_budget_too(klein: Path, small_process: None) -> None:
    pipe = intaglio.load(klein, keep_loaded=False)
    size: dict[str, Any] = {"height": 32, "width": 48}
    embeds = pipe.encode_prompt("x")
    assert not pipe._sessions
    start = pipe.encode_image(picture(48, 32))
    assert not pipe._sessions
    seen: list[set[str]] = []
    latents = pipe.sample_latents(
        embeds, start=start, strength=0.5, seed=1, progress=lambda _: seen.append(set(pipe._sessions)), **size
    )
    assert seen[-1] == {"transformer"}
    assert not pipe._sessions
    pipe.decode(latents, **size)
    assert not pipe._sessions
    pipe.memory_budget = 16 << 20
    for stage, call in {
        "text_encoder": lambda: pipe.encode_prompt("x"),
        "vae_encoder": lambda: pipe.encode_image(picture(48, 32)),
        "transformer": lambda: pipe.sample_latents(embeds, **size),
        "vae_decoder": lambda: pipe.decode(latents, **size),
    }.items():
        with pytest.raises(InputError, match=rf"the memory budget is 16 MiB.* and \d+ for {stage}; allow that much"):
            call()


def test_prompts_alone_run_in_parts(klein: Path, small_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = intaglio.load(klein)
    both = pipe.encode_prompt(["a", "b"])
    pipe.unload()
    pipe.memory_budget = plan_memory(pipe.engine, Work(("text_encoder",), 2), None, keep_loaded=True).peak - 1
    rows: list[int] = []
    run = CpuSession.run

    def counted(self: CpuSession, feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, Any]:
        rows.append(len(feeds["input_ids"]))
        return run(self, feeds, outputs)

    monkeypatch.setattr(CpuSession, "run", counted)
    np.testing.assert_allclose(pipe.encode_prompt(["a", "b"]), both, atol=1e-4)
    assert rows == [1, 1]


def test_decoding_alone_chooses_bands(klein: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = intaglio.load(klein)
    latents = np.zeros((1, 6, 128), np.float32)
    units: list[str] = []
    pipe.decode(latents, height=32, width=48, progress=lambda event: units.append(event.unit))
    assert set(units) == {"pictures"}
    monkeypatch.setattr(memory_plan, "_MOST_UNTILED", 0)
    pipe.decode(latents, height=32, width=48, progress=lambda event: units.append(event.unit))
    assert set(units) == {"pictures", "bands"}


def test_previews_leave_before_bands(klein: Path) -> None:
    pipe = intaglio.load(klein)
    stages: dict[str, set[str]] = {}
    pipe(
        PROMPT,
        seed=1,
        tiled=True,
        preview=lambda i, image: stages.update(preview=set(pipe._sessions)),
        progress=lambda event: stages.update({event.task: set(pipe._sessions)}),
        **SMALL,
    )
    assert "vae_decoder" in stages["preview"]
    assert "vae_decoder" not in stages["decode"]


def test_loading_bands_is_no_decoding(klein: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    load = Engine.load

    def slow(self: Engine, stage: str, **how: Any) -> Any:
        clock[0] += 1000
        return load(self, stage, **how)

    monkeypatch.setattr(Engine, "load", slow)
    monkeypatch.setattr(text_to_image, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    timings = intaglio.load(klein)(PROMPT, seed=1, tiled=True, **SMALL).timings
    assert timings["vae_decoder"] == 0
    assert timings["load"] == timings["total"] > 3000


def test_the_process_counts_and_its_own_stages_do_not(klein: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = intaglio.load(klein, memory_budget=4 << 30)
    pipe(PROMPT, seed=1, **SMALL)
    assert sum(pipe._held.values()) > 0
    monkeypatch.setattr(text_to_image, "rss_bytes", lambda: 8 << 30)
    with pytest.raises(InputError, match=r"the memory budget is 4096 MiB, .* 8\d{3} of them for the process itself"):
        pipe(PROMPT, seed=1, **SMALL)
    # What stages hold makes room once they leave.
    pipe._held["transformer"] = 8 << 30
    assert pipe(PROMPT, seed=1, **SMALL).images
    assert not pipe._sessions
    assert not pipe._held


def test_outputs_do_not_hold_on_to_a_session(pipe: TextToImagePipeline) -> None:
    assert pipe.encode_prompt("x").flags.owndata
    assert pipe.encode_image(picture(32, 32)).flags.owndata


def test_the_stage_that_needs_most_is_named(pipe: TextToImagePipeline) -> None:
    work = make_request(pipe.model, "x", {"height": 1024, "width": 1024, "tiled": False}).work
    with pytest.raises(InputError, match=r"200 of them for the process itself and \d+ for vae_decoder"):
        plan_memory(pipe.engine, work, 1 << 20, keep_loaded=True)
