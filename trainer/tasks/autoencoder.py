"""Learning FLUX.2's autoencoder: reconstruction, a little Kullback-Leibler divergence, and the latents' statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn import functional

from intaglio.trainer.data.source import Batch
from intaglio.trainer.models.flux2 import check_size, component, pack
from intaglio.trainer.recipe import checked
from intaglio.trainer.saving import save_quantized
from intaglio.trainer.tasks.task import Losses, Task, example_noise


class AutoencoderSettings(BaseModel):
    """``[task]`` of ``kind = "autoencoder"``; see :class:`AutoencoderTask` for the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    kl_weight: float = Field(default=1e-4, ge=0.0)
    edge_weight: float = Field(default=1.0, ge=0.0)


class AutoencoderTask(Task):
    """Batches of ``pixel_values``, float32 ``[B, 3, H, W]`` in -1..1.

    The loss is the absolute error of the pixels, that of their differences to the right and below weighted with
    ``edge_weight`` (which keeps outlines sharp without a second network), and the divergence of the latents from a
    normal distribution weighted with ``kl_weight``; means over a picture each, summed over pictures.
    """

    unit = "images"

    def __init__(self, vae: AutoencoderKLFlux2, *, kl_weight: float = 1e-4, edge_weight: float = 1.0) -> None:
        super().__init__()
        self.vae = vae
        self.kl_weight, self.edge_weight = kl_weight, edge_weight

    def heavy_modules(self) -> list[nn.Module]:
        return [self.vae.encoder, self.vae.decoder]

    def weight(self, batch: Batch) -> int:
        """The number of pictures. Raises ConfigError for a size that the autoencoder does not take."""
        check_size(self.vae, batch["pixel_values"])
        return len(batch["pixel_values"])

    def forward(self, batch: Batch, generator: torch.Generator) -> Losses:
        pixels = batch["pixel_values"]
        posterior = self.vae.encode(pixels).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        noise = example_noise(generator, len(mean), mean[0].numel()).view_as(mean)
        latents = mean + torch.exp(0.5 * logvar) * noise
        decoded = self.vae.decode(latents).sample.float()
        if self.training:
            # Only its running statistics are of use: the pipeline normalises packed latents with them.
            self.vae.bn(pack(latents.detach(), self.vae.config.patch_size[0]))
        pixel = functional.l1_loss(decoded, pixels)
        edge = functional.l1_loss(decoded.diff(dim=2), pixels.diff(dim=2))
        edge = edge + functional.l1_loss(decoded.diff(dim=3), pixels.diff(dim=3))
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum() / pixels.numel()
        total = pixel + self.edge_weight * edge + self.kl_weight * kl
        count = len(pixels)
        return Losses(total * count, {"pixel": pixel * count, "edge": edge * count, "kl": kl * count})

    def save(self, folder: Path) -> None:
        save_quantized(self.vae, folder)


def build_task(
    task: Mapping[str, Any], model: Mapping[str, Any], *, root: Path, tokenizer: Path | None
) -> AutoencoderTask:
    """The task of a recipe's ``[task]`` and ``[model]``, an AutoencoderKLFlux2. Raises ConfigError, CheckpointError."""
    settings = checked(AutoencoderSettings, task, "task", "task.")
    vae = component("vae", model, root)
    return AutoencoderTask(vae, kl_weight=settings.kl_weight, edge_weight=settings.edge_weight)
