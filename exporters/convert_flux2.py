"""``convert`` for FLUX.2's transformer: published safetensors files, and GGUF files of ``bonsai-image``.

Neither side needs a ``config.json``: sizes follow from the tensors, and from them the widths that tell how an MLX
matrix is packed; what no tensor tells is known for the published models only, as for an export. In GGUF the matrices of
the blocks are TQ2_0_g128 under the names of their modules; everything else is kept as it is. Formats: PrismML's
bonsai-image-ternary-4B-mlx-2bit and oxibonsai's converter of it, which pads no tensor and writes a name as the
quantization version; here both are as GGUF has them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.errors import ConfigError, InputError, WeightsError
from intaglio.exporters.architecture import find_architecture, match_weights, model_tensors, read_config
from intaglio.exporters.architectures.flux2 import ARCHITECTURE, Flux2Config
from intaglio.exporters.checkpoints import Checkpoint, CheckpointTensor
from intaglio.exporters.checkpoints.flux2_spellings import GGUF_IMPLIED, GGUF_KEYS, UNTOLD, recognize_flux2
from intaglio.exporters.checkpoints.ternary import (
    GROUP_SIZE,
    RescaledTensor,
    TernaryMlxTensor,
    pack_ternary,
)
from intaglio.exporters.config import assumed_note
from intaglio.exporters.convert_tensors import FLOATS, FloatTensor
from intaglio.kernels.grouped_quant import GroupedQuantFormat

_GGUF = ARCHITECTURE.gguf_architectures[0]
_PACKED = "TQ2_0_g128"
_TERNARY, _AFFINE = GroupedQuantFormat(2, GROUP_SIZE, 1), GroupedQuantFormat(2, GROUP_SIZE, 0)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BLOCKS = ("transformer_blocks.", "single_transformer_blocks.")


def is_flux2(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is FLUX.2's transformer, in any spelling that is read."""
    if checkpoint.format == "gguf":
        return checkpoint.metadata.get("general.architecture") == _GGUF
    return recognize_flux2(checkpoint) is not None


@dataclass(frozen=True)
class Flux2Target:
    """What is to be written: by name the source's name, the tensor and the type to write it in where it is not its
    own; the metadata of a GGUF file or the content of ``config.json``, if any; and notes.
    """

    tensors: dict[str, tuple[str, CheckpointTensor, str | None]]
    settings: dict[str, Any] | None
    notes: list[str]


def flux2_to_gguf(checkpoint: Checkpoint, storage: str | None, overrides: Mapping[str, Any]) -> Flux2Target:
    """A GGUF file.

    ``storage`` is the type that plain tensors are rounded to, if any, ``overrides`` are configuration keys. Raises
    WeightsError or ConfigError where the tensors are not those of a FLUX.2 transformer or the configuration is not
    known, CheckpointError when a matrix is read that is not ternary.
    """
    if storage not in (None, "BF16", "F16"):
        raise InputError(f"--type {storage}: a GGUF file of {_GGUF} holds {_PACKED}, and BF16 or F16 for the rest")
    config, weights, notes = _model(checkpoint, overrides)
    tensors: dict[str, tuple[str, CheckpointTensor, str | None]] = {}
    for name in sorted(name for name in weights if _is_ternary(name, weights[name])):
        tensor = _as_ternary(checkpoint.path, name, weights[name])
        tensors[name.removesuffix(".weight")] = (tensor.name, tensor, _PACKED)
    for name in sorted(name for name in weights if not _is_ternary(name, weights[name])):
        tensor = _as_plain(checkpoint.path, name, weights[name], storage)
        tensors[name] = (tensor.name, tensor, tensor.storage)
    return Flux2Target(tensors, _metadata(checkpoint.path, config), notes)


def flux2_to_safetensors(
    checkpoint: Checkpoint, storage: str | None, overrides: Mapping[str, Any], *, with_config: bool
) -> Flux2Target:
    """The tensors of a GGUF file under diffusers' names, sorted.

    Unless ``storage`` asks for a type, ternary matrices get bfloat16 scales as MLX's files have them, exactly or with
    CheckpointError. Without a config (``with_config`` false) a note says what whoever reads the file must be told, or
    ConfigError is raised where they would take the model for a published one. Raises WeightsError or ConfigError.
    """
    config, weights, notes = _model(checkpoint, overrides)
    tensors: dict[str, tuple[str, CheckpointTensor, str | None]] = {}
    for name, tensor in sorted(weights.items()):
        if tensor.layout is not None and storage is None:
            ternary = _as_ternary(checkpoint.path, name, tensor)
            tensor = RescaledTensor(ternary.name, tensor.shape, "ternary", ternary, _BFLOAT16)
        tensors[name] = (tensor.name, tensor, None)
    if with_config:
        return Flux2Target(tensors, _diffusers_config(config), notes)
    return Flux2Target(tensors, None, [*notes, *_lost(checkpoint.path, config, weights)])


