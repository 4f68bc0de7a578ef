"""Pictures beside a golden folder: stored tensors to start from, to put in place of a stage, and to compare with."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from klein_pipeline import TEXT_LENGTH

import intaglio
from intaglio.errors import InputError
from intaglio.progress import Progress
from intaglio.runtimes import flow_matching
from intaglio.runtimes.denoising import Conditioning, Denoiser, Schedule, Step, denoise
from intaglio.runtimes.golden_writing import write_golden
from intaglio.runtimes.latents import image_ids, pack, text_ids
from intaglio.runtimes.noise import normal
from intaglio.runtimes.text_to_image import TextToImagePipeline


@pytest.fixture(scope="module")
def pipe(klein: Path) -> TextToImagePipeline:
    return intaglio.load(klein)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def stored(pipe: TextToImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden folder of two steps, 32 by 48 pixels, of another prompt's conditioning."""
    folder = tmp_path_factory.mktemp("golden")
    embeds, noise = pipe.encode_prompt("a lake"), pack(normal((1, 128, 2, 3), 5))
    sigmas = flow_matching.sigmas(2, 6)
    tensors = {
        "cond": embeds[0],
        "tf_in_hidden_states": noise[0],
        "img_ids": image_ids(2, 3).astype(np.float32),
        "txt_ids": text_ids(TEXT_LENGTH)[None],
        "timesteps": flow_matching.timesteps(sigmas),
        "sigmas": sigmas[:-1],
    }

    def keep(step: Step) -> None:
        tensors[f"noise_step{step.index}"] = step.noise_pred
        tensors[f"latent_after_step{step.index}"] = step.after[0]

    schedule = Schedule(sigmas, flow_matching.timesteps(sigmas) / np.float32(1000))
    denoiser = Denoiser(pipe._session("transformer"), Conditioning(embeds), 2, 3)
    latents = denoise(denoiser, noise, schedule, Progress(None, "", 2, ""), keep)
    tensors["vae_decoded"] = pipe._decode(latents.transpose(0, 2, 1).reshape(1, 128, 2, 3), None, None)
    for name, tensor in tensors.items():
        np.save(folder / f"{name}.npy", tensor)
    return folder


