"""A model's configuration and tensor names in the other format's spelling: exactly, or refused.

What is written is read back before it is used and compared with what was meant, key by key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import ConfigError
from intaglio.exporters.architecture import Architecture, all_architectures
from intaglio.exporters.checkpoints.gguf_decoder import _KEYS, _LAYER, _ROPE_SCALING, _TOP, CONFIG_TENSORS
from intaglio.exporters.checkpoints.tensors import ArrayTensor, Checkpoint, CheckpointTensor
from intaglio.exporters.config import (
    ConfigKeys,
    LinearScaling,
    Llama3Scaling,
    RopeFreqs,
    YarnScaling,
)

# llama.cpp runs these models as another architecture's.
_GGUF_ALIASES = {"mistral": "llama"}
# Said by which tensors a GGUF file has, or by keys that are checked when it is read back.
_IMPLIED = {"tie_word_embeddings", "attention_bias", "mlp_bias", "rope_scaling", "sliding_window", "layer_types"}
_HF_LAYER = {hf: gguf for gguf, hf in _LAYER.items()}
_HF_TOP = {hf: gguf for gguf, hf in _TOP.items()}
# Keys that say how a model was trained or is loaded, and nothing about what it computes.
_INERT_KEYS = {"architectures", "model_type", "quantization", "quantization_config", "dtype", "torch_dtype"}


def gguf_architecture(architecture: Architecture) -> tuple[str, Architecture]:
    """The GGUF name of an architecture, and the one that reads it back. Raises ConfigError if it has none."""
    name = (
        architecture.gguf_architectures[0] if architecture.gguf_architectures else _GGUF_ALIASES.get(architecture.name)
    )
    for other in all_architectures():
        if name in other.gguf_architectures:
            assert name is not None
            return name, other
    raise ConfigError(f"{architecture.name}: GGUF has no name for this architecture that is written here")


def gguf_tensor_name(name: str, architecture: Architecture) -> str:
    """The GGUF name of a Hugging Face tensor, by the table that reads it. Raises ConfigError if it has none."""
    stem, _, part = name.rpartition(".")
    found = _HF_TOP.get(stem)
    pieces = stem.split(".", 3)
    if found is None and len(pieces) == 4 and pieces[:2] == ["model", "layers"] and pieces[3] in _HF_LAYER:
        found = f"blk.{pieces[2]}.{_HF_LAYER[pieces[3]]}"
    if found is None or architecture.gguf_name(f"{found}.{part}") != name:
        raise ConfigError(f"{name}: has no name in GGUF files of {architecture.gguf_architectures[0]}")
    return f"{found}.{part}"


def gguf_config(
    architecture: Architecture, config: Any, source: str
) -> tuple[dict[str, Any], dict[str, CheckpointTensor]]:
    """The metadata of a configuration, and the tensors that hold a part of it. Raises ConfigError."""
    name, _ = gguf_architecture(architecture)
    fields = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(fields - set(_KEYS) - _IMPLIED):
        raise ConfigError(f"{source}: {unknown[0]} has no key in GGUF files of {name}")
    if getattr(config, "sliding_window", None) is not None:
        raise ConfigError(
            f"{source}: sliding_window is {config.sliding_window}, which readers of GGUF files of {name} ignore; "
            "the model would be another one. Keep it in its folder"
        )
    metadata: dict[str, Any] = {"general.architecture": name, "general.type": "model"}
    metadata |= {f"{name}.{suffix}": getattr(config, key) for key, suffix in _KEYS.items()}
    metadata[f"{name}.attention.value_length"] = config.head_dim
    metadata[f"{name}.rope.dimension_count"] = config.head_dim
    scaling = config.rope_scaling
    tensors: dict[str, CheckpointTensor] = {}
    match scaling:
        case None:
            pass
        case LinearScaling() | YarnScaling():
            said = {key: getattr(scaling, key) for key in _ROPE_SCALING if hasattr(scaling, key)}
            metadata |= {f"{name}.{_ROPE_SCALING[key]}": value for key, value in said.items()}
        case Llama3Scaling() if name == "llama":
            factors = _llama3_factors(scaling, config.rope_theta, config.head_dim)
            tensors[CONFIG_TENSORS[0]] = ArrayTensor(CONFIG_TENSORS[0], factors.shape, "F32", factors)
        case _:
            raise ConfigError(f"{source}: rope scaling {scaling.rope_type!r} has no keys in GGUF files of {name}")
    return metadata, tensors


def check_gguf_config(
    architecture: Architecture, config: Any, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Reads back what would be written. Raises ConfigError where another model would come out."""
    _, other = gguf_architecture(architecture)
    stored = {key: _float32(value) for key, value in metadata.items()}
    found = other.read_config(other.gguf_config(Checkpoint(path, "gguf", tensors, (), metadata=stored)))
    ignored = {"rope_scaling"} if isinstance(config.rope_scaling, Llama3Scaling) else set()
    _compare(config, found, str(path), ignored)