def resolved_flux2(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint under diffusers' names, its MLX matrices with the widths that the other tensors say."""
    return dataclasses.replace(checkpoint, tensors=_model(checkpoint, overrides)[1])


# --- tensors ------------------------------------------------------------------------------------------------


def _model(
    checkpoint: Checkpoint, overrides: Mapping[str, Any]
) -> tuple[Flux2Config, dict[str, CheckpointTensor], list[str]]:
    """Configuration and tensors under the architecture's names, when they are all there and no others; and notes."""
    architecture, keys = find_architecture(checkpoint)
    if architecture is not ARCHITECTURE:
        raise ConfigError(
            f"{checkpoint.path}: has the tensors of a FLUX.2 transformer, but its config.json is of "
            f"{architecture.name}; put the file in a folder of its own"
        )
    config, assumed = read_config(architecture, keys, overrides)
    model = architecture.build(config)
    weights, _ = match_weights(
        model,
        {name for name, _ in model.named_parameters()},
        model_tensors(checkpoint, architecture, config),
        lambda name: False,
        str(checkpoint.path),
        advice="a conversion would lose them",
    )
    return config, weights, [assumed_note(assumed, dataclasses.asdict(config))] if assumed else []


def _is_ternary(name: str, tensor: CheckpointTensor) -> bool:
    return name.startswith(_BLOCKS) and len(tensor.shape) == 2


def _as_ternary(path: Path, name: str, tensor: CheckpointTensor) -> CheckpointTensor:
    if tensor.layout is None:
        pack_ternary(tensor)  # raises where it could not be packed, saying why
        raise WeightsError(
            f"{path}: {name}: is {tensor.storage}, and a GGUF file of {_GGUF} holds {_PACKED} here; --pack-ternary "
            "packs it"
        )
    if tensor.layout.format == _AFFINE and tensor.layout.has_offsets:
        return TernaryMlxTensor(tensor.name, tensor.shape, tensor.storage, tensor)
    if tensor.layout.format != _TERNARY or tensor.layout.has_offsets:
        raise WeightsError(
            f"{path}: {name}: is {tensor.storage} in groups of {tensor.layout.format.group_size}, expected 2 bits in "
            f"groups of {GROUP_SIZE}"
        )
    return tensor


def _as_plain(path: Path, name: str, tensor: CheckpointTensor, storage: str | None) -> CheckpointTensor:
    if storage is not None and tensor.storage in FLOATS and tensor.storage != storage:
        return FloatTensor.of(tensor, storage)
    if tensor.storage not in ("BF16", "F16"):
        raise WeightsError(
            f"{path}: {name}: is {tensor.storage}, and a GGUF file of {_GGUF} holds BF16 or F16 here; --type BF16 "
            "rounds to it"
        )
    return tensor


# --- configuration ------------------------------------------------------------------------------------------


def _lost(path: Path, config: Flux2Config, weights: Mapping[str, CheckpointTensor]) -> list[str]:
    """Notes on what a file of these tensors alone does not say. Raises ConfigError where it says something else."""
    keys = recognize_flux2(Checkpoint(path, "safetensors", weights, ()))
    assert keys is not None, f"{path}: is FLUX.2"
    values = dataclasses.asdict(config) | {"axes_dims_rope": list(config.axes_dims_rope)}
    for key in keys.assumed:
        if values[key] != keys.values[key]:
            raise ConfigError(
                f"{path}: {key} is {values[key]}, and a file of these widths without config.json means "
                f"{keys.values[key]}; name a folder"
            )
    untold = [
        f"--config {key}={json.dumps(values[key], separators=(',', ':'))}" for key in UNTOLD if key not in keys.assumed
    ]
    return [f"without a config.json whoever reads the file must say {' '.join(untold)}"] if untold else []


def _metadata(path: Path, config: Flux2Config) -> dict[str, Any]:
    implied = {**GGUF_IMPLIED, "out_channels": config.in_channels}
    for key, expected in implied.items():
        if getattr(config, key) != expected:
            raise ConfigError(
                f"{path}: {key} is {getattr(config, key)!r}, and a GGUF file of {_GGUF} means {expected!r}; it is not "
                "written"
            )
    if float(np.float32(config.mlp_ratio)) != config.mlp_ratio:
        raise ConfigError(f"{path}: mlp_ratio is {config.mlp_ratio!r}, which the float32 of a GGUF file does not hold")
    values = dataclasses.asdict(config) | {"axes_dims_rope": np.array(config.axes_dims_rope, np.uint32)}
    return {
        "general.architecture": _GGUF,
        "general.name": path.name if path.is_dir() else path.stem,
        "general.quantization_version": 2,
        **{f"{_GGUF}.{suffix}": values[key] for suffix, key in GGUF_KEYS.items()},
    }


def _diffusers_config(config: Flux2Config) -> dict[str, Any]:
    values = dataclasses.asdict(config) | {"axes_dims_rope": list(config.axes_dims_rope)}
    if config.out_channels == config.in_channels:
        values["out_channels"] = None
    return {"_class_name": ARCHITECTURE.class_names[0], **values}
