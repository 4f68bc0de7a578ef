"""The picture pipeline around the numbers: options, errors, parts, previews, and what a PNG says."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from klein_bundle import export_klein
from klein_pipeline import PROMPT, SMALL, TEXT_LENGTH, changed, picture, pixels
from PIL import Image

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.errors import BundleError, CancelledError, EngineError, InputError
from intaglio.exporters.bundle import Dim
from intaglio.progress import ProgressEvent
from intaglio.runtimes import flow_matching
from intaglio.runtimes.denoising import Conditioning, Denoiser, Step
from intaglio.runtimes.images import load_image
from intaglio.runtimes.latents import pack
from intaglio.runtimes.memory_plan import plan_memory
from intaglio.runtimes.noise import normal
from intaglio.runtimes.picture_request import PictureModel, make_request
from intaglio.runtimes.preview import preview_image, shrink
from intaglio.runtimes.stage_run import TileSession
from intaglio.runtimes.text_to_image import TextToImagePipeline
from intaglio.runtimes.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def pipe(klein: Path) -> TextToImagePipeline:
    return intaglio.load(klein)


@pytest.fixture(scope="module")
def undistilled(klein: Path, tmp_path_factory: pytest.TempPathFactory) -> TextToImagePipeline:
    folder = tmp_path_factory.mktemp("undistilled")
    return intaglio.load(changed(klein, folder, '"is_distilled": true', '"is_distilled": false'))


# --- prompts ------------------------------------------------------------------------------------------------


def test_prompt_tokens_of_the_published_tokenizer(qwen3_folder: Path, tmp_path: Path) -> None:
    shutil.copy(qwen3_folder / "tokenizer.json", tmp_path)
    config = json.loads((qwen3_folder / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(config["chat_template"])
    tokenizer = Tokenizer(tmp_path, pad_token_id=151643)

    def ids(prompt: str) -> list[int]:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], enable_thinking=False)
        return tokenizer.encode(text, add_special_tokens=False)

    prefix, suffix = [151644, 872, 198], [151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271]
    bonsai = [64, 13673, 81034, 2143, 4916, 304, 264, 42024, 3338]
    assert ids(PROMPT) == prefix + bonsai + suffix
    assert ids("") == prefix + suffix
    assert 151667 not in tokenizer.encode(
        tokenizer.apply_chat_template([{"role": "user", "content": ""}]), add_special_tokens=False
    )


def test_prompts_are_padded_on_the_right(pipe: TextToImagePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    session = pipe._session("text_encoder")
    fed: list[dict[str, np.ndarray]] = []

    def run(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        fed.append(feeds)
        return session.run(feeds, outputs)

    monkeypatch.setitem(
        pipe._sessions, "text_encoder", SimpleNamespace(name="text_encoder", stage=session.stage, run=run)
    )
    pipe.encode_prompt(["ab", ""])
    ids, mask = fed[0]["input_ids"], fed[0]["attention_mask"]
    assert ids.shape == mask.shape == (2, TEXT_LENGTH)
    lengths = mask.sum(axis=1)
    assert lengths[0] == lengths[1] + 2
    assert lengths[1] == 25  # the bare template, a byte a token
    for row, length in enumerate(lengths):
        assert mask[row, :length].all()
        assert (ids[row, length:] == 256).all()
        assert 256 not in ids[row, :length]


def test_too_long_a_prompt_says_how_long(pipe: TextToImagePipeline) -> None:
    with pytest.raises(InputError, match=f"has {TEXT_LENGTH + 1} tokens with its template, and at most {TEXT_LENGTH}"):
        pipe("x" * (TEXT_LENGTH - 24), **SMALL)
    assert pipe("x" * 500, truncate=True, seed=1, **SMALL).images


# --- options ------------------------------------------------------------------------------------------------


def test_defaults(pipe: TextToImagePipeline, undistilled: TextToImagePipeline) -> None:
    request = make_request(pipe.model, "x", {})
    assert (request.height, request.width, request.guidance, request.negative_prompts) == (512, 512, 1.0, None)
    np.testing.assert_array_equal(request.schedule.sigmas, flow_matching.sigmas(4, 1024))
    request = make_request(undistilled.model, "x", {})
    assert (len(request.schedule.timesteps), request.guidance, request.negative_prompts) == (50, 4.0, ("",))
    unknown = PictureModel(**{**vars(pipe.model), "is_distilled": None})
    request = make_request(unknown, "x", {"guidance_scale": 3})
    assert (len(request.schedule.timesteps), request.guidance, request.negative_prompts) == (4, 3.0, ("",))


def test_a_guidance_embedding_takes_guidance_as_an_input(pipe: TextToImagePipeline) -> None:
    model = PictureModel(**{**vars(pipe.model), "guidance_embeds": True, "is_distilled": None})
    request = make_request(model, "x", {"height": 16, "width": 16})
    assert (request.guidance, request.negative_prompts) == (4.0, None)
    with pytest.raises(InputError, match="no run for a negative prompt"):
        make_request(model, "x", {"negative_prompt": "y"})
    fed = []
    stage = SimpleNamespace(inputs=[SimpleNamespace(name=n, dtype="float32") for n in ("hidden_states", "guidance")])
    for name in ("timestep", "img_ids", "txt_ids", "encoder_hidden_states"):
        stage.inputs.append(SimpleNamespace(name=name, dtype="int64" if "ids" in name else "float32"))

    def run(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        fed.append(feeds)
        return {"noise_pred": feeds["hidden_states"]}

    given = Conditioning(np.zeros((2, 3, 4), np.float32), guidance=2.5, guidance_embeds=True)
    session = SimpleNamespace(name="transformer", stage=stage, run=run)
    Denoiser(session, given, 1, 1).velocity(np.zeros((2, 1, 8), np.float32), np.float32(0.5), 0)
    np.testing.assert_array_equal(fed[0]["guidance"], np.float32([2.5, 2.5]))
    assert len(fed) == 1


def test_seeds_name_pictures(pipe: TextToImagePipeline) -> None:
    three = pipe(PROMPT, num_images_per_prompt=3, seed=8, **SMALL)
    assert three.seeds == (8, 9, 10)
    alone = pipe(PROMPT, seed=[9], **SMALL)
    assert np.abs(pixels(alone.images) - pixels(three.images)[1]).max() <= 1
    drawn = pipe(PROMPT, **SMALL)
    assert drawn.seeds is not None
    assert pipe(PROMPT, **SMALL).seeds != drawn.seeds
    np.testing.assert_array_equal(pixels(pipe(PROMPT, seed=drawn.seeds, **SMALL).images), pixels(drawn.images))


@pytest.mark.parametrize("rng", ["numpy", "mlx", "torch"])
def test_generators(pipe: TextToImagePipeline, rng: str) -> None:
    seeds = [3, 2**40]
    request = make_request(pipe.model, "x", {"seed": seeds, "rng": rng, "num_images_per_prompt": 2, **SMALL})
    expected = np.concatenate([pack(normal((1, 128, 2, 3), seed, rng)) for seed in seeds])
    np.testing.assert_array_equal(request.noise, expected)


def test_sigmas_by_hand_and_a_fixed_shift(pipe: TextToImagePipeline) -> None:
    options = {key: SMALL[key] for key in ("height", "width")}
    usual = pipe(PROMPT, seed=1, num_inference_steps=2, **options)
    levels = flow_matching.sigmas(2, 6)
    for given in (levels, levels[:-1].tolist()):
        np.testing.assert_array_equal(pipe(PROMPT, seed=1, sigmas=given, **options).latents, usual.latents)
    even = pipe(PROMPT, seed=1, shift=1.0, num_inference_steps=2, **options)
    np.testing.assert_array_equal(pipe(PROMPT, seed=1, sigmas=[1, 0.5], **options).latents, even.latents)
    assert (even.latents != usual.latents).any()


def test_a_bundle_can_fix_the_shift(klein: Path, tmp_path: Path) -> None:
    folder = changed(klein, tmp_path, '"shift": null', '"shift": 3.0')
    request = make_request(intaglio.load(folder).model, "x", SMALL)  # type: ignore[arg-type]
    np.testing.assert_array_equal(request.schedule.sigmas, flow_matching.sigmas(2, 6, shift=3.0))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, "prompt is 3; expected text"),
    ([], {}, r"prompt is \[\]; expected text"),
    (["a", 1], {}, "expected text, or a list of texts"),
    ("a\0b", {}, "a NUL character at position 1"),
    ("a\ud800b", SMALL, "half of a surrogate pair"),
    ("x" * 250_001, {}, "has 250001 characters"),
    ("x", {"height": 100}, "height is 100; expected a multiple of 16, and 96 and 112 are nearest"),
    ("x", {"width": 0}, "width is 0; expected a multiple of 16, at least 16"),
    ("x", {"width": 32.0}, "width is 32.0; expected an integer"),
    ("x", {"height": 8192}, "height is 8192, but the engine was compiled for 16 to 4096"),
    ("x", {"num_inference_steps": 0}, "num_inference_steps is 0; expected an integer from 1 to 1000"),
    ("x", {"num_inference_steps": 2.5}, "num_inference_steps is 2.5"),
    ("x", {"guidance_scale": 4.0}, "guidance_scale is 4, but this model was distilled to need none"),
    ("x", {"guidance_scale": 0.5}, "guidance_scale is 0.5; expected a number from 1 to 1000, where 1 is none"),
    ("x", {"guidance_scale": float("nan")}, "guidance_scale is nan"),
    ("x", {"negative_prompt": "y"}, "a negative prompt has no effect without guidance"),
    ("x", {"num_images_per_prompt": 0}, "num_images_per_prompt is 0"),
    ("x", {"num_images_per_prompt": 65}, "the number of pictures is 65, but the engine was compiled for 1 to 64"),
    (["x"] * 33, {"num_images_per_prompt": 2}, "the number of pictures is 66"),
    (
        "x",
        {"image": [picture(32, 32), picture(16, 4112)], **SMALL},
        "reference picture 2's height is 4112, but the engine was compiled for 16 to 4096",
    ),
    ("x", {"image": picture(4112, 16), **SMALL}, "reference picture 1's width is 4112"),
    ("x", {"seed": -1}, "seed is -1; expected an integer from 0"),
    ("x", {"seed": 1.5}, "seed is 1.5; expected an integer from 0"),
    ("x", {"seed": "7"}, "seed is '7'; expected an integer from 0"),
    ("x", {"seed": [1, 2]}, "there are 2 seeds for 1 pictures"),
    ("x", {"seed": 2**64 - 1, "num_images_per_prompt": 2}, f"seed is {2**64}"),
    ("x", {"rng": "dice"}, "rng is 'dice'; expected one of numpy, mlx, torch"),
    ("x", {"latents": np.zeros((1, 128, 2, 2)), **SMALL}, r"latents are \[1, 128, 2, 2\]; expected \[1, 128, 2, 3\]"),
    ("x", {"latents": np.full((1, 6, 128), np.nan), **SMALL}, "768 of 768 values of the latents are not finite"),
    ("x", {"latents": np.zeros((1, 6, 128)), "seed": 1, **SMALL}, "seed and latents are both given"),
    ("x", {"latents": np.zeros((1, 6, 128)), "rng": "mlx", **SMALL}, "rng and latents are both given"),
    ("x", {"strength": 0.5}, "strength is given without image"),
    ("x", {"image": []}, "image is an empty list"),
    ("x", {"image": "nowhere.png"}, "nowhere.png: there is no such file"),
    ("x", {"image": picture(50, 64)}, "width is 50; expected a multiple of 16, and 48 and 64 are nearest"),
    ("x", {"image": [picture(64, 64)] * 2, "strength": 0.5}, "2 pictures are given with strength"),
    (
        "x",
        {"image": picture(64, 64), "strength": 0.5, "height": 32},
        "image is 64 by 64 pixels, and the picture to be 64",
    ),
    ("x", {"image": picture(64, 64), "strength": 0}, "strength is 0; expected a number above 0"),
    ("x", {"image": picture(64, 64), "strength": 0.1}, "less than one step of 4"),
    ("x", {"sigmas": [1, 0.5], "num_inference_steps": 3}, "num_inference_steps is 3, but there are 2 sigmas above 0"),
    ("x", {"sigmas": [1, 0.5], "shift": 3.0}, "sigmas and shift are both given"),
    ("x", {"sigmas": [0.5, 1]}, "expected each to be below the last"),
    ("x", {"sigmas": []}, "sigmas has no level above 0"),
    ("x", {"shift": 0}, "shift is 0; expected a number"),
    ("x", {"golden_replace": ["transformer"]}, "golden_replace is given without golden"),
    ("x", {"golden": "nowhere"}, "nowhere: no such folder"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_what_is_refused(pipe: TextToImagePipeline, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipe(prompt, **options)


def test_an_unknown_option_is_a_mistake_of_the_caller(pipe: TextToImagePipeline) -> None:
    with pytest.raises(TypeError, match="heigth is no option of a picture"):
        pipe("x", heigth=64)  # type: ignore[call-arg]


def test_negative_prompts_match_prompts(undistilled: TextToImagePipeline) -> None:
    with pytest.raises(InputError, match="there are 2 negative prompts for 3 prompts"):
        undistilled(["a", "b", "c"], negative_prompt=["d", "e"], **SMALL)
    request = make_request(
        undistilled.model,
        ["a", "b"],
        {"negative_prompt": ["c", "d"], "num_images_per_prompt": 2, **SMALL},  # type: ignore[typeddict-item]
    )
    assert request.prompts == ("a", "a", "b", "b")
    assert request.negative_prompts == ("c", "c", "d", "d")


# --- stages -------------------------------------------------------------------------------------------------


def test_the_parts_are_the_whole(undistilled: TextToImagePipeline) -> None:
    start, size = picture(48, 32), {"height": 32, "width": 48}
    whole = undistilled(
        PROMPT, image=start, strength=0.5, guidance_scale=3.0, negative_prompt="grey", seed=4, num_inference_steps=4
    )
    embeds, negative = undistilled.encode_prompt(PROMPT), undistilled.encode_prompt("grey")
    latents = undistilled.sample_latents(
        embeds,
        negative_embeds=negative,
        start=undistilled.encode_image(start),
        strength=0.5,
        guidance_scale=3.0,
        seed=4,
        num_inference_steps=4,
        **size,
    )
    np.testing.assert_array_equal(latents, whole.latents)
    images = undistilled.decode(latents, **size)
    np.testing.assert_array_equal(pixels(images), pixels(whole.images))
    assert np.abs(pixels(undistilled.decode(latents, tiled=True, **size)) - pixels(images)).max() <= 1
    with pytest.raises(InputError, match="negative_embeds are missing"):
        undistilled.sample_latents(embeds, guidance_scale=3.0, **size)
    with pytest.raises(InputError, match="start and strength go together"):
        undistilled.sample_latents(embeds, strength=0.5, **size)
    with pytest.raises(TypeError, match="truncate is no option of the steps"):
        undistilled.sample_latents(embeds, truncate=True, **size)


BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"start": np.zeros((1, 128, 3, 2)), "strength": 0.5}, r"start are \[1, 128, 3, 2\]; expected \[1, 128, 2, 3\]"),
    ({"start": np.zeros((2, 128, 2, 3)), "strength": 0.5}, r"expected \[1, 128, 2, 3\]"),
    ({"start": np.full((1, 128, 2, 3), np.inf), "strength": 0.5}, "768 of 768 values of the start are not finite"),
    ({"start": np.zeros((1, 128, 2, 3), int), "strength": 0.5}, "start are int64; expected float32"),
    ({"embeds": np.zeros((1, 96, 383))}, r"embeds are \[1, 96, 383\]; expected \[batch, tokens, 384\]"),
    ({"embeds": np.zeros((0, 96, 384))}, r"embeds are \[0, 96, 384\]"),
    ({"embeds": np.zeros((96, 384))}, r"embeds are \[96, 384\]"),
    ({"embeds": 3}, "embeds are int64; expected float32"),
    ({"embeds": [[1.0], [1.0, 2.0]]}, "embeds are no array of numbers"),
    ({"embeds": np.full((1, 96, 384), np.nan)}, "36864 of 36864 values of the embeds are not finite"),
    ({"embeds": np.zeros((65, 1, 384))}, "the number of pictures is 65"),
    ({"embeds": np.zeros((1, 40961, 384), np.float16)}, "the number of text tokens is 40961"),
    (
        {"negative_embeds": np.zeros((1, 95, 384)), "guidance_scale": 2.0},
        r"negative_embeds are \[1, 95, 384\]; expected \[1, 96, 384\]",
    ),
    (
        {"negative_embeds": np.full((1, 96, 384), 1e39), "guidance_scale": 2.0},
        "values of the negative_embeds are not finite",
    ),
    ({"references": [np.zeros((1, 128, 2, 2)), np.zeros((1, 64, 2, 2))]}, r"references\[1\] are \[1, 64, 2, 2\]"),
    ({"references": [np.zeros((2, 128, 2, 2))]}, r"expected \[1, 128, height, width\]"),
    ({"references": [np.zeros((1, 128, 0, 2))]}, r"references\[0\] are \[1, 128, 0, 2\]"),
    ({"references": [np.full((1, 128, 1, 1), -np.inf)]}, r"128 of 128 values of the references\[0\] are not finite"),
    ({"references": [np.zeros((1, 128, 256, 256), np.float16)]}, "the number of image tokens is 65542"),
]


@pytest.mark.parametrize(("given", "message"), BAD_PARTS, ids=[case[1][:40] for case in BAD_PARTS])
def test_latents_are_sampled_from_what_fits(
    undistilled: TextToImagePipeline, given: dict[str, Any], message: str
) -> None:
    options = {"embeds": np.zeros((1, TEXT_LENGTH, 384), np.float32), "guidance_scale": 1.0, **SMALL, **given}
    with pytest.raises(InputError, match=message):
        undistilled.sample_latents(**options)


def test_parts_of_nothing(pipe: TextToImagePipeline) -> None:
    for prompt in ([], 3, None, ["a", 1], [""] * 65):
        with pytest.raises(InputError, match=r"prompt is .*; expected text|the number of pictures is 65"):
            pipe.encode_prompt(prompt)  # type: ignore[arg-type]
    for latents in (np.zeros((0, 6, 128)), np.zeros((0, 128, 2, 3)), 0.5, [], [[0.0], []]):
        with pytest.raises(InputError, match=r"latents are (\[.*; expected \[1, 128, 2, 3\]|no array of numbers)"):
            pipe.decode(latents, height=32, width=48)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="height is 4112, but the engine was compiled for 16 to 4096"):
        pipe.decode(np.zeros((1, 257, 128)), height=4112, width=16)
    with pytest.raises(InputError, match="width is 4112, but the engine"):
        pipe.encode_image(picture(4112, 16))


def test_pictures_and_negative_prompts_fill_the_engine(undistilled: TextToImagePipeline) -> None:
    # Together they are more texts than the engine takes rows.
    prompts = [str(i) for i in range(64)]
    with pytest.raises(CancelledError, match="paint: cancelled after 0"):
        undistilled(prompts, seed=1, height=16, width=16, progress=lambda event: event.task != "paint")


def test_an_engine_of_fixed_batch_is_refused(pipe: TextToImagePipeline) -> None:
    model = replace(pipe.model, dims=pipe.model.dims | {"batch": Dim(min=2, max=2)})
    with pytest.raises(InputError, match="in one run of the decoder is 1, but the engine was compiled for 2 to 2"):
        make_request(model, ["a", "b"], {})


def test_ordinary_outputs_are_no_taps() -> None:
    names = ("y", "y_mean", "y_variance")
    stage = SimpleNamespace(
        inputs=[SimpleNamespace(name="x", dtype="float32")], outputs=[SimpleNamespace(name=name) for name in names]
    )
    outputs = {name: np.full((1, 2), np.nan, np.float32) for name in names}
    session = SimpleNamespace(name="vae_tiles_out", stage=stage, run=lambda feeds, names: outputs)
    with pytest.raises(EngineError, match=r"2 of 2 values of y are not finite\. Export with --taps"):
        TileSession(session).run({"x": np.zeros((1, 2), np.float32)})


def test_a_lacking_stage_is_named(klein: Path, tmp_path: Path) -> None:
    shutil.copytree(klein.parent / "checkpoint", tmp_path / "checkpoint")
    lacking = intaglio.load(export_klein(tmp_path, taps=False, stages=["transformer", "vae_decoder"]))
    with pytest.raises(
        BundleError, match="lacks the stage text_encoder, which this needs; it has transformer, vae_dec"
    ):
        lacking("x", **SMALL)
    with pytest.raises(BundleError, match="lacks the stage vae_encoder"):
        lacking.encode_image(picture(32, 32))
    with pytest.raises(InputError, match="has no stages to decode in bands"):
        plan_memory(lacking.engine, make_request(lacking.model, "x", {"tiled": True}).work, None, keep_loaded=True)
    embeds = np.zeros((1, TEXT_LENGTH, 384), np.float32)
    latents = lacking.sample_latents(embeds, seed=1, **SMALL)
    assert lacking.decode(latents, height=32, width=48)[0].size == (48, 32)


def test_bundles_of_text_take_no_memory_budget(tmp_path: Path) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    with pytest.raises(InputError, match="memory_budget and keep_loaded are for pictures"):
        intaglio.load(tmp_path / "bundle", memory_budget=1 << 30)
    with pytest.raises(BundleError, match="is a bundle for text-generation, expected one for text-to-image"):
        TextToImagePipeline(open_engine(tmp_path / "bundle"))


# --- progress and previews ----------------------------------------------------------------------------------


def test_progress_counts_steps(pipe: TextToImagePipeline) -> None:
    events: list[ProgressEvent] = []
    pipe(PROMPT, image=picture(48, 32), strength=0.5, num_inference_steps=4, seed=1, progress=events.append)
    assert [(e.done, e.total, e.unit) for e in events if e.task == "paint"] == [(i, 2, "steps") for i in range(3)]
    assert {e.task for e in events} == {"encode", "paint", "decode"}


def test_previews_show_what_is_coming(pipe: TextToImagePipeline) -> None:
    seen: list[tuple[int, Image.Image]] = []
    output = pipe(
        PROMPT, num_images_per_prompt=2, seed=1, height=256, width=160, preview=lambda i, image: seen.append((i, image))
    )
    assert [i for i, _ in seen] == [0, 1, 2, 3]
    # 16 by 10 latents become 8 by 5, two pictures side by side.
    assert {image.size for _, image in seen} == {(160, 128)}
    assert "preview" in output.timings
    # At the last step what is expected is what comes.
    last = np.zeros_like(output.latents)
    step = Step(0, last, output.latents, output.latents)
    expected = preview_image(pipe._session("vae_decoder"), step, np.float32([0, 0]), 16, 10)
    assert np.abs(pixels([seen[-1][1]]) - pixels([expected])).max() <= 1


def test_previews_take_the_noise_off(pipe: TextToImagePipeline) -> None:
    decoder, generator = pipe._session("vae_decoder"), np.random.default_rng(1)
    before, velocity = (generator.normal(size=(1, 6, 128)).astype(np.float32) for _ in range(2))
    found = preview_image(decoder, Step(1, velocity, before, before), np.float32([1, 0.5, 0]), 2, 3)
    expected = pipe.decode(before - np.float32(0.5) * velocity, height=32, width=48)
    np.testing.assert_array_equal(pixels([found]), pixels(expected))


def test_shrinking_takes_means() -> None:
    latents = np.random.default_rng(0).normal(size=(2, 3, 20, 9)).astype(np.float32)
    small = shrink(latents, 8)
    assert small.shape == (2, 3, 7, 3)
    np.testing.assert_allclose(small[1, 2, 1, 2], latents[1, 2, 3:6, 6:9].mean(), rtol=1e-5)
    np.testing.assert_allclose(small[0, 0, 6, 0], latents[0, 0, 18:20, 0:3].mean(), rtol=1e-5)
    np.testing.assert_array_equal(shrink(latents[:, :, :8, :8], 8), latents[:, :, :8, :8])


def test_a_batch_in_parts_is_the_batch(pipe: TextToImagePipeline) -> None:
    prompts = ["a", "b", "c"]
    ids = pipe._token_ids(prompts, truncate=False)
    whole = pipe._encode(ids, rows=None)
    for rows in (1, 2):
        np.testing.assert_allclose(pipe._encode(ids, rows=rows), whole, atol=1e-5)
    assert all((whole[0] != whole[i]).any() for i in (1, 2))


# --- what is not finite -------------------------------------------------------------------------------------


def test_the_first_tap_that_is_not_finite_is_named(pipe: TextToImagePipeline) -> None:
    huge = np.full((1, 6, 128), 3e38, np.float32)
    where = r"transformer: \d+ of 768 values of noise_pred are not finite at step 0\. The first point .* is x_emb_out\."
    with pytest.raises(EngineError, match=where):
        pipe(PROMPT, latents=huge, **SMALL)
    with pytest.raises(EngineError, match=r"vae_decoder: .* values of sample are not finite at picture 1 of 1"):
        pipe.decode(huge, height=32, width=48)
    with pytest.raises(EngineError, match=r"vae_tiles_.* are not finite"):
        pipe.decode(huge, height=32, width=48, tiled=True)


def fake_transformer(pipe: TextToImagePipeline, noise_pred: Callable[[int], np.ndarray]) -> Any:
    """A session without taps, whose runs are counted."""
    stage = pipe.engine.bundle.stages["transformer"]
    stage = stage.model_copy(update={"outputs": stage.outputs[:1]})
    runs: list[int] = []

    def run(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        runs.append(len(runs))
        return {"noise_pred": noise_pred(runs[-1])}

    return SimpleNamespace(name="transformer", stage=stage, run=run)


def test_the_step_is_named(pipe: TextToImagePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(run: int) -> np.ndarray:
        return np.full((1, 6, 128), np.inf if run == 1 else 0.0, np.float32)

    monkeypatch.setitem(pipe._sessions, "transformer", fake_transformer(pipe, late))
    with pytest.raises(
        EngineError, match=r"768 of 768 values of noise_pred are not finite at step 1\. Export with --taps"
    ):
        pipe(PROMPT, **SMALL)
    huge = np.full((1, 6, 128), -3e38, np.float32)
    monkeypatch.setitem(pipe._sessions, "transformer", fake_transformer(pipe, lambda run: huge))
    with pytest.raises(
        EngineError, match="the latents after step 0 are not finite, though the transformer's output is"
    ):
        pipe(PROMPT, latents=-huge, sigmas=[1.0, 0.01], height=32, width=48)


# --- what pictures say of themselves ------------------------------------------------------------------------


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


def test_texts(undistilled: TextToImagePipeline) -> None:
    output = undistilled(
        "ünï", negative_prompt="grey", guidance_scale=2.5, seed=6, num_images_per_prompt=2, rng="torch", **SMALL
    )
    first, second = output.texts
    assert first["prompt"] == "ünï"
    assert first["negative prompt"] == "grey"
    assert (first["seed"], second["seed"], first["rng"]) == ("6", "7", "torch")
    assert (first["steps"], first["guidance"], first["size"]) == ("2", "2.5", "48x32")
    assert first["model"] == "qwen3, flux2, autoencoder_kl_flux2"
    assert re.search(r"transformer diffusion_pytorch_model.safetensors sha256 [0-9a-f]{64}", first["sources"])
    assert re.fullmatch(r"intaglio \S+, onnxruntime \S+", first["Software"])
    reference = undistilled("x", image=picture(32, 32), seed=1, guidance_scale=1.0, **SMALL).texts[0]
    assert reference["reference pictures"] == f"32x32 sha256 {sha256(load_image(picture(32, 32)))}"
    assert "negative prompt" not in reference
    start = undistilled("x", image=picture(48, 32), strength=0.5, seed=1, guidance_scale=1.0, **SMALL).texts[0]
    assert start["strength"] == "0.5"
    assert start["start picture"] == f"48x32 sha256 {sha256(load_image(picture(48, 32)))}"
    noise = np.random.default_rng(0).normal(size=(2, 6, 128))
    given = undistilled(["x", "y"], latents=noise, guidance_scale=1.0, truncate=True, tiled=True, **SMALL).texts
    assert [text["seed"] for text in given] == [f"none: latents were given, sha256 {sha256(row)}" for row in noise]
    assert (given[0]["truncate"], given[0]["decoded"]) == ("yes", "in bands of 64 rows")
    assert not {"truncate", "decoded", "start picture"} & first.keys()


def test_texts_name_the_model(pipe: TextToImagePipeline) -> None:
    text, bundle = pipe("x", seed=2**64 - 1, **SMALL).texts[0], pipe.engine.bundle
    assert text["weights"] == f"float32, sha256 {bundle.weights.sha256}"
    stages = ("text_encoder", "transformer", "vae_decoder")
    assert text["graphs"].splitlines() == [f"{stage} sha256 {bundle.stages[stage].sha256}" for stage in stages]
    assert re.fullmatch(r"cpu, exact, \w+ \w+", text["engine"])
    # Numbers are whole: what is read back is what was used.
    sigmas = [float(sigma) for sigma in text["sigmas"].split(", ")]
    np.testing.assert_array_equal(np.float32(sigmas), flow_matching.sigmas(2, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"progress": 5}, "progress is 5; expected a function"),
        ({"preview": "x"}, "preview is 'x'; expected a function"),
        ({"truncate": "no"}, "truncate is 'no'; expected True or False"),
        ({"tiled": 1}, "tiled is 1; expected True or False"),
        ({"seed": b"a"}, "seed is b'a'"),
        ({"num_images_per_prompt": 10**9}, "num_images_per_prompt is 1000000000"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str, pipe: TextToImagePipeline) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        pipe(PROMPT, **SMALL, **options)


def test_a_budget_that_is_no_number_is_refused(klein: Path) -> None:
    with pytest.raises(InputError, match="memory_budget is '4GiB'; expected a number of bytes"):
        intaglio.load(klein, memory_budget="4GiB")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="threads is 100000, expected 0"):
        intaglio.load(klein, threads=100000).encode_prompt("a")
