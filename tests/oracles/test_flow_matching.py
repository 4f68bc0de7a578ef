"""The schedule against diffusers' FlowMatchEulerDiscreteScheduler as its FLUX.2-klein pipeline sets it.

Bounds: the shapes and steps of FLUX.2-klein within one unit in the last place; up to 1000 steps and 65536 tokens within
five roundings, of the shift (exp(mu) is rounded as MLX does it), the even level, its inverse, a sum and a quotient, of
2 ** -24 each: one level in a hundred thousand is off by more than two. Steps and blending are equal.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusionImg2ImgPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from intaglio.runtimes import flow_matching
from intaglio.runtimes.flow_matching import empirical_mu, scale_noise, sigmas, start_step, timesteps

ROUNDINGS = 5 * 2.0**-24


def scheduler(steps: int, image_tokens: int, shift: float | None = None) -> Any:
    """Set as the pipeline sets it."""
    even = np.linspace(1.0, 1 / steps, steps)
    if shift is not None:
        fixed = FlowMatchEulerDiscreteScheduler(shift=shift)
        fixed.set_timesteps(sigmas=even)
        return fixed
    # A static shift in the config is ignored then.
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential", shift=3.0)
    dynamic.set_timesteps(sigmas=even, mu=compute_empirical_mu(image_tokens, steps))
    return dynamic


def assert_within_an_ulp(found: np.ndarray, expected: np.ndarray) -> None:
    # Positive float32 numbers are ordered as their bits are.
    distance = found.view(np.int32).astype(np.int64) - expected.view(np.int32)
    assert np.abs(distance).max() <= 1


def test_mu() -> None:
    for image_tokens in range(1, 9000, 13):
        for steps in (1, 4, 10, 50, 200, 1000):
            assert empirical_mu(image_tokens, steps) == compute_empirical_mu(image_tokens, steps)


@pytest.mark.parametrize(("image_tokens", "steps"), [(256, 4), (1024, 4), (4096, 4), (16384, 4), (1024, 1), (1024, 2)])
def test_sigmas_of_klein(image_tokens: int, steps: int) -> None:
    expected = scheduler(steps, image_tokens)
    assert_within_an_ulp(sigmas(steps, image_tokens), expected.sigmas.numpy())
    assert_within_an_ulp(timesteps(sigmas(steps, image_tokens)), expected.timesteps.numpy())


def test_sigmas() -> None:
    rng = np.random.default_rng()
    for image_tokens in [256, 1024, 4096, 4300, 4301, *rng.integers(1, 4300, 20), *rng.integers(4301, 65536, 20)]:
        for steps in (*range(1, 51), 999, 1000):
            expected = scheduler(steps, int(image_tokens)).sigmas.numpy()
            np.testing.assert_allclose(sigmas(steps, int(image_tokens)), expected, rtol=0, atol=ROUNDINGS)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.3])
def test_fixed_shift(shift: float) -> None:
    for steps in (1, 4, 28, 50):
        expected = scheduler(steps, 1024, shift).sigmas.numpy()
        np.testing.assert_allclose(sigmas(steps, 1024, shift=shift), expected, rtol=0, atol=2**-23)


def test_steps_and_blending() -> None:
    """From a picture through all steps, on the same levels: equal."""
    rng = np.random.default_rng()
    steps, start = 6, 2
    theirs = scheduler(steps, 40)
    theirs.set_begin_index(start)
    levels = theirs.sigmas.numpy()
    image, noise, *velocities = rng.standard_normal((2 + steps, 2, 40, 128)).astype(np.float32)
    times = theirs.timesteps[start:]
    expected = theirs.scale_noise(torch.from_numpy(image), times[:1].repeat(2), torch.from_numpy(noise))
    latents = scale_noise(image, noise, levels[start])
    np.testing.assert_array_equal(latents, expected.numpy())
    for index, time in enumerate(times, start):
        expected = theirs.step(torch.from_numpy(velocities[index]), time, expected, return_dict=False)[0]
        latents = flow_matching.step(latents, velocities[index], levels, index)
        np.testing.assert_array_equal(latents, expected.numpy())


def test_start_step() -> None:
    for steps in (1, 2, 3, 4, 7, 20, 28, 50, 100):
        pipeline = SimpleNamespace(scheduler=SimpleNamespace(timesteps=np.arange(steps), order=1))
        for strength in np.linspace(0.01, 1, 100).tolist():
            if int(steps * strength) == 0:
                continue
            get_timesteps: Any = StableDiffusionImg2ImgPipeline.get_timesteps
            left, count = get_timesteps(pipeline, steps, strength, "cpu")
            assert count == len(left) == steps - start_step(steps, strength)