@pytest.fixture
def golden(stored: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(stored, tmp_path / "golden")


STEPS = [f"{name}{i}" for i in range(2) for name in ("noise_step", "latent_after_step")]


def test_golden_inputs_and_comparisons(pipe: TextToImagePipeline, golden: Path) -> None:
    same = pipe("a lake", golden=golden)
    assert same.golden is not None
    assert [d.name for d in same.golden.differences] == ["cond", *STEPS, "vae_decoded"]
    assert {d.stage for d in same.golden.differences} == {"text_encoder", "transformer", "vae_decoder"}
    assert all(d.relative_l2 < 1e-5 and d.cosine > 0.99999 for d in same.golden.differences)
    assert (same.golden.missing, same.golden.replaced, same.seeds) == ((), (), None)
    other = pipe("a house", golden=golden)
    assert other.golden is not None
    assert all(d.relative_l2 > 1e-4 for d in other.golden.differences)
    replaced = pipe("a house", golden=golden, golden_replace=["text_encoder"])
    assert replaced.golden is not None
    assert [d.name for d in replaced.golden.differences] == [*STEPS, "vae_decoded"]
    assert all(d.relative_l2 < 1e-5 for d in replaced.golden.differences)
    painted = pipe("a house", golden=golden, golden_replace=["transformer"])
    assert painted.golden is not None
    assert [d.name for d in painted.golden.differences] == ["cond", "vae_decoded"]
    assert painted.golden.differences[1].relative_l2 < 1e-5
    np.testing.assert_array_equal(painted.latents[0], np.load(golden / "latent_after_step1.npy"))
    assert painted.texts[0]["golden"].startswith("golden, transformer\nlatent_after_step1 sha256 ")


def test_what_a_golden_folder_lacks(pipe: TextToImagePipeline, golden: Path) -> None:
    for name in ("vae_decoded", "noise_step1"):
        (golden / f"{name}.npy").unlink()
    output = pipe("a lake", golden=golden)
    assert output.golden is not None
    assert output.golden.missing == ("noise_step1", "vae_decoded")
    for name in ("tf_in_hidden_states", "sigmas"):
        (golden / f"{name}.npy").unlink()
    with pytest.raises(InputError, match=r"lacks tf_in_hidden_states.npy, sigmas.npy, needed here"):
        pipe("a lake", golden=golden)
    (golden / "cond.npy").unlink()
    with pytest.raises(InputError, match=r"lacks cond.npy, needed here"):
        pipe("a lake", golden=golden, golden_replace=["text_encoder", "transformer"])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("cond", np.zeros((96, 383)), r"cond.npy: has the shape \[96, 383\], expected \[1, any, 384\]"),
        ("cond", np.zeros((2, 96, 384)), r"cond.npy: has the shape \[2, 96, 384\], expected \[1, any, 384\]"),
        ("cond", np.full((96, 384), 1e39), "cond.npy: holds values that are too large for float32"),
        ("cond", np.zeros((2, 384)), "txt_ids.npy: has 96 tokens, expected 2"),
        ("tf_in_hidden_states", np.zeros((4, 128)), r"has the shape \[4, 128\], expected \[1, 6, 128\]"),
        ("tf_in_hidden_states", np.full((6, 128), np.nan), "768 values are not finite"),
        ("img_ids", image_ids(3, 2)[::-1], "are not those of one grid, row by row"),
        ("img_ids", np.full((6, 4), 0.5), "img_ids.npy: holds values that are no integers"),
        ("txt_ids", np.zeros((6, 3)), r"txt_ids.npy: has the shape \[6, 3\], expected \[any, 4\]"),
        ("txt_ids", text_ids(7), "txt_ids.npy: has 7 tokens, expected 96"),
        ("sigmas", np.array([1, 0.9, 0.8, 0.5]), "has 2 timesteps and 4 sigmas"),
        ("sigmas", np.array([np.nan, 0.9]), "must be lists of numbers, with no NaN"),
        ("latent_after_step1", np.zeros((6, 64)), r"latent_after_step1.npy: has the shape \[6, 64\]"),
        ("vae_decoded", np.zeros((1, 3, 32, 32)), r"vae_decoded.npy: has the shape"),
        ("vae_decoded", np.array("text"), "expected float32 or integers"),
    ],
)
def test_damaged_golden_files(
    pipe: TextToImagePipeline, golden: Path, name: str, array: np.ndarray, message: str
) -> None:
    np.save(golden / f"{name}.npy", array)
    with pytest.raises(InputError, match=message):
        pipe("a lake", golden=golden, golden_replace=["text_encoder"] if name == "cond" else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed and golden are both given"),
        ({"sigmas": [1.0]}, "sigmas and golden are both given"),
        ({"num_inference_steps": 3}, "num_inference_steps is 3, but the golden folder holds 2 steps"),
        ({"height": 64}, "the golden folder holds 48 by 32 pixels, asked are 48 by 64"),
        ({"num_images_per_prompt": 2}, "2 pictures are asked for, but a golden folder holds one"),
        ({"golden_replace": ["vae_decoder"]}, "golden_replace names 'vae_decoder'; there is text_encoder, transformer"),
    ],
)
def test_options_that_a_golden_folder_brings(
    pipe: TextToImagePipeline, golden: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pipe("a lake", golden=golden, **options)


def test_nothing_runs_before_the_files_fit(pipe: TextToImagePipeline, golden: Path) -> None:
    np.save(golden / "vae_decoded.npy", np.zeros((3, 32, 32), np.float32))
    tasks: list[str] = []
    with pytest.raises(InputError, match=r"vae_decoded.npy: has the shape \[3, 32, 32\], expected \[1, 3, 32, 48\]"):
        pipe("a lake", golden=golden, progress=lambda event: tasks.append(event.task))
    assert not tasks


def test_whatever_parity_takes(pipe: TextToImagePipeline, golden: Path) -> None:
    # No timesteps, and the conditioning under its other name, which is only compared.
    (golden / "timesteps.npy").unlink()
    np.save(golden / "timestep_step0.npy", np.float32([1000]))
    (golden / "cond.npy").rename(golden / "te_cond_384.npy")
    output = pipe("a lake", golden=golden)
    assert output.golden is not None
    assert [d.name for d in output.golden.differences] == ["te_cond_384", *STEPS, "vae_decoded"]
    assert all(d.relative_l2 < 1e-5 for d in output.golden.differences)
    (golden / "te_cond_384.npy").rename(golden / "cond.npy")
    report = intaglio.parity(pipe.engine.bundle_path, against=f"golden:{golden}", keep_going=True)
    assert {d.name for d in report.differences} >= set(STEPS)
    assert report.first_divergent is None


def test_a_run_that_ended_early(pipe: TextToImagePipeline, golden: Path) -> None:
    np.save(golden / "timesteps.npy", np.load(golden / "timesteps.npy")[:1])
    for name in ("noise_step1", "latent_after_step1", "vae_decoded"):
        (golden / f"{name}.npy").unlink()
    output = pipe("a lake", golden=golden)
    assert output.golden is not None
    assert [d.name for d in output.golden.differences] == ["cond", "noise_step0", "latent_after_step0"]
    assert all(d.relative_l2 < 1e-5 for d in output.golden.differences)


def test_a_shorter_conditioning_stands_in(pipe: TextToImagePipeline, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    write_golden(pipe.engine.bundle_path, folder, tokens=7, height=32, width=48, steps=2)
    output = pipe("x", golden=folder, golden_replace=["text_encoder"])
    assert output.golden is not None
    assert [d.name for d in output.golden.differences] == [*STEPS, "vae_decoded"]
    assert all(d.relative_l2 < 1e-4 for d in output.golden.differences)
    used = output.texts[0]["golden"].splitlines()
    assert used[0] == "short, text_encoder"
    assert {line.split()[0] for line in used[1:]} == {"cond", "tf_in_hidden_states"}
    stored = np.load(folder / "cond.npy").astype("<f4").tobytes()
    assert f"cond sha256 {hashlib.sha256(stored).hexdigest()}" in used
    with pytest.raises(InputError, match=r"te_cond_384|cond.npy: has the shape \[1, 7, 384\], expected \[1, 96, 384\]"):
        pipe("x", golden=folder)
