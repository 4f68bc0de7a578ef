"""A pipeline for pictures of 64 pixels, whose latents are 8 pixels wide, against diffusers' ``Flux2KleinPipeline``.

Bounds: pictures within 1/255 of diffusers' before rounding, given the same noise; conditioning relative L2 <= 1e-4;
every stage and tap relative L2 <= 1e-5 from onnxruntime without kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import small_pipeline
import torch
from klein_pipeline import pixels
from measure import intaglio as command_line
from PIL import Image
from small_pipeline import CHANNELS, FACTOR, SHIFT, TEXT_LENGTH

import intaglio
from intaglio.errors import InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes import flow_matching
from intaglio.runtimes.difference import compare
from intaglio.runtimes.golden_writing import write_golden
from intaglio.runtimes.picture_request import make_request
from intaglio.runtimes.text_to_image import TextToImagePipeline

PIXEL_BOUND, RELATIVE_L2, TAP_BOUND, COSINE = 1.0, 1e-4, 1e-5, 0.9999999
PROMPTS = ["a red apple", "cat face"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pipeline.write_bundle(tmp_path_factory.mktemp("small"), taps=True, pack_ternary=True)


@pytest.fixture(scope="module")
def pipe(bundle: Path) -> TextToImagePipeline:
    return intaglio.load(bundle)


@pytest.fixture(scope="module")
def oracle(bundle: Path) -> Any:
    pipeline = diffusers.Flux2KleinPipeline.from_pretrained(bundle.parent / "checkpoint", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(oracle: Any, prompts: list[str], **options: Any) -> np.ndarray:
    """diffusers' pictures, float64 ``[batch, height, width, 3]`` from 0 to 255, not rounded."""
    settings = {"text_encoder_out_layers": small_pipeline.SMALL.layers, "max_sequence_length": TEXT_LENGTH}
    return 255 * np.asarray(oracle(prompt=prompts, output_type="np", **settings, **options).images, np.float64)


def noise(batch: int, height: int, width: int) -> np.ndarray:
    shape = (batch, CHANNELS, height // FACTOR, width // FACTOR)
    return np.random.default_rng(height + width).normal(size=shape).astype(np.float32)


def same(found: list[Any], expected: np.ndarray) -> None:
    assert pixels(found).shape == expected.shape
    assert expected.std() > 10
    assert np.abs(pixels(found) - expected).max() <= PIXEL_BOUND


def test_the_bundle_says_what_it_is_made_for(bundle: Path, pipe: TextToImagePipeline) -> None:
    described = read_bundle(bundle)
    dims, info = described.dims, described.text_to_image
    assert info is not None
    assert (info.text_length, info.shift, info.is_distilled) == (TEXT_LENGTH, SHIFT, False)
    for side in ("height", "width"):
        assert (dims[side].min, dims[side].opt, dims[side].multiple_of) == (8, 64, 8)
    assert (dims["image_tokens"].opt, dims["text_tokens"].opt) == (64, TEXT_LENGTH)
    request = make_request(pipe.model, "x", {"num_inference_steps": 20})
    assert (request.height, request.width, request.grid, request.image_tokens) == (64, 64, (8, 8), 64)
    np.testing.assert_array_equal(request.schedule.sigmas, flow_matching.sigmas(20, 64, shift=SHIFT))
    assert make_request(pipe.model, "x", {"width": 72}).grid == (8, 9)
    for options in ({"width": 70}, {"image": np.zeros((64, 70, 3), np.uint8)}):
        with pytest.raises(InputError, match="width is 70; expected a multiple of 8, and 64 and 72 are nearest"):
            make_request(pipe.model, "x", options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"\[1, 32, 8, 8\].* for pictures of 64 by 64 pixels"):
        make_request(pipe.model, "x", {"latents": np.zeros((1, 32, 4, 4), np.float32)})


@pytest.mark.parametrize("prompt", ["a red apple", "", "x" * TEXT_LENGTH])
def test_conditioning(pipe: TextToImagePipeline, oracle: Any, prompt: str) -> None:
    with torch.no_grad():
        expected, _ = oracle.encode_prompt(
            [prompt], text_encoder_out_layers=small_pipeline.SMALL.layers, max_sequence_length=TEXT_LENGTH
        )
    assert compare("prompt_embeds", pipe.encode_prompt(prompt), expected.numpy()).relative_l2 <= RELATIVE_L2


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96)])
def test_guidance_from_an_empty_prompt(pipe: TextToImagePipeline, oracle: Any, height: int, width: int) -> None:
    latents = noise(2, height, width)
    options = {"height": height, "width": width, "num_inference_steps": 4, "guidance_scale": 3.0}
    expected = paint(oracle, PROMPTS, latents=torch.from_numpy(latents), **options)
    same(pipe(PROMPTS, latents=latents, **options).images, expected)
    same(pipe(PROMPTS, negative_prompt="", latents=latents, tiled=True, **options).images, expected)


