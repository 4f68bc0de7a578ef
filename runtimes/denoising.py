"""The loop under a picture: latents in, a little less noise out, as often as there are steps.

Shape suffixes: B batch, I image tokens, R tokens of reference pictures, T text tokens, C latent channels, J width of
the conditioning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.errors import EngineError
from intaglio.progress import Progress
from intaglio.runtimes import flow_matching
from intaglio.runtimes.latents import image_ids, pack, reference_ids, text_ids
from intaglio.runtimes.stage_run import run_stage


@dataclass(frozen=True)
class Conditioning:
    """What the transformer is told beside latents and time.

    embeds: of the prompts, float32 ``[B, T, J]``; negative: likewise, or None for no second run. guidance: how far
    from the negative run, or, where ``guidance_embeds``, an input of the transformer. references: encoded pictures,
    float32 ``[1, C, h, w]`` each.
    """

    embeds: np.ndarray
    negative: np.ndarray | None = None
    guidance: float = 1.0
    guidance_embeds: bool = False
    references: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class Schedule:
    """``sigmas`` float32 ``[steps + 1]``, ``timesteps`` over 1000 ``[steps]``, and the first step that is run."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    first_step: int = 0


@dataclass(frozen=True)
class Step:
    """One step that was made: its index, what the transformer gave, and the latents before and after, ``[B, I, C]``."""

    index: int
    noise_pred: np.ndarray
    before: np.ndarray
    after: np.ndarray


class Denoiser:
    """A session of the ``transformer`` stage for pictures of ``height`` by ``width`` latents, at most ``rows`` at once.

    ``ids`` are position ids ``[I, 4]`` and ``[T, 4]`` to use in place of those that the sizes give.
    """

    def __init__(
        self,
        session: Any,
        conditioning: Conditioning,
        height: int,
        width: int,
        *,
        rows: int | None = None,
        ids: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self._session, self._conditioning, self._rows = session, conditioning, rows
        batch, tokens = conditioning.embeds.shape[:2]
        image, text = ids or (image_ids(height, width), text_ids(tokens))
        references = conditioning.references
        image = np.concatenate([image, *(reference_ids(i, *r.shape[2:]) for i, r in enumerate(references))])
        self._ids = {"img_ids": _repeat(image[None], batch), "txt_ids": _repeat(text[None], batch)}
        packed = [pack(reference) for reference in references]
        self._references_BRC = _repeat(np.concatenate(packed, axis=1), batch) if packed else None

    def velocity(self, latents_BIC: np.ndarray, timestep: np.floating, step: int) -> np.ndarray:
        """What the transformer makes of latents at ``timestep``, from 0 to 1: float32 ``[B, I, C]``.

        Raises EngineError.
        """
        given = self._conditioning
        tokens = latents_BIC.shape[1]
        if self._references_BRC is not None:
            latents_BIC = np.concatenate([latents_BIC, self._references_BRC], axis=1)
        times_B = np.full(len(latents_BIC), timestep, np.float32)
        feeds = {"hidden_states": latents_BIC, "timestep": times_B, **self._ids}
        if given.guidance_embeds:
            feeds["guidance"] = np.full(len(latents_BIC), given.guidance, np.float32)

        def run(embeds_BTJ: np.ndarray, where: str) -> np.ndarray:
            feeds["encoder_hidden_states"] = embeds_BTJ
            return run_stage(self._session, feeds, "noise_pred", where=where, rows=self._rows)[:, :tokens]

        noise_pred = run(given.embeds, f"step {step}")
        if given.negative is None:
            return np.ascontiguousarray(noise_pred)
        negative = run(given.negative, f"step {step}, with the negative prompt")
        return negative + np.float32(given.guidance) * (noise_pred - negative)


def denoise(
    denoiser: Denoiser,
    latents_BIC: np.ndarray,
    schedule: Schedule,
    progress: Progress,
    on_step: Callable[[Step], object] | None = None,
) -> np.ndarray:
    """Latents after the last step, float32 ``[B, I, C]``. Raises EngineError naming step and tensor, CancelledError."""
    for index in range(schedule.first_step, len(schedule.timesteps)):
        noise_pred = denoiser.velocity(latents_BIC, schedule.timesteps[index], index)
        before = latents_BIC
        with np.errstate(over="ignore"):  # which the next lines say
            latents_BIC = flow_matching.step(before, noise_pred, schedule.sigmas, index)
        if not np.isfinite(latents_BIC).all():
            raise EngineError(
                f"the latents after step {index} are not finite, though the transformer's output is: their largest "
                f"values were {np.abs(before).max():g} and {np.abs(noise_pred).max():g}. Compare the engine with "
                "`intaglio parity`"
            )
        if on_step is not None:
            on_step(Step(index, noise_pred, before, latents_BIC))
        progress.advance(1)
    return latents_BIC


def _repeat(array_1XY: np.ndarray, batch: int) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(array_1XY, (batch, *array_1XY.shape[1:])))
