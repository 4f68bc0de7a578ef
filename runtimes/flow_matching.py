"""Flow matching with Euler steps, as FLUX.2 samples: the noise levels, the step, and where image to image starts.

The latents at noise level sigma are ``sigma * noise + (1 - sigma) * image`` (Lipman et al. 2022, arXiv:2210.02747), and
the denoiser gives the velocity, ``noise - image``. sigma runs from 1 to 0 evenly and is then shifted towards noise, the
more the larger the picture (Esser et al. 2024, arXiv:2403.03206, section 5.3.2).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

from intaglio.errors import EngineError, InputError
from intaglio.runtimes.checks import integer

NUM_TRAIN_TIMESTEPS = 1000

# 4096 by 4096 pixels. The shift grows with the tokens, until float32 holds nothing between the first level and 0.
_MOST_IMAGE_TOKENS = 1 << 16


def empirical_mu(image_tokens: int, num_inference_steps: int) -> float:
    """The logarithm of the shift that FLUX.2 takes, in float64.

    Black Forest Labs fitted one line over ``image_tokens`` (a latent of h by w has h * w) for 10 steps and one for 200;
    between them the shift is linear in the steps. Above 4300 tokens the second line is taken alone. The source of the
    numbers is `compute_empirical_mu` in their `flux2/sampling.py`.
    """
    image_tokens = integer("image_tokens", image_tokens, 1, _MOST_IMAGE_TOKENS)
    steps = integer("num_inference_steps", num_inference_steps, 0, NUM_TRAIN_TIMESTEPS)
    at_200 = 0.00016927 * image_tokens + 0.45666666
    if image_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * image_tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * steps + (at_200 - 200.0 * slope)


def sigmas(num_inference_steps: int, image_tokens: int, *, shift: float | None = None) -> np.ndarray:
    """The noise levels before each step and after the last: float32 ``[num_inference_steps + 1]``, from 1 to 0.

    0 steps give ``[0]``. shift: a fixed one in place of `exp(empirical_mu(...))`; 1 leaves the levels evenly spaced.
    The arithmetic is that of MLX, in float32 from mu on. Raises InputError.
    """
    steps = integer("num_inference_steps", num_inference_steps, 0, NUM_TRAIN_TIMESTEPS)
    mu = empirical_mu(image_tokens, steps)
    if shift is not None and (not _is_real(shift) or not 1e-3 <= float(shift) <= 1e3):
        raise InputError(f"shift is {shift!r}; expected a number from 0.001 to 1000, or None for the model's own")
    if steps == 0:
        return np.zeros(1, np.float32)
    # exp in float64, since NumPy's in float32 depends on the processor; it is then rounded.
    factor = np.float32(math.exp(np.float32(mu)) if shift is None else shift)
    even = np.linspace(1, 1 / steps, steps).astype(np.float32)
    shifted = factor / (factor + (np.float32(1) / even - np.float32(1)))
    return np.append(shifted, np.float32(0))


def given_sigmas(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Noise levels that were chosen by hand, used as they are: float32 ``[len(values) + 1]``, a final 0 appended.

    They must fall strictly, and lie in [0, 1]; a final 0 may be there already. diffusers would shift them once more.
    Raises InputError.
    """
    try:
        levels = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"sigmas are {values!r}; expected a list of numbers") from error
    if levels.ndim != 1:
        raise InputError(f"sigmas have the shape {list(levels.shape)}; expected one list of numbers")
    if len(levels) > NUM_TRAIN_TIMESTEPS + 1:
        raise InputError(f"there are {len(levels)} sigmas; expected at most {NUM_TRAIN_TIMESTEPS}")
    wrong = ~((levels >= 0) & (levels <= 1))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"sigma {at} is {levels[at]}; expected a number from 0 to 1")
    levels = levels.astype(np.float32)
    if len(levels) == 0 or levels[-1] != 0:
        levels = np.append(levels, np.float32(0))
    rises = np.diff(levels) >= 0
    if rises.any():
        at = int(np.argmax(rises))
        raise InputError(f"sigma {at + 1} is {levels[at + 1]} after {levels[at]}; expected each to be below the last")
    return levels


def timesteps(sigmas: np.ndarray) -> np.ndarray:
    """What the denoiser takes for each step: float32 ``[steps]``, 1000 times the sigma before it."""
    return sigmas[:-1] * np.float32(NUM_TRAIN_TIMESTEPS)


def step(latents: np.ndarray, velocity: np.ndarray, sigmas: np.ndarray, index: int) -> np.ndarray:
    """Latents at ``sigmas[index + 1]`` from those at ``sigmas[index]``: ``latents + (next - sigma) * velocity``.

    All are float32, latents and velocity of one shape. Raises EngineError if the velocity has another shape or dtype
    or is not finite.
    """
    _check_same("velocity", velocity, latents)
    finite = np.isfinite(velocity)
    if not finite.all():
        raise EngineError(
            f"the denoiser's output at step {index} has {velocity.size - np.count_nonzero(finite)} of {velocity.size} "
            "values that are not finite. It overflowed or its weights are damaged: compare it with `intaglio parity`, "
            "or compile in float32"
        )
    return latents + (sigmas[index + 1] - sigmas[index]) * velocity


def start_step(num_inference_steps: int, strength: float) -> int:
    """The step at which image to image starts: ``N - int(N * strength)`` of N, so a strength of 1 runs them all.

    strength: above 0, at most 1. The product is rounded down as in the image-to-image pipeline of Stable Diffusion in
    diffusers; those of its flow-matching models round up, and start from pure noise at 4 steps and 0.8. Raises
    InputError, also where no step would be left.
    """
    steps = integer("num_inference_steps", num_inference_steps, 0, NUM_TRAIN_TIMESTEPS)
    if not _is_real(strength) or not 0 < float(strength) <= 1:
        raise InputError(f"strength is {strength!r}; expected a number above 0 and at most 1")
    run = int(steps * float(strength))
    if steps and not run:
        least = math.ceil(1e4 / steps) / 1e4
        raise InputError(
            f"strength is {strength}, less than one step of {steps}; expected at least {least:g}, or more steps"
        )
    return steps - run


def scale_noise(sample: np.ndarray, noise: np.ndarray, sigma: float | np.floating) -> np.ndarray:
    """``sigma * noise + (1 - sigma) * sample`` in float32: an encoded picture at noise level ``sigma``.

    Both are float32 of one shape. Raises EngineError if they are not.
    """
    _check_same("noise", noise, sample)
    sigma = np.float32(sigma)
    return sigma * noise + (np.float32(1) - sigma) * sample


def _check_same(name: str, array: np.ndarray, beside: np.ndarray) -> None:
    if array.shape != beside.shape or array.dtype != np.float32 or beside.dtype != np.float32:
        raise EngineError(
            f"{name} is {array.dtype} {list(array.shape)} beside {beside.dtype} {list(beside.shape)}; expected float32 "
            "of one shape"
        )


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
