"""Learning to paint: FLUX.2's transformer and its text encoder, by flow matching in the latents of a frozen VAE.

The latents at noise level sigma are ``sigma * noise + (1 - sigma) * image``; what is predicted is ``noise - image``
(Lipman et al. 2022, arXiv:2210.02747), as ``runtimes/flow_matching.py`` samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Model

from intaglio.errors import ConfigError
from intaglio.trainer.data.source import Batch
from intaglio.trainer.models.flux2 import (
    check_fit,
    check_size,
    component,
    conditioning,
    freeze_unused,
    image_ids,
    normalise,
    pack,
    text_ids,
)
from intaglio.trainer.recipe import checked
from intaglio.trainer.saving import copy_tokenizer, save_quantized
from intaglio.trainer.tasks.task import Losses, Task, example_noise

_FEW_TOKENS = 256


class FlowMatchingSettings(BaseModel):
    """``[task]`` of ``kind = "flow-matching"``.

    sigma is ``sigmoid(normal * sigma_std + sigma_mean)``, the logit-normal density of Stable Diffusion 3 (Esser et al.
    2024, arXiv:2403.03206). text_encoder_out_layers: hidden states that the transformer is told. shift: of the noise
    levels when the model paints. max_sequence_length: tokens that prompts are padded to, those of the data's captions.
    dtype: what dense weights are saved as. latent_cache: pictures whose latents are kept in memory, which pays where
    pictures are not augmented and come again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    text_encoder_out_layers: tuple[int, ...] = (9, 18, 27)
    train_text_encoder: bool = True
    sigma_mean: float = 0.0
    sigma_std: float = Field(default=1.0, gt=0.0)
    shift: float = Field(default=1.0, gt=0.0)
    max_sequence_length: int = Field(default=512, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    latent_cache: int = Field(default=0, ge=0)


class FlowMatchingModels(BaseModel):
    """``[model]``: each part is ``path`` of a folder, or the values of its ``config.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transformer: dict[str, Any]
    text_encoder: dict[str, Any]
    vae: dict[str, Any]


class FlowMatchingTask(Task):
    """Batches of ``pixel_values`` float32 ``[B, 3, H, W]`` in -1..1 and of captions, ``input_ids`` and
    ``attention_mask`` ``[B, T]``. The loss is the mean square over a picture's latents, summed over pictures.
    """

    unit = "images"

    def __init__(
        self,
        transformer: Flux2Transformer2DModel,
        text_encoder: Qwen3Model,
        vae: AutoencoderKLFlux2,
        settings: FlowMatchingSettings,
        tokenizer: Path,
    ) -> None:
        super().__init__()
        check_fit(transformer, text_encoder, vae, settings.text_encoder_out_layers)
        self.transformer, self.text_encoder = transformer, text_encoder
        self.vae = vae.requires_grad_(False).eval()
        self.text_encoder.requires_grad_(settings.train_text_encoder)
        self.settings, self._tokenizer = settings, tokenizer
        self.freeze_unused()
        self._latent_cache: dict[bytes, torch.Tensor] = {}

    def train(self, mode: bool = True) -> FlowMatchingTask:
        super().train(mode)
        self.vae.eval()  # its batch norm would go on learning
        return self

    def heavy_modules(self) -> list[nn.Module]:
        return [self.transformer, self.text_encoder]

    def freeze_unused(self) -> None:
        freeze_unused(self.transformer, self.text_encoder, self.settings.text_encoder_out_layers)

    def weight(self, batch: Batch) -> int:
        """The number of pictures. Raises ConfigError for sizes and captions that the models are not trained for."""
        check_size(self.vae, batch["pixel_values"])
        if "input_ids" not in batch:
            raise ConfigError("the data has no captions; set caption and caption_length of its examples")
        found, expected = batch["input_ids"].shape[1], self.settings.max_sequence_length
        if found != expected:
            raise ConfigError(
                f"caption_length of the data's examples is {found}, and task.max_sequence_length, which prompts are "
                f"padded to when the model paints, is {expected}; set both to the same number"
            )
        return len(batch["pixel_values"])

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        latents_BCHW = self._latents(batch["pixel_values"])
        batch_size, _, height, width = latents_BCHW.shape
        latents_BSC = latents_BCHW.flatten(2).transpose(1, 2)
        drawn = example_noise(generator, batch_size, latents_BSC[0].numel() + 1)
        noise, normal = drawn[:, :-1].view_as(latents_BSC), drawn[:, -1]
        sigma = torch.sigmoid(normal * self.settings.sigma_std + self.settings.sigma_mean)
        noisy = latents_BSC + sigma[:, None, None] * (noise - latents_BSC)
        layers, tokens = self.settings.text_encoder_out_layers, height * width + batch["input_ids"].shape[1]
        with _attention(noisy.device, tokens):
            embeds_BTJ = conditioning(self.text_encoder, layers, batch["input_ids"], batch["attention_mask"])
            velocity = self.transformer(
                hidden_states=noisy,
                encoder_hidden_states=embeds_BTJ,
                timestep=sigma,
                img_ids=image_ids(height, width).to(noisy.device),
                txt_ids=text_ids(embeds_BTJ.shape[1]).to(noisy.device),
                return_dict=False,
            )[0]
        squares = (velocity.float() - (noise - latents_BSC)).square()
        return Losses(squares.mean(dim=(1, 2)).sum(), {})

    @torch.no_grad()
    def _latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """Packed, normalised latents of pictures, float32 ``[B, C, H, W]``."""
        if not self.settings.latent_cache:
            return self._encoded(pixels)
        # Each by itself, so that they do not depend on the batch in which a picture was first met.
        return torch.cat([self._remembered(picture) for picture in pixels.split(1)])

    def _remembered(self, picture: torch.Tensor) -> torch.Tensor:
        key = hashlib.blake2b(picture.cpu().numpy().tobytes(), digest_size=16).digest()
        latents = self._latent_cache.get(key)
        if latents is None:
            latents = self._encoded(picture)
            if len(self._latent_cache) < self.settings.latent_cache:
                self._latent_cache[key] = latents
        return latents

    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        latents = self.vae.encode(pixels).latent_dist.mode().float()
        return normalise(self.vae, pack(latents, self.vae.config.patch_size[0]))

    def save(self, folder: Path) -> None:
        """Writes a diffusers directory that Flux2KleinPipeline and ``intaglio export`` read."""
        dtype = getattr(torch, self.settings.dtype)
        for role in ("transformer", "text_encoder", "vae"):
            save_quantized(getattr(self, role), folder / role, dtype)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=self.settings.shift)
        scheduler.save_pretrained(folder / "scheduler")
        (folder / "tokenizer").mkdir()
        copy_tokenizer(self._tokenizer, folder / "tokenizer")
        index = {
            "_class_name": "Flux2KleinPipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen3Model"],
            "tokenizer": ["transformers", _tokenizer_class(self._tokenizer)],
            "transformer": ["diffusers", "Flux2Transformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLFlux2"],
            "is_distilled": False,
            "max_sequence_length": self.settings.max_sequence_length,
            "text_encoder_out_layers": list(self.settings.text_encoder_out_layers),
        }
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tokenizer_class(folder: Path) -> str:
    """transformers' class for the tokenizer; Qwen's would put its own splitting in the place of tokenizer.json's."""
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_bytes()).get("tokenizer_class", "") if config.is_file() else ""
    return "Qwen2TokenizerFast" if named.startswith("Qwen2Tokenizer") else "PreTrainedTokenizerFast"


def _attention(device: torch.device, tokens: int) -> AbstractContextManager[None]:
    """On a CPU, of few tokens, products and a softmax: the backward pass of torch's fused attention takes longer."""
    few = device.type == "cpu" and tokens <= _FEW_TOKENS
    return sdpa_kernel(SDPBackend.MATH) if few else nullcontext()


def build_task(
    task: Mapping[str, Any], model: Mapping[str, Any], *, root: Path, tokenizer: Path | None
) -> FlowMatchingTask:
    """The task of a recipe's ``[task]`` and ``[model]``. Raises ConfigError, CheckpointError."""
    settings = checked(FlowMatchingSettings, task, "task", "task.")
    parts = checked(FlowMatchingModels, model, "model", "model.")
    if tokenizer is None:
        raise ConfigError("tokenizer is missing; it names the folder of the captions' tokenizer")
    models = {role: component(role, table, root) for role, table in parts}
    return FlowMatchingTask(models["transformer"], models["text_encoder"], models["vae"], settings, tokenizer)