def _llama3_factors(scaling: Llama3Scaling, theta: float, head_dim: int) -> np.ndarray:
    """What each frequency is divided by, float32 ``[head_dim / 2]``, as llama.cpp stores Llama 3's scaling."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelengths
    smooth = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
    )  # fmt: skip
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def hf_config(architecture: Architecture, config: Any, source: str, dtype: str) -> dict[str, Any]:
    """``config.json`` of a configuration that a GGUF file gave. Raises ConfigError."""
    content: dict[str, Any] = {"architectures": [architecture.class_names[0]], "model_type": architecture.name}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        content[field.name] = _shortest(value)
    # A GGUF file of these architectures has no windows, so every layer sees everything.
    if content.pop("layer_types", None) is not None:
        content["use_sliding_window"] = False
    scaling = config.rope_scaling
    match scaling:
        case None:
            content["rope_scaling"] = None
        case LinearScaling() | YarnScaling():
            said = {key: _shortest(getattr(scaling, key)) for key in _ROPE_SCALING if hasattr(scaling, key)}
            content["rope_scaling"] = said
        case RopeFreqs():
            raise ConfigError(
                f"{source}: {CONFIG_TENSORS[0]} divides each frequency by a number of its own, and config.json has no "
                "key for that. Take the model's own folder, whose config.json says how they come about"
            )
        case _:
            raise ConfigError(f"{source}: rope scaling {scaling.rope_type!r} cannot be written")
    content |= {"hidden_act": "silu", "torch_dtype": dtype}
    found = architecture.read_config(ConfigKeys(content, source))
    _compare(config, found, source, set())
    return content


def untranslated_config(keys: ConfigKeys) -> list[str]:
    """The keys of a ``config.json`` that nothing asked for, and that are not null."""
    return sorted(k for k, v in keys.values.items() if v is not None and k not in keys.asked | _INERT_KEYS)


def untranslated_metadata(metadata: Mapping[str, Any], architecture: str, *, tokenizer: bool) -> list[str]:
    """The metadata keys of a GGUF file that have no place in a Hugging Face folder."""
    known = {f"{architecture}.{suffix}" for suffix in (*_KEYS.values(), *_ROPE_SCALING.values())}
    known |= {f"{architecture}.{suffix}" for suffix in ("rope.dimension_count", "attention.value_length")}
    known |= {
        "general.architecture",
        "general.type",
        "general.alignment",
        "general.quantization_version",
        "general.file_type",
    }
    if tokenizer:
        known |= {f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges")}
        known |= {f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "eom", "padding", "unknown")}
        known |= {f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_eos_token", "add_space_prefix")}
        known.add("tokenizer.chat_template")
    return sorted(set(metadata) - known)


def _float32(value: Any) -> Any:
    return float(np.float32(value)) if isinstance(value, float) else value


def _shortest(value: Any) -> Any:
    # 1e-05 rather than 9.999999747378752e-06: both are the same float32.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _compare(config: Any, found: Any, source: str, ignored: set[str]) -> None:
    expected, there = (
        {field.name: _rounded(getattr(side, field.name)) for field in dataclasses.fields(side)}
        for side in (config, found)
    )
    for key, value in expected.items():
        if key not in ignored and key in there and there[key] != value:
            raise ConfigError(
                f"{source}: {key} is {value!r} and would be read back as {there[key]!r}; it is not written"
            )


def _rounded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _rounded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return _float32(value)
