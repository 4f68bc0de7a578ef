"""FLUX.2's autoencoder, transformer and text encoder for training: diffusers' and transformers' own classes.

Shape suffixes: B batch, C packed latent channels, H rows and W columns of the latent grid, S image tokens, T text
tokens. Latents are packed and normalised as Flux2KleinPipeline does it, so a trained model runs there as it is.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3Model

from intaglio.errors import CheckpointError, ConfigError
from intaglio.runtimes import latents
from intaglio.trainer.loading import load_quantized


def component(role: str, settings: Mapping[str, Any], root: Path) -> Any:
    """The ``vae``, ``transformer`` or ``text_encoder`` of a recipe's table: from a folder, or with fresh weights.

    ``settings`` is ``{"path": FOLDER}``, relative to ``root``, or the values of the published ``config.json``. Weights
    are float32; layers that are packed in the folder stay so, and are not trained. Raises ConfigError for a key that
    the model does not have, CheckpointError for a folder that cannot be read, WeightsError for one of other tensors.
    """
    path, values = settings.get("path"), {key: value for key, value in settings.items() if key != "path"}
    if path is None:
        return _BUILDERS[role](_known(role, values))
    if values:
        raise ConfigError(f"{role}: has path and {min(values)}; a model from a folder has its own configuration")
    folder = root / path
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; path names the folder of a {role}, as it is published")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not config.get("quantization"):
            return _CLASSES[role].from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32)
        own = {key: value for key, value in config.items() if key != "quantization" and not key.startswith("_")}
        model = _BUILDERS[role](own)
        load_quantized(model, folder)
        return model
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be read as {_CLASSES[role].__name__} ({error})") from error


def _build_transformer(config: dict[str, Any]) -> Flux2Transformer2DModel:
    """Fresh weights, which start as the identity.

    The output projection and all modulations are zero, as in DiT (Peebles and Xie 2022, arXiv:2212.09748).
    """
    transformer = Flux2Transformer2DModel.from_config(config)
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and ("modulation" in name or name in ("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(module.weight)
    return transformer


_BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "vae": AutoencoderKLFlux2.from_config,
    "transformer": _build_transformer,
    "text_encoder": lambda config: Qwen3Model(Qwen3Config(**config)),
}
_CLASSES = {"vae": AutoencoderKLFlux2, "transformer": Flux2Transformer2DModel, "text_encoder": Qwen3Model}


def _known(role: str, values: dict[str, Any]) -> dict[str, Any]:
    """``values``, none of which the model would ignore."""
    if role == "text_encoder":
        known = set(Qwen3Config().to_dict())
    else:
        known = set(inspect.signature(_CLASSES[role].__init__).parameters) - {"self"}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"{role}.{unknown[0]} is no key of {_CLASSES[role].__name__}; known are {sorted(known)}")
    return values


def pack(latents_BLHW: torch.Tensor, patch: int) -> torch.Tensor:
    """Latents ``[B, L, H * patch, W * patch]`` as a grid of patches ``[B, L * patch ** 2, H, W]``."""
    batch, channels, height, width = latents_BLHW.shape
    patches = latents_BLHW.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return patches.permute(0, 1, 3, 5, 2, 4).reshape(batch, -1, height // patch, width // patch)


def normalise(vae: AutoencoderKLFlux2, latents_BCHW: torch.Tensor) -> torch.Tensor:
    """Packed latents with the mean 0 and the variance 1 that the batch norm's running statistics give them."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return (latents_BCHW - mean) / torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


def image_ids(height: int, width: int) -> torch.Tensor:
    """Position ids of the picture's tokens, int64 ``[S, 4]``, as the runtime gives them."""
    return torch.from_numpy(latents.image_ids(height, width))


def text_ids(length: int) -> torch.Tensor:
    """Position ids of the text's tokens, int64 ``[T, 4]``, as the runtime gives them."""
    return torch.from_numpy(latents.text_ids(length))


def conditioning(
    text_encoder: Qwen3Model, layers: Sequence[int], input_ids_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """The hidden states of ``layers`` side by side, ``[B, T, layers * hidden]``; padding is masked in the encoder."""
    states = text_encoder(
        input_ids=input_ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


def check_fit(
    transformer: Flux2Transformer2DModel, text_encoder: Qwen3Model, vae: AutoencoderKLFlux2, layers: Sequence[int]
) -> None:
    """Whether the parts have each other's widths, and the transformer takes no guidance. Raises ConfigError."""
    hidden, last = text_encoder.config.hidden_size, text_encoder.config.num_hidden_layers
    if not layers or not all(0 <= layer <= last for layer in layers):
        raise ConfigError(f"text_encoder_out_layers is {list(layers)}; expected layers from 0 to {last}")
    if transformer.config.joint_attention_dim != len(layers) * hidden:
        raise ConfigError(
            f"joint_attention_dim is {transformer.config.joint_attention_dim}; {len(layers)} layers of {hidden} are "
            f"{len(layers) * hidden} wide"
        )
    if transformer.config.guidance_embeds:
        raise ConfigError(
            "guidance_embeds of the transformer is true, and training has no guidance to give it; set it to false, or "
            "start from a transformer without, such as FLUX.2 [klein]'s"
        )
    packed = vae.config.latent_channels * math.prod(vae.config.patch_size)
    if transformer.config.in_channels != packed:
        raise ConfigError(f"in_channels is {transformer.config.in_channels}; the packed latents have {packed} channels")


def freeze_unused(transformer: Flux2Transformer2DModel, text_encoder: Qwen3Model, layers: Sequence[int]) -> None:
    """Freezes parameters that the velocity does not depend on where ``layers`` are the conditioning.

    They get no gradient, which DistributedDataParallel waits for, and weight decay alone would change them.
    """
    highest = max(layers)
    unused: list[Any] = list(text_encoder.layers[highest:])
    if highest < len(text_encoder.layers):
        # Only the last hidden state is normed.
        unused.append(text_encoder.norm)
    blocks = transformer.transformer_blocks
    if not blocks:
        unused += [transformer.double_stream_modulation_img, transformer.double_stream_modulation_txt]
    if not transformer.single_transformer_blocks:
        unused.append(transformer.single_stream_modulation)
        # Nothing comes after the text that the last block puts out.
        for block in blocks[-1:]:
            unused += [block.ff_context, block.attn.to_add_out, block.attn.add_q_proj, block.attn.norm_added_q]
    for module in unused:
        module.requires_grad_(False)


def check_size(vae: AutoencoderKLFlux2, pixels_B3HW: torch.Tensor) -> None:
    """Whether the latents of the pictures make whole patches. Raises ConfigError."""
    height, width = pixels_B3HW.shape[2:]
    multiples = [2 ** (len(vae.config.block_out_channels) - 1) * patch for patch in vae.config.patch_size]
    if height % multiples[0] or width % multiples[1]:
        near = [max(1, round(n / multiple)) * multiple for n, multiple in zip((height, width), multiples, strict=True)]
        raise ConfigError(
            f"size of the data's examples is {height} x {width} pixels; the autoencoder takes multiples of "
            f"{multiples[0]} x {multiples[1]}, such as {near[0]} x {near[1]}"
        )
