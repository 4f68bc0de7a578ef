"""The schedule: measured tables, steps, image to image, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from intaglio.errors import EngineError, InputError
from intaglio.runtimes import flow_matching
from intaglio.runtimes.flow_matching import empirical_mu, given_sigmas, scale_noise, sigmas, start_step, timesteps

# What MLX computes for FLUX.2-klein, to all printed digits.
TABLE = [
    (1024, 4, 2.0306897079499455, [1, 0.9580853581, 0.8839818239, 0.7174965739]),
    (256, 4, 1.965567161408539, [1, 0.9553907514, 0.8771342039, 0.7041116357]),
    (4096, 4, 2.291179894115571, [1, 0.9673840404, 0.9081439376, 0.7671999335]),
    (16384, 4, 3.22998634, [1, 0.9869855642, 0.9619472623, 0.8939154148]),
    (1024, 1, 2.052128849296118, [1]),
]


@pytest.mark.parametrize(("image_tokens", "steps", "mu", "expected"), TABLE)
def test_table(image_tokens: int, steps: int, mu: float, expected: list[float]) -> None:
    assert empirical_mu(image_tokens, steps) == mu
    found = sigmas(steps, image_tokens)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([*expected, 0], np.float32))


def test_timesteps() -> None:
    found = timesteps(sigmas(4, 1024))
    assert found.dtype == np.float32
    expected = [1000, 958.0853881836, 883.9818115234, 717.4965820313]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_no_steps() -> None:
    for found in (sigmas(0, 1024), sigmas(0, 1024, shift=3), given_sigmas([])):
        assert found.dtype == np.float32 and found.tolist() == [0]
    assert timesteps(sigmas(0, 1024)).shape == (0,)
    assert start_step(0, 0.5) == 0


def test_fixed_shift() -> None:
    np.testing.assert_array_equal(sigmas(4, 1024, shift=3), np.array([1, 0.9, 0.75, 0.5, 0], np.float32))
    np.testing.assert_array_equal(sigmas(4, 1024, shift=1), np.array([1, 0.75, 0.5, 0.25, 0], np.float32))


@pytest.mark.parametrize("image_tokens", [1, 256, 1024, 4300, 4301, 1 << 16])
@pytest.mark.parametrize("steps", [1, 2, 3, 28, 999, 1000])
def test_sigmas_fall(image_tokens: int, steps: int) -> None:
    for shift in (None, 1e-3, 1e3):
        levels = sigmas(steps, image_tokens, shift=shift)
        assert levels.shape == (steps + 1,) and levels[0] == 1 and levels[-1] == 0
        assert np.isfinite(levels).all() and (np.diff(levels) <= 0).all() and levels[-2] > 0


def test_given_sigmas() -> None:
    expected = np.array([1, 0.75, 0.25, 0], np.float32)
    values: Any
    for values in ([1, 0.75, 0.25], (1, 0.75, 0.25, 0), np.array([1, 0.75, 0.25], np.float16), expected):
        found = given_sigmas(values)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    assert given_sigmas([0]).tolist() == [0]
    assert given_sigmas([0.5]).tolist() == [0.5, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 0.5, 0.5], "sigma 2 is 0.5 after 0.5; expected each to be below the last"),
        ([0.5, 0.75], "sigma 1 is 0.75 after 0.5"),
        ([1, 0.5, 0, 0], "sigma 3 is 0.0 after 0.0"),
        # Different, but not in float32.
        ([1, 1 - 1e-9], "sigma 1 is 1.0 after 1.0"),
        ([1, math.nan], "sigma 1 is nan; expected a number from 0 to 1"),
        ([math.inf], "sigma 0 is inf"),
        ([1.01, 0.5], "sigma 0 is 1.01"),
        ([1, 0.5, -0.1], "sigma 2 is -0.1"),
        ([[1, 0.5]], "sigmas have the shape .1, 2."),
        (0.5, "sigmas have the shape"),
        (["a"], "expected a list of numbers"),
        ([[1], [1, 2]], "expected a list of numbers"),
        (np.linspace(1, 0, 1002), "there are 1002 sigmas; expected at most 1000"),
    ],
)
def test_bad_given_sigmas(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        given_sigmas(values)


@pytest.mark.parametrize("steps", [-1, 1001, 4.0, True, None, "4"])
def test_bad_steps(steps: Any) -> None:
    for call in (
        lambda: sigmas(steps, 1024),
        lambda: sigmas(steps, 1024, shift=3),
        lambda: empirical_mu(1024, steps),
        lambda: start_step(steps, 0.5),
    ):
        with pytest.raises(InputError, match=r"num_inference_steps is .*; expected an integer from 0 to 1000"):
            call()


@pytest.mark.parametrize("image_tokens", [0, -1, 1024.0, (1 << 16) + 1])
def test_bad_image_tokens(image_tokens: Any) -> None:
    for shift in (None, 3):
        with pytest.raises(InputError, match=r"image_tokens is .*; expected an integer from 1 to 65536"):
            sigmas(4, image_tokens, shift=shift)


@pytest.mark.parametrize("shift", [0, -1, math.nan, math.inf, "3", True, 1e4])
def test_bad_shift(shift: Any) -> None:
    for steps in (0, 4):
        with pytest.raises(InputError, match=r"shift is .*; expected a number from 0\.001 to 1000"):
            sigmas(steps, 1024, shift=shift)


def test_step() -> None:
    generator = np.random.default_rng(0)
    image, noise = generator.standard_normal((2, 1, 6, 128)).astype(np.float32)
    # A denoiser that knows the picture arrives at it, whatever the levels.
    levels = sigmas(4, 6)
    latents = noise
    for index in range(4):
        latents = flow_matching.step(latents, noise - image, levels, index)
        assert latents.dtype == np.float32
        np.testing.assert_allclose(latents, scale_noise(image, noise, levels[index + 1]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(latents, image, rtol=0, atol=1e-6)


def test_bad_velocity() -> None:
    latents, levels = np.zeros((1, 6, 128), np.float32), sigmas(4, 6)
    with pytest.raises(EngineError, match=r"velocity is float32 \[1, 5, 128\] beside float32 \[1, 6, 128\]"):
        flow_matching.step(latents, latents[:, :5], levels, 0)
    with pytest.raises(EngineError, match="velocity is float16"):
        flow_matching.step(latents, latents.astype(np.float16), levels, 0)
    for value in (np.nan, np.inf):
        velocity = latents.copy()
        velocity[0, 3, 5:7] = value
        with pytest.raises(EngineError, match="output at step 2 has 2 of 768 values that are not finite"):
            flow_matching.step(latents, velocity, levels, 2)


def test_start_step() -> None:
    assert [start_step(4, strength) for strength in (1, 0.99, 0.8, 0.75, 0.5, 0.25)] == [0, 1, 1, 1, 2, 3]
    assert start_step(50, 0.3) == 35
    assert start_step(1, 1.0) == 0


def test_strength_that_leaves_no_step() -> None:
    with pytest.raises(InputError, match=r"strength is 0\.2, less than one step of 4; expected at least 0\.25"):
        start_step(4, 0.2)
    for steps in range(1, 1001):
        # What the message names is enough.
        with pytest.raises(InputError) as caught:
            start_step(steps, 0.999 / steps)
        named = float(str(caught.value).split("at least ")[1].split(",")[0])
        assert start_step(steps, named) < steps


@pytest.mark.parametrize("strength", [0, -0.5, 1.01, math.nan, math.inf, "1", None, True])
def test_bad_strength(strength: Any) -> None:
    for steps in (0, 4):
        with pytest.raises(InputError, match=r"strength is .*; expected a number above 0 and at most 1"):
            start_step(steps, strength)


def test_scale_noise() -> None:
    image, noise = np.random.default_rng(0).standard_normal((2, 1, 6, 128)).astype(np.float32)
    np.testing.assert_array_equal(scale_noise(image, noise, 1), noise)
    np.testing.assert_array_equal(scale_noise(image, noise, 0), image)
    assert scale_noise(image, noise, np.float64(0.3)).dtype == np.float32
    with pytest.raises(EngineError, match=r"noise is float32 \[1, 6, 127\] beside float32 \[1, 6, 128\]"):
        scale_noise(image, noise[..., :127], 0.5)
    with pytest.raises(EngineError, match=r"noise is float32 .* beside float64"):
        scale_noise(image.astype(np.float64), noise, 0.5)
