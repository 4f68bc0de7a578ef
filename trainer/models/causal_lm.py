"""Decoder language models, of transformers' own classes: from a published folder, or from config values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from intaglio.errors import CheckpointError, ConfigError
from intaglio.trainer.loading import load_quantized

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def build_causal_lm(settings: Mapping[str, Any], root: Path) -> nn.Module:
    """The model of ``[model]``: ``path`` of a published folder, or ``architecture`` and values of its config.

    Without a path the weights are random. Weights are float32; paths are relative to ``root``. Raises ConfigError, and
    CheckpointError where the folder is not of one of these architectures or cannot be read.
    """
    values = dict(settings)
    path, architecture = values.pop("path", None), values.pop("architecture", None)
    if (path is None) == (architecture is None):
        raise ConfigError("model: expected either path (a folder to start from) or architecture and config values")
    if path is not None:
        if values:
            raise ConfigError(f"model.{min(values)}: a model from a path has its own config; leave the key out")
        return _from_folder(root / path)
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"model.architecture is {architecture!r}; expected one of {', '.join(ARCHITECTURES)}")
    return _from_values(architecture, values)


def _from_folder(folder: Path) -> nn.Module:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json; model.path names a folder as transformers saves models")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in ARCHITECTURES:
            raise CheckpointError(
                f"{folder}: is a model of type {config.model_type}; expected one of {', '.join(ARCHITECTURES)}"
            )
        if getattr(config, "quantization", None):
            # Packed as intaglio saves them: such layers stay packed, and are not trained.
            del config.quantization
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            load_quantized(model, folder)
            return model
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, StrictDataclassError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: cannot be loaded ({reason}); get its files again") from error
    return model


def _from_values(architecture: str, values: Mapping[str, Any]) -> nn.Module:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers takes any key and forgets it: one that no config has is a spelling mistake.
    known = [*AutoConfig.for_model(architecture).to_dict(), "rope_theta"]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected a key of the config of {architecture}"
            raise ConfigError(f"model.{key} is unknown; {hint}")
    try:
        config = AutoConfig.for_model(architecture, **values)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {groups}")
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model: {architecture} cannot be built from these values ({reason}); mend them") from error
