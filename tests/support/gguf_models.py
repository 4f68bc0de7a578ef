"""A transformers model written as a GGUF file by the ``gguf`` package, as llama.cpp's converter writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tiny_models import TinyModel


@dataclass(frozen=True)
class TinyGGUF:
    """A tiny model, the type its matrices are stored in, and the metadata keys of its rope scaling."""

    tiny: TinyModel
    storage: gguf.GGMLQuantizationType
    rope: dict[str, Any] = field(default_factory=dict)
    rope_freqs: bool = False

    @property
    def name(self) -> str:
        return f"{self.tiny.name}-{self.storage.name}"

    def build(self, folder: Path) -> transformers.PreTrainedModel:
        """Writes ``folder/model.gguf`` and returns the model with the weights that the file holds."""
        folder.mkdir()
        model = self.tiny.build(folder / "source")
        config = model.config
        writer = gguf.GGUFWriter(folder / "model.gguf", config.model_type)
        _add_config(writer, config)
        _add_tokenizer(writer, config.vocab_size)
        for key, value in self.rope.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            add[type(value)](f"{config.model_type}.rope.scaling.{key}", value)
        if self.rope_freqs:
            writer.add_tensor("rope_freqs.weight", llama3_factors(config))
        names = gguf.get_tensor_name_map(
            next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type),
            config.num_hidden_layers,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                values = parameter.numpy()
                if values.ndim > 1:
                    data = _quantize(values, self.storage)
                    parameter.copy_(torch.from_numpy(gguf.dequantize(data, self.storage).copy()))
                else:
                    data = values
                stored = _permuted(data, name, config) if config.model_type == "llama" else data
                kind = self.storage if values.ndim > 1 else gguf.GGMLQuantizationType.F32
                writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model


# Where the float16 scales of a block lie, for types that the gguf package reads and does not write.
_SCALES_AT = {"Q4_K": (0, 2), "Q6_K": (208,)}


def _quantize(values: np.ndarray, storage: gguf.GGMLQuantizationType) -> np.ndarray:
    """The file's bytes of a matrix; where the gguf package has no encoder, random blocks of about its size."""
    if storage.name not in _SCALES_AT:
        return gguf.quantize(values, storage)
    _, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // 256, block_bytes), np.uint8)
    for at in _SCALES_AT[storage.name]:
        scales = rng.uniform(0.5, 1.0, blocks.shape[:2]).astype(np.float16) * np.float16(2e-4)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def _add_config(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "0", "t0", *(f"<{i}>" for i in range(3, vocab_size))])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)


def _permuted(rows: np.ndarray, name: str, config: transformers.PretrainedConfig) -> np.ndarray:
    """llama.cpp's layout of q and k: the two numbers that a rotation mixes lie side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return rows
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(config: transformers.PretrainedConfig) -> np.ndarray:
    """Llama 3's scaling as the converter stores it: what each frequency is divided by."""
    scaling = config.rope_parameters
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * scaling["rope_theta"] ** (i / config.head_dim)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