def test_an_empty_prompt_paints(pipe: TextToImagePipeline, oracle: Any) -> None:
    latents, options = noise(1, 64, 64), {"num_inference_steps": 3, "guidance_scale": 1.0}
    expected = paint(oracle, [""], latents=torch.from_numpy(latents), height=64, width=64, **options)
    same(pipe("", latents=latents, **options).images, expected)


def test_a_reference_picture(pipe: TextToImagePipeline, oracle: Any) -> None:
    y, x = np.mgrid[:64, :72]
    reference = Image.fromarray(
        np.stack([3 * x, 255 - 3 * y, 2 * (x + y) % 256], axis=-1).clip(0, 255).astype(np.uint8)
    )
    latents = noise(1, 64, 72)
    options = {"image": [reference], "num_inference_steps": 3, "guidance_scale": 1.0}
    expected = paint(oracle, PROMPTS[:1], latents=torch.from_numpy(latents), height=64, width=72, **options)
    same(pipe(PROMPTS[:1], latents=latents, **options).images, expected)
    with torch.no_grad():
        encoded = oracle._encode_vae_image(oracle.image_processor.preprocess(reference, height=64, width=72), None)
    assert compare("latents", pipe.encode_image(reference), encoded.numpy()).relative_l2 <= RELATIVE_L2


@pytest.mark.parametrize(("height", "width"), [(None, None), (64, 64), (8, 24)])
def test_parity_of_every_stage_and_tap(bundle: Path, height: int | None, width: int | None) -> None:
    report = intaglio.parity(bundle, height=height, width=width, batch=2, bound=TAP_BOUND, min_cosine=COSINE)
    assert report.first_divergent is None
    assert set(report.stages) == set(read_bundle(bundle).stages)
    taps = sum(d.stage == "vae_decoder" for d in report.differences)
    assert taps == 10  # one block less than FLUX.2's


def test_a_golden_folder(bundle: Path, pipe: TextToImagePipeline, tmp_path: Path) -> None:
    write_golden(bundle, tmp_path / "golden", tokens=TEXT_LENGTH, height=64, width=96, steps=2)
    report = intaglio.parity(bundle, against=f"golden:{tmp_path / 'golden'}", bound=RELATIVE_L2)
    assert report.first_divergent is None
    output = pipe("", golden=tmp_path / "golden", golden_replace=["text_encoder"], guidance_scale=1.0)
    assert output.images[0].size == (96, 64)
    assert output.golden is not None
    assert max(d.relative_l2 for d in output.golden.differences) <= RELATIVE_L2


def test_previews_and_budgets(bundle: Path, pipe: TextToImagePipeline) -> None:
    sizes: list[tuple[int, int]] = []
    options: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 3.0, "seed": 1}
    pipe("cat face", preview=lambda i, image: sizes.append(image.size), width=96, **options)
    pipe("cat face", preview=lambda i, image: sizes.append(image.size), height=64, width=256, **options)
    # As large as the picture up to 128 pixels.
    assert sizes == [(96, 64)] * 2 + [(128, 32)] * 2
    within = intaglio.load(bundle, memory_budget=2 << 30, keep_loaded=False)
    expected = pipe("cat face", **options)
    assert np.abs(pixels(within("cat face", **options).images) - pixels(expected.images)).max() <= 1
    packed = expected.latents
    assert np.abs(pixels(pipe.decode(packed, height=64, width=64)) - pixels(expected.images)).max() <= 1


def test_bench_takes_the_size_that_it_is_made_for(bundle: Path) -> None:
    result = intaglio.bench(bundle, repeats=1)
    assert {(row["height"], row["width"]) for row in result["rows"]} == {(64, 64)}
    with pytest.raises(InputError, match="width is 70; expected a multiple of 8"):
        intaglio.bench(bundle, width=70, repeats=1)
    with pytest.raises(InputError, match=r"has latents of 32 channels and 8 pixels, and sd\.cpp runs only FLUX\.2's"):
        intaglio.bench(bundle, against="sd.cpp", repeats=1)


def test_the_command_line(bundle: Path, tmp_path: Path) -> None:
    options = ("--steps", 2, "--guidance", 3, "--negative-prompt", "", "--seed", 3)
    done = command_line("run", bundle, "", "-o", tmp_path / "out.png", *options)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert Image.open(tmp_path / "out.png").size == (64, 64)
    done = command_line("run", bundle, "a", "-o", tmp_path / "out.png", "--width", 60, *options)
    assert done.returncode == 2
    assert "a multiple of 8, and 56 and 64 are nearest" in done.stderr
    done = command_line("parity", bundle, "--stage", "vae_encoder", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
