"""Text to image with FLUX.2: prompt to conditioning, noise to latents, latents to picture.

Shape suffixes: B batch, S image tokens, C latent channels, T text tokens, J width of the conditioning, H rows and W
columns of the latent grid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from intaglio.engines.engine import Engine
from intaglio.engines.memory import return_freed_memory, used_bytes
from intaglio.engines.target import session_options
from intaglio.errors import BundleError, InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes import flow_matching
from intaglio.runtimes.checks import tensor
from intaglio.runtimes.denoising import Conditioning, Denoiser, Step, denoise
from intaglio.runtimes.golden import GoldenReport
from intaglio.runtimes.images import check_size, load_image, to_image, to_pixels
from intaglio.runtimes.latents import initial_latents, pack, unpack
from intaglio.runtimes.lora import Adapters
from intaglio.runtimes.memory_plan import MemoryPlan, plan_memory
from intaglio.runtimes.picture_request import (
    Picture,
    PictureModel,
    PictureOptions,
    PictureRequest,
    Work,
    check_stages,
    check_texts,
    make_request,
    prompt_ids,
)
from intaglio.runtimes.picture_text import picture_text
from intaglio.runtimes.preview import preview_image
from intaglio.runtimes.stage_run import TileSession, run_stage
from intaglio.runtimes.tiled_decode import decode_tiled
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
    leaves after its last use in a call. ``threads`` (of the target cpu) 0 takes one a core, ``compute_units`` (of
    coreml) is ``all``, ``cpu``, ``cpu+gpu`` or ``cpu+ne``. ``memory_budget`` is what the process may come to, in bytes
    (of a target on a GPU, what it may hold there):
    a call, or one of a part, then lets stages leave in turn and decodes in bands where that is needed, or raises
    InputError with the budget that would do. ``lora`` are adapters by file, with their strengths. Raises BundleError
    for a bundle of another kind, InputError, and the errors of :class:`~intaglio.runtimes.lora.Adapters`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        threads: int = 0,
        compute_units: str | None = None,
        memory_budget: int | None = None,
        keep_loaded: bool = True,
        lora: Mapping[str, float] | None = None,
    ) -> None:
        if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int)):
            raise InputError(f"memory_budget is {memory_budget!r}; expected a number of bytes")
        self.engine = engine
        self.model = PictureModel.of(engine.bundle, engine.bundle_path, engine.dims)
        self.memory_budget, self.keep_loaded = memory_budget, keep_loaded
        self._how = session_options(
            engine.info.target, threads=threads, compute_units=compute_units, memory_budget=memory_budget
        )
        self._adapters = Adapters(engine, lora or {})
        self._sessions: dict[str, Any] = {}
        # What the process grew by when a stage was loaded and run.
        self._held: dict[str, int] = {}
        self._timings: dict[str, float] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError if it has none."""
        return Tokenizer.of_bundle(self.engine.bundle_path, self.engine.bundle)

    def unload(self, stage: str | None = None) -> None:
        """Lets a stage leave memory, or all of them; the next use loads it again."""
        for name in [stage] if stage is not None else [*self._sessions, *self._held]:
            session = self._sessions.pop(name, None)
            # Of a GPU's memory nothing stays with a session that somebody, as a traceback does, still holds.
            if hasattr(session, "close"):
                session.close()
            self._held.pop(name, None)
        return_freed_memory()

    def set_strengths(self, strengths: Mapping[str, float]) -> None:
        """Other strengths of the adapters, by file; 0 for those not named. Raises InputError, EngineError."""
        self._adapters.set_strengths(strengths, self._sessions)

    def __call__(self, prompt: str | Sequence[str], **options: Unpack[PictureOptions]) -> PictureOutput:
        """Paints ``prompt``, or each of several; an empty one is a picture of the model's own choosing.

        Raises InputError for an option out of range, or one that would have no effect; EngineError, also for values
        that are not finite; CancelledError. Nothing is run before all arguments have been checked.
        """
        started = time.monotonic()
        self._timings = {}
        request = make_request(self.model, prompt, options)
        with self._planned(request.work) as plan:
            return self._paint(request, plan, started)

    def encode_prompt(self, prompt: str | Sequence[str], *, truncate: bool = False) -> np.ndarray:
        """The conditioning of prompts, float32 ``[B, T, J]``.

        Each goes through the model's chat template as a user's message and is padded on the right to the text length.
        Raises InputError for one that is longer, unless ``truncate`` cuts it (the end of the template with it), and for
        what is no text, or no prompt at all.
        """
        prompts = check_texts("prompt", prompt)
        self.model.check_batch(len(prompts))
        ids = self._token_ids(prompts, truncate)
        with self._planned(Work(("text_encoder",), len(prompts))) as plan:
            return self._encode(ids, rows=plan.rows)

    def encode_image(self, image: Picture) -> np.ndarray:
        """The latents of a picture, float32 ``[1, C, H, W]``. Takes what `images.load_image` does, and raises that."""
        image_13HW = load_image(image, self.model.factor)
        height, width = image_13HW.shape[2:]
        self.model.check_picture("", height, width)
        with self._planned(Work(("vae_encoder",), encoded=(height * width,))):
            return self._encode_image(image_13HW)

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

        embeds, negative_embeds: from ``encode_prompt``, ``[B, T, J]``; guidance above 1 needs the latter. references,
        and with ``strength`` the ``start``: from ``encode_image``, ``[1, C, H, W]``. The options are those of a call
        that concern the steps. Raises InputError, also for a shape or a value that does not fit, EngineError,
        CancelledError.
        """
        concern = {"height", "width", "num_inference_steps", "guidance_scale", "seed", "rng", "latents", "strength"}
        if unknown := sorted(options.keys() - concern - {"sigmas", "shift", "progress", "preview"}):
            raise TypeError(f"{unknown[0]} is no option of the steps")
        strength = options.pop("strength", None)
        if (strength is None) != (start is None):
            raise InputError("start and strength go together, and one of them is missing")
        check_stages(self.engine.bundle, self.engine.bundle_path, ["transformer"])
        model = self.model
        embeds = tensor("embeds", embeds, ("batch", "tokens", model.embeds_width))
        request = make_request(model, [""] * len(embeds), options)
        model.check_dim("text_tokens", embeds.shape[1], "the number of text tokens")
        if (request.negative_prompts is None) != (negative_embeds is None):
            raise InputError(
                f"guidance_scale is {request.guidance:g} and negative_embeds are "
                f"{'missing' if negative_embeds is None else 'given'}; expected them with guidance above 1 only"
            )
        if negative_embeds is not None:
            negative_embeds = tensor("negative_embeds", negative_embeds, embeds.shape)
        encoded = tuple(
            tensor(f"references[{i}]", reference, (1, model.channels, "height", "width"))
            for i, reference in enumerate(references)
        )
        tokens = request.image_tokens + sum(reference.shape[2] * reference.shape[3] for reference in encoded)
        model.check_dim("image_tokens", tokens, "the number of image tokens")
        if start is not None and strength is not None:
            start = tensor("start", start, (1, model.channels, *request.grid))
            first = flow_matching.start_step(len(request.schedule.timesteps), strength)
            request = replace(request, schedule=replace(request.schedule, first_step=first))
        conditioning = Conditioning(embeds, negative_embeds, request.guidance, model.guidance_embeds, encoded)
        preview = request.preview is not None
        work = Work(("transformer",), len(embeds), tokens=embeds.shape[1] + tokens, preview=preview)
        with self._planned(work) as plan:
            return self._sample(request, conditioning, start, rows=plan.rows)

    def decode(
        self,
        latents: np.ndarray,
        *,
        height: int,
        width: int,
        tiled: bool | None = None,
        progress: ProgressCallback | None = None,
    ) -> list[Image]:
        """Pictures of ``height`` by ``width`` pixels from latents ``[B, S, C]`` or ``[B, C, H, W]``.

        ``tiled`` is that of a call. Raises InputError, EngineError, CancelledError.
        """
        check_size(height, width, self.model.factor)
        self.model.check_picture("", height, width)
        grid = self.model.grid(height, width)
        packed_BSC = initial_latents(latents, None, self.model.channels, *grid, self.model.factor)
        work = Work(("vae_decoder",), len(packed_BSC), height, width, tiled=tiled)
        with self._planned(work) as plan:
            sample = self._decode(unpack(packed_BSC, *grid), plan.band_rows, progress)
            self._leave("vae_decoder", plan)
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
        lora = self._adapters.texts()
        texts = [picture_text(self.engine, request, i, plan.band_rows, lora) for i in range(request.pictures)]
        return PictureOutput(images, latents_BSC, request.seeds, timings, golden.report() if golden else None, texts)

    def _condition(self, request: PictureRequest, plan: MemoryPlan) -> Conditioning:
        """What the transformer is told."""
        golden, negative = request.golden, None
        if golden and "text_encoder" in golden.replaced:
            embeds = golden.conditioning(self.model.embeds_width)
        else:
            # Every prompt once, also those that several pictures share.
            texts = list(dict.fromkeys([*request.prompts, *(request.negative_prompts or ())]))
            ids = self._token_ids(texts, request.truncate)
            # With negative prompts they may be more than the pictures, which the engine takes at once.
            found = self._encode(ids, rows=plan.rows or request.pictures, progress=request.progress)
            embeds = found[[texts.index(text) for text in request.prompts]]
            if request.negative_prompts is not None:
                negative = found[[texts.index(text) for text in request.negative_prompts]]
            if golden:
                golden.compare("text_encoder", golden.cond_name, embeds)
        self._leave("text_encoder", plan)
        references = tuple(self._encode_image(picture) for picture in request.references)
        return Conditioning(embeds, negative, request.guidance, self.model.guidance_embeds, references)

    def _token_ids(self, prompts: Sequence[str], truncate: bool) -> list[list[int]]:
        return prompt_ids(self.tokenizer, prompts, self.model.text_length, truncate=truncate)

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
        with self._timed("text_encoder"), self._holding("text_encoder"):
            feeds = {"input_ids": tokens_BT, "attention_mask": mask_BT}
            embeds_BTJ = run_stage(session, feeds, "prompt_embeds", rows=rows)
        count.advance(len(ids))
        return embeds_BTJ

    def _encode_image(self, image_13HW: np.ndarray) -> np.ndarray:
        session = self._session("vae_encoder")
        with self._timed("vae_encoder"), self._holding("vae_encoder"):
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
                with self._timed("preview"), self._holding("vae_decoder"):
                    picture = preview_image(decoder, step, schedule.sigmas, *request.grid, self.model.factor)
                request.preview(step.index, picture)

        with self._timed("transformer", without=("preview", "load")), self._holding("transformer"):
            return denoise(denoiser, latents_BSC, schedule, count, on_step)

    def _decode(self, latents_BCHW: np.ndarray, band_rows: int | None, progress: ProgressCallback | None) -> np.ndarray:
        """Float32 ``[B, 3, height, width]``, one picture after another: there is nothing to gain from more at once."""
        if band_rows is not None:
            config = self.engine.bundle.components["vae"].config
            if "vae_decoder" in self._sessions:  # of previews, or of calls before: bands are there to save memory
                self.unload("vae_decoder")
            with self._timed("vae_decoder", without=("load",)):
                sample = decode_tiled(self._tile, config, latents_BCHW, band_rows=band_rows, progress=progress)
            return sample.astype(np.float32, copy=False)
        count = Progress(progress, "decode", len(latents_BCHW), "pictures")
        session = self._session("vae_decoder")
        samples = []
        with self._timed("vae_decoder"), self._holding("vae_decoder"):
            for i in range(len(latents_BCHW)):
                where = f"picture {i + 1} of {len(latents_BCHW)}"
                samples.append(run_stage(session, {"latents": latents_BCHW[i : i + 1]}, "sample", where=where))
                count.advance(1)
        return np.concatenate(samples)

    def _tile(self, stage: str) -> TileSession:
        """A stage of the decoder in bands, which nobody keeps."""
        return_freed_memory()
        with self._timed("load"):
            return TileSession(self.engine.load(stage, **self._how))

    # --- stages come and go ----------------------------------------------------------------------------------

    @contextmanager
    def _planned(self, work: Work) -> Iterator[MemoryPlan]:
        """How ``work`` runs; what does not fit beside it leaves first, and what is not to stay leaves at the end."""
        check_stages(self.engine.bundle, self.engine.bundle_path, work.loaded)
        process = self._used() - sum(self._held.values())
        plan = plan_memory(
            self.engine, work, self.memory_budget, keep_loaded=self.keep_loaded, process=process, held=self._held
        )
        if not plan.keep_loaded:
            self.unload()
        elif self.memory_budget is not None:
            for stage in self._sessions.keys() - set(work.loaded):
                self.unload(stage)
        try:
            yield plan
        finally:
            if not plan.keep_loaded:
                self.unload()

    def _used(self) -> int:
        return used_bytes(self.engine.info.target)

    def _session(self, stage: str) -> Any:
        if stage not in self._sessions:
            with self._timed("load"), self._holding(stage):
                self._sessions[stage] = self._adapters.load(stage, **self._how)
        return self._sessions[stage]

    def _leave(self, stage: str, plan: MemoryPlan) -> None:
        if not plan.keep_loaded:
            self.unload(stage)

    @contextmanager
    def _holding(self, stage: str) -> Iterator[None]:
        """Counts what the process grows by in the block as held by ``stage``, but for what others came to hold."""

        def others() -> int:
            return sum(self._held.values()) - self._held.get(stage, 0)

        grown = others() - self._used()
        try:
            yield
        finally:
            grown += self._used() - others()
            self._held[stage] = self._held.get(stage, 0) + max(0, grown)

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
