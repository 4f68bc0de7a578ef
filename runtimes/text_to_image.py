"""Text to image with FLUX.2: prompt to conditioning, noise to latents, latents to picture.

Shape suffixes: B batch, S image tokens, C latent channels, T text tokens, J width of the conditioning, H rows and W
columns of the latent grid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from intaglio.engines.engine import Engine
from intaglio.engines.memory import return_freed_memory
from intaglio.errors import BundleError, InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes import flow_matching
from intaglio.runtimes.denoising import Conditioning, Denoiser, Step, denoise
from intaglio.runtimes.golden import GoldenReport
from intaglio.runtimes.images import check_size, load_image, to_image, to_pixels
from intaglio.runtimes.latents import initial_latents, pack, unpack
from intaglio.runtimes.memory_plan import MemoryPlan, plan_memory
from intaglio.runtimes.picture_request import (
    FACTOR,
    Picture,
    PictureModel,
    PictureOptions,
    PictureRequest,
    check_stages,
    make_request,
)
from intaglio.runtimes.picture_text import picture_text
from intaglio.runtimes.preview import preview_image
from intaglio.runtimes.stage_run import TileSession, run_stage
from intaglio.runtimes.tiled_decode import DEFAULT_BAND_ROWS, decode_tiled
from intaglio.runtimes.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PictureOutput:
    """Pictures and how they came about, all in one order.

    latents: those that were decoded, float32 ``[batch, tokens, channels]``. seeds: what noise was drawn from; None
    where nothing was drawn. timings: seconds of each stage, of ``load``, which is not part of them, and ``total``.
    golden: the comparison that was asked for. texts: what a PNG of each picture says of it, by keyword.
    """

    images: list[Image]
    latents: np.ndarray
    seeds: tuple[int, ...] | None
    timings: dict[str, float]
    golden: GoldenReport | None
    texts: list[dict[str, str]]


class TextToImagePipeline:
    """Paints with the engine of a picture bundle.

    Stages are loaded when they are first needed, and stay until ``unload`` unless ``keep_loaded`` is False: each then
    leaves after its last use in a call. ``threads`` 0 takes one a core. ``memory_budget`` is what the process may come
    to, in bytes: a call then lets stages leave in turn and decodes in bands where that is needed, or raises InputError
    with the budget that would do. Raises BundleError for a bundle of another kind.
    """

    def __init__(
        self, engine: Engine, *, threads: int = 0, memory_budget: int | None = None, keep_loaded: bool = True
    ) -> None:
        self.engine = engine
        self.model = PictureModel.of(engine)
        self.memory_budget, self.keep_loaded = memory_budget, keep_loaded
        self._threads = threads
        self._sessions: dict[str, Any] = {}
        self._timings: dict[str, float] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none."""
        return Tokenizer.of_bundle(self.engine.bundle_path, self.engine.bundle)

    def unload(self, stage: str | None = None) -> None:
        """Lets a stage leave memory, or all of them; the next use loads it again."""
        for name in [stage] if stage is not None else list(self._sessions):
            self._sessions.pop(name, None)
        return_freed_memory()

    def __call__(self, prompt: str | Sequence[str], **options: Unpack[PictureOptions]) -> PictureOutput:
        """Paints ``prompt``, or each of several; an empty one is a picture of the model's own choosing.

        Raises InputError for an option out of range, or one that would have no effect; EngineError, also for values
        that are not finite; CancelledError. Nothing is run before all arguments have been checked.
        """
        started = time.monotonic()
        self._timings = {}
        request = make_request(self.model, prompt, options)
        check_stages(self.engine.bundle, self.engine.bundle_path, request.stages)
        plan = plan_memory(self.engine, request, self.memory_budget, keep_loaded=self.keep_loaded)
        try:
            return self._paint(request, plan, started)
        finally:
            if not plan.keep_loaded:
                self.unload()

    def encode_prompt(self, prompt: str | Sequence[str], *, truncate: bool = False) -> np.ndarray:
        """The conditioning of prompts, float32 ``[B, T, J]``.

        Each goes through the model's chat template as a user's message and is padded on the right to the text length.
        Raises InputError for one that is longer, unless ``truncate`` cuts it (the end of the template with it).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        return self._encode(self._token_ids(prompts, truncate), rows=None)

    def encode_image(self, image: Picture) -> np.ndarray:
        """The latents of a picture, float32 ``[1, C, H, W]``. Takes what `images.load_image` does, and raises that."""
        return self._encode_image(load_image(image, FACTOR))

    def sample_latents(
        self,
        embeds: np.ndarray,
        *,
        negative_embeds: np.ndarray | None = None,
        references: Sequence[np.ndarray] = (),
        start: np.ndarray | None = None,
        **options: Unpack[PictureOptions],
    ) -> np.ndarray:
        """Latents of pictures, float32 ``[B, S, C]``, one for each row of the conditioning ``embeds``.

        embeds, negative_embeds: from ``encode_prompt``; guidance above 1 needs the latter. references, and with
        ``strength`` the ``start``: from ``encode_image``. The options are those of a call that concern the steps.
        Raises InputError, EngineError, CancelledError.
        """
        concern = {"height", "width", "num_inference_steps", "guidance_scale", "seed", "rng", "latents", "strength"}
        if unknown := sorted(options.keys() - concern - {"sigmas", "shift", "progress", "preview"}):
            raise TypeError(f"{unknown[0]} is no option of the steps")
        strength = options.pop("strength", None)
        if (strength is None) != (start is None):
            raise InputError("start and strength go together, and one of them is missing")
        request = make_request(self.model, [""] * len(embeds), options)
        if (request.negative_prompts is None) != (negative_embeds is None):
            raise InputError(
                f"guidance_scale is {request.guidance:g} and negative_embeds are "
                f"{'missing' if negative_embeds is None else 'given'}; expected them with guidance above 1 only"
            )
        if strength is not None:
            first = flow_matching.start_step(len(request.schedule.timesteps), strength)
            request = replace(request, schedule=replace(request.schedule, first_step=first))
        conditioning = Conditioning(
            embeds, negative_embeds, request.guidance, self.model.guidance_embeds, tuple(references)
        )
        return self._sample(request, conditioning, start, rows=None)

    def decode(
        self,
        latents: np.ndarray,
        *,
        height: int,
        width: int,
        tiled: bool = False,
        progress: ProgressCallback | None = None,
    ) -> list[Image]:
        """Pictures of ``height`` by ``width`` pixels from latents ``[B, S, C]`` or ``[B, C, H, W]``.

        Raises InputError, EngineError.
        """
        check_size(height, width, FACTOR)
        grid = (height // FACTOR, width // FACTOR)
        packed_BSC = initial_latents(latents, len(latents), self.model.channels, *grid)
        band_rows = DEFAULT_BAND_ROWS if tiled else None
        sample = self._decode(unpack(packed_BSC, *grid), band_rows, progress)
        return [to_image(pixels) for pixels in to_pixels(sample)]

    # --- the stages ------------------------------------------------------------------------------------------

    def _paint(self, request: PictureRequest, plan: MemoryPlan, started: float) -> PictureOutput:
        golden = request.golden
        conditioning = self._condition(request, plan)
        start = self._encode_image(request.start) if request.start is not None else None
        self._leave("vae_encoder", plan)
        if request.noise is None:
            assert golden is not None, "only golden tensors replace the noise"
            shape = (1, math.prod(request.grid), self.model.channels)
            latents_BSC = golden.tensor(golden.last_latents, shape)
        else:
            latents_BSC = self._sample(request, conditioning, start, rows=plan.rows)
        self._leave("transformer", plan)
        sample_B3HW = self._decode(unpack(latents_BSC, *request.grid), plan.band_rows, request.progress)
        self._leave("vae_decoder", plan)
        if golden:
            golden.compare("vae_decoder", "vae_decoded", sample_B3HW)
        images = [to_image(pixels) for pixels in to_pixels(sample_B3HW)]
        timings = {**self._timings, "total": time.monotonic() - started}
        texts = [picture_text(self.engine, request, i) for i in range(request.pictures)]
        return PictureOutput(images, latents_BSC, request.seeds, timings, golden.report() if golden else None, texts)

    def _condition(self, request: PictureRequest, plan: MemoryPlan) -> Conditioning:
        """What the transformer is told."""
        golden, negative = request.golden, None
        if golden and "text_encoder" in golden.replaced:
            embeds = golden.tensor("cond", (1, self.model.text_length, self.model.embeds_width))
        else:
            # Every prompt once, also those that several pictures share.
            texts = list(dict.fromkeys([*request.prompts, *(request.negative_prompts or ())]))
            found = self._encode(self._token_ids(texts, request.truncate), rows=plan.rows, progress=request.progress)
            embeds = found[[texts.index(text) for text in request.prompts]]
            if request.negative_prompts is not None:
                negative = found[[texts.index(text) for text in request.negative_prompts]]
            if golden:
                golden.compare("text_encoder", "cond", embeds)
        self._leave("text_encoder", plan)
        references = tuple(self._encode_image(picture) for picture in request.references)
        return Conditioning(embeds, negative, request.guidance, self.model.guidance_embeds, references)

    def _token_ids(self, prompts: Sequence[str], truncate: bool) -> list[list[int]]:
        length = self.model.text_length
        rows = []
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(messages, enable_thinking=False)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > length and not truncate:
                raise InputError(
                    f"the prompt has {len(ids)} tokens with its template, and at most {length} fit; shorten it, or "
                    "have it cut with truncate"
                )
            rows.append(ids[:length])
        return rows

    def _encode(self, ids: list[list[int]], rows: int | None, progress: ProgressCallback | None = None) -> np.ndarray:
        pad = self.tokenizer.pad_token_id
        if pad is None:
            raise BundleError(f"{self.engine.bundle_path}: its tokenizer has no token to pad with; export it again")
        shape = (len(ids), self.model.text_length)
        tokens_BT, mask_BT = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
        for row, tokens in enumerate(ids):
            tokens_BT[row, : len(tokens)] = tokens
            mask_BT[row, : len(tokens)] = 1
        count = Progress(progress, "encode", len(ids), "prompts")
        session = self._session("text_encoder")
        with self._timed("text_encoder"):
            feeds = {"input_ids": tokens_BT, "attention_mask": mask_BT}
            embeds_BTJ = run_stage(session, feeds, "prompt_embeds", rows=rows)
        count.advance(len(ids))
        return embeds_BTJ

    def _encode_image(self, image_13HW: np.ndarray) -> np.ndarray:
        session = self._session("vae_encoder")
        with self._timed("vae_encoder"):
            return run_stage(session, {"image": image_13HW}, "latents")

    def _sample(
        self, request: PictureRequest, conditioning: Conditioning, start_1CHW: np.ndarray | None, rows: int | None
    ) -> np.ndarray:
        schedule, golden = request.schedule, request.golden
        latents_BSC = request.noise
        assert latents_BSC is not None, "there is noise wherever there are steps"
        if start_1CHW is not None:
            start_BSC = np.broadcast_to(pack(start_1CHW), latents_BSC.shape)
            latents_BSC = flow_matching.scale_noise(start_BSC, latents_BSC, schedule.sigmas[schedule.first_step])
        count = Progress(request.progress, "paint", len(schedule.timesteps) - schedule.first_step, "steps")
        ids = golden.ids() if golden else None
        denoiser = Denoiser(self._session("transformer"), conditioning, *request.grid, rows=rows, ids=ids)

        def on_step(step: Step) -> None:
            if golden:
                golden.compare("transformer", f"noise_step{step.index}", step.noise_pred)
                golden.compare("transformer", f"latent_after_step{step.index}", step.after)
            if request.preview is not None:
                decoder = self._session("vae_decoder")
                with self._timed("preview"):
                    picture = preview_image(decoder, step, schedule.sigmas, *request.grid)
                request.preview(step.index, picture)

        with self._timed("transformer", without=("preview", "load")):
            return denoise(denoiser, latents_BSC, schedule, count, on_step)

    def _decode(self, latents_BCHW: np.ndarray, band_rows: int | None, progress: ProgressCallback | None) -> np.ndarray:
        """Float32 ``[B, 3, height, width]``, one picture after another: there is nothing to gain from more at once."""
        if band_rows is not None:
            config = self.engine.bundle.components["vae"].config
            with self._timed("vae_decoder"):
                sample = decode_tiled(self._tile, config, latents_BCHW, band_rows=band_rows, progress=progress)
            return sample.astype(np.float32, copy=False)
        count = Progress(progress, "decode", len(latents_BCHW), "pictures")
        session = self._session("vae_decoder")
        samples = []
        with self._timed("vae_decoder"):
            for i in range(len(latents_BCHW)):
                where = f"picture {i + 1} of {len(latents_BCHW)}"
                samples.append(run_stage(session, {"latents": latents_BCHW[i : i + 1]}, "sample", where=where))
                count.advance(1)
        return np.concatenate(samples)

    def _tile(self, stage: str) -> TileSession:
        """A stage of the decoder in bands, which nobody keeps."""
        return_freed_memory()
        return TileSession(self.engine.load(stage, threads=self._threads))

    # --- stages come and go ----------------------------------------------------------------------------------

    def _session(self, stage: str) -> Any:
        if stage not in self._sessions:
            check_stages(self.engine.bundle, self.engine.bundle_path, [stage])
            with self._timed("load"):
                self._sessions[stage] = self.engine.load(stage, threads=self._threads)
        return self._sessions[stage]

    def _leave(self, stage: str, plan: MemoryPlan) -> None:
        if not plan.keep_loaded:
            self.unload(stage)

    @contextmanager
    def _timed(self, name: str, without: Sequence[str] = ()) -> Iterator[None]:
        """Adds the seconds of the block to ``name``, but for those that it spent under the names ``without``."""

        def others() -> float:
            return sum(self._timings.get(other, 0.0) for other in without)

        started, before = time.monotonic(), others()
        try:
            yield
        finally:
            spent = time.monotonic() - started - (others() - before)
            self._timings[name] = self._timings.get(name, 0.0) + spent
