"""Makes a FLUX.2-klein checkpoint of random weights, tiny or of the published size, in each published spelling.

    python tools/make_checkpoint.py pipeline folder                                      # as diffusers saves it
    python tools/make_checkpoint.py transformer packed.safetensors --spelling mlx --size 4B
    python tools/make_checkpoint.py text-encoder folder --spelling mlx --size 4B
    python tools/make_checkpoint.py text-encoder te.gguf --spelling gguf                 # with its tokenizer
    python tools/make_checkpoint.py vae ae.safetensors --spelling bfl

The same seed and size give the same model in every spelling: the ternary matrices of the transformer and the 4-bit
ones of the text encoder have scales of so few digits that their values are exact in bfloat16 too. Every tensor is
drawn row by row while it is written, so that the memory needed does not grow with the model. Weights are as large as
those of a trained model, so that all activations are, too.

Names, shapes and settings: diffusers' Flux2KleinPipeline, transformers' Qwen3ForCausalLM, llama.cpp's converter of it,
Black Forest Labs' reference code (https://github.com/black-forest-labs/flux2), and PrismML's bonsai-image files for the
packed ones.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from klein_sizes import SCHEDULER, SIZES, TINY, Sizes
from random_tensors import ReshapedTensor, StackedTensor, affine_4bit, normal, ternary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from intaglio.exporters.checkpoints.gguf_writer import GgufTensor, write_gguf
from intaglio.exporters.checkpoints.safetensors_writer import write_file, write_shards
from intaglio.exporters.checkpoints.tensors import ArrayTensor, CheckpointTensor, reorder_rows
from intaglio.exporters.convert_tensors import FloatTensor
from intaglio.exporters.convert_tokenizer import tokenizer_metadata
from intaglio.exporters.tokenizer import tokenizer_from_directory

BFL_PREFIX = "model.diffusion_model."
# Of each part, the first by default. Of the rest only diffusers' is published.
SPELLINGS = {
    "transformer": ("diffusers", "bfl", "mlx", "gguf"),
    "text-encoder": ("diffusers", "mlx", "gguf"),
    "vae": ("diffusers", "bfl"),
}

Tensors = dict[str, CheckpointTensor]

# --- the transformer ------------------------------------------------------------------------------------------


def transformer_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """The transformer under diffusers' names; attention and feed-forward matrices of the blocks are ternary."""
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, inner = heads * head_dim, round(heads * head_dim * config["mlp_ratio"])
    channels = config["in_channels"]
    ternaries: dict[str, tuple[int, int]] = {}
    dense: dict[str, tuple[int, int]] = {
        "x_embedder": (hidden, channels),
        "context_embedder": (hidden, config["joint_attention_dim"]),
        "time_guidance_embed.timestep_embedder.linear_1": (hidden, config["timestep_guidance_channels"]),
        "time_guidance_embed.timestep_embedder.linear_2": (hidden, hidden),
        "double_stream_modulation_img.linear": (6 * hidden, hidden),
        "double_stream_modulation_txt.linear": (6 * hidden, hidden),
        "single_stream_modulation.linear": (3 * hidden, hidden),
        "norm_out.linear": (2 * hidden, hidden),
        "proj_out": (config["out_channels"] or channels, hidden),
    }
    norms: list[str] = []
    for i in range(config["num_layers"]):
        block = f"transformer_blocks.{i}"
        attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        ternaries |= {f"{block}.attn.{name}": (hidden, hidden) for name in attention}
        for name in ("ff", "ff_context"):
            ternaries |= {
                f"{block}.{name}.linear_in": (2 * inner, hidden),
                f"{block}.{name}.linear_out": (hidden, inner),
            }
        norms += [f"{block}.attn.{name}" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")]
    for i in range(config["num_single_layers"]):
        block = f"single_transformer_blocks.{i}.attn"
        ternaries[f"{block}.to_qkv_mlp_proj"] = (3 * hidden + 2 * inner, hidden)
        ternaries[f"{block}.to_out"] = (hidden, hidden + inner)
        norms += [f"{block}.norm_q", f"{block}.norm_k"]
    tensors: Tensors = {f"{m}.weight": ternary(f"{m}.weight", shape, seed) for m, shape in ternaries.items()}
    tensors |= {f"{m}.weight": normal(f"{m}.weight", shape, seed) for m, shape in dense.items()}
    tensors |= {f"{m}.weight": normal(f"{m}.weight", (head_dim,), seed, mean=1.0, std=0.1) for m in norms}
    return dict(sorted(tensors.items()))


_BFL = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_BFL_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_BFL_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_BFL_QKV = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}


def bfl_tensors(config: Mapping[str, Any], tensors: Tensors, prefix: str = "") -> Tensors:
    """Dense tensors under the names of Black Forest Labs' files: q, k and v fused, the final shift before the scale."""
    renamed: Tensors = {f"{bfl}.weight": tensors[f"{name}.weight"] for name, bfl in _BFL.items()}
    final = renamed["final_layer.adaLN_modulation.1.weight"]
    half = final.shape[0] // 2
    renamed["final_layer.adaLN_modulation.1.weight"] = reorder_rows(final, np.roll(np.arange(2 * half), half))
    for i in range(config["num_layers"]):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        renamed |= {f"{there}.{bfl}.weight": tensors[f"{here}.{name}.weight"] for name, bfl in _BFL_DOUBLE.items()}
        renamed |= {f"{there}.{bfl}.scale": tensors[f"{here}.{name}.weight"] for name, bfl in _BFL_NORMS.items()}
        for fused, names in _BFL_QKV.items():
            parts = tuple(tensors[f"{here}.{name}.weight"] for name in names)
            shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
            name = f"{there}.{fused}.weight"
            renamed[name] = StackedTensor(name, shape, parts[0].storage, parts)
    for i in range(config["num_single_layers"]):
        here, there = f"single_transformer_blocks.{i}.attn", f"single_blocks.{i}"
        renamed[f"{there}.linear1.weight"] = tensors[f"{here}.to_qkv_mlp_proj.weight"]
        renamed[f"{there}.linear2.weight"] = tensors[f"{here}.to_out.weight"]
        renamed[f"{there}.norm.query_norm.scale"] = tensors[f"{here}.norm_q.weight"]
        renamed[f"{there}.norm.key_norm.scale"] = tensors[f"{here}.norm_k.weight"]
    return {prefix + name: tensor for name, tensor in renamed.items()}


def write_transformer(
    target: str | Path,
    spelling: str = "diffusers",
    sizes: Sizes = TINY,
    seed: int = 0,
    *,
    dtype: str = "BF16",
    prefix: str = "",
) -> Path:
    """Writes the transformer to ``target``: a folder for ``diffusers``, else one file. Returns it.

    ``dtype`` is of the dense spellings, F32 or BF16; ``prefix`` stands before BFL's names.
    """
    target, config = Path(target), sizes.transformer
    tensors = transformer_tensors(config, seed)
    if spelling == "mlx":
        write_file(target, tensors, {"format": "mlx"})
    elif spelling == "gguf":
        _write_bonsai_image(target, config, tensors)
    elif spelling == "bfl":
        write_file(target, bfl_tensors(config, dense(tensors, dtype), prefix))
    else:
        _write_json(target / "config.json", config)
        write_shards(target, dense(tensors, dtype), {"format": "pt"}, stem="diffusion_pytorch_model")
    return target


def _write_bonsai_image(target: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    key = "bonsai-image"
    metadata = {
        "general.architecture": key,
        "general.name": target.stem,
        # What oxibonsai writes; the format's own key is a number.
        "general.quantization_version": "TQ2_0_G128",
        f"{key}.num_layers": config["num_layers"],
        f"{key}.num_single_layers": config["num_single_layers"],
        f"{key}.attention.head_count": config["num_attention_heads"],
        f"{key}.attention.head_dim": config["attention_head_dim"],
        f"{key}.joint_attention_dim": config["joint_attention_dim"],
        f"{key}.in_channels": config["in_channels"],
        f"{key}.mlp_ratio": float(config["mlp_ratio"]),
        f"{key}.rope.theta": float(config["rope_theta"]),
        f"{key}.rope.axes_dims": np.array(config["axes_dims_rope"], np.uint32),
        f"{key}.guidance_embeds": config["guidance_embeds"],
    }
    quantized = {n.removesuffix(".weight"): t for n, t in tensors.items() if t.layout is not None}
    plain = {name: tensor for name, tensor in tensors.items() if tensor.layout is None}
    stored = [GgufTensor(name, tensor, "TQ2_0_g128") for name, tensor in sorted(quantized.items())]
    write_gguf(target, metadata, stored + [GgufTensor(name, tensor, "BF16") for name, tensor in sorted(plain.items())])


def dense(tensors: Tensors, dtype: str) -> Tensors:
    """``tensors`` unpacked and as ``dtype``; integers stay what they are."""
    return {
        name: tensor if tensor.storage in (dtype, "I64") else FloatTensor.of(tensor, dtype)
        for name, tensor in tensors.items()
    }


# --- the text encoder -----------------------------------------------------------------------------------------


def text_encoder_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Qwen3 under its own names, its matrices 4-bit as MLX packs them; the head is the embedding."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    tensors: Tensors = {}

    def matrix(module: str, *shape: int) -> None:
        name = f"model.{module}.weight"
        tensors[name] = affine_4bit(name, (shape[0], shape[1]), seed)

    def norm(module: str, width: int) -> None:
        name = f"model.{module}.weight"
        tensors[name] = normal(name, (width,), seed, mean=1.0, std=0.1)

    matrix("embed_tokens", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", queries, hidden)
        matrix(f"{layer}.self_attn.k_proj", keys, hidden)
        matrix(f"{layer}.self_attn.v_proj", keys, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, queries)
        norm(f"{layer}.self_attn.q_norm", config["head_dim"])
        norm(f"{layer}.self_attn.k_norm", config["head_dim"])
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden)
        matrix(f"{layer}.mlp.up_proj", inner, hidden)
        matrix(f"{layer}.mlp.down_proj", hidden, inner)
    norm("norm", hidden)
    return tensors


_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}


def _write_qwen3_gguf(target: Path, config: Mapping[str, Any], tensors: Tensors, tokenizer: Path | None) -> None:
    """As llama.cpp's converter writes it, with matrices of Q4_1: its groups of 32 hold MLX's of 64 exactly."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder, tokenizer)
        files = tokenizer_from_directory(Path(folder))
        assert files is not None
        metadata = tokenizer_metadata(files, config["vocab_size"], str(tokenizer or "the tokenizer"))
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(config["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    general = {"general.architecture": "qwen3", "general.type": "model", "general.name": target.stem}
    stored = []
    for name, tensor in tensors.items():
        _, *inner = name.removesuffix(".weight").split(".", 3)
        module = _GGUF_TOP[inner[0]] if len(inner) == 1 else f"blk.{inner[1]}.{_GGUF_LAYER[inner[2]]}"
        stored.append(GgufTensor(f"{module}.weight", tensor, "Q4_1" if tensor.layout is not None else "F32"))
    write_gguf(target, general | {f"qwen3.{key}": value for key, value in sizes.items()} | metadata, stored)


def write_text_encoder(
    target: str | Path,
    spelling: str = "diffusers",
    sizes: Sizes = TINY,
    seed: int = 0,
    *,
    dtype: str = "BF16",
    config: bool = True,
    tokenizer: str | Path | None = None,
) -> Path:
    """Writes the text encoder to ``target``, a folder: dense as transformers does or ``mlx``, with its config or
    without; or for ``gguf`` a file, with a tokenizer, that of the folder ``tokenizer`` or the tiny one.
    """
    folder, content = Path(target), dict(sizes.text_encoder)
    tensors = text_encoder_tensors(content, seed)
    if spelling == "gguf":
        _write_qwen3_gguf(folder, content, tensors, Path(tokenizer) if tokenizer is not None else None)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if spelling == "mlx":
        content |= {"quantization": {"group_size": 64, "bits": 4}, "torch_dtype": "bfloat16"}
        write_shards(folder, tensors, {"format": "mlx"})
    else:
        content["torch_dtype"] = {"BF16": "bfloat16", "F32": "float32"}[dtype]
        write_shards(folder, dense(tensors, dtype), {"format": "pt"})
    if config:
        _write_json(folder / "config.json", content)
    return folder


# --- the VAE --------------------------------------------------------------------------------------------------


def vae_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """The autoencoder under diffusers' names; ``bn`` are the statistics of the latents."""
    tensors: Tensors = {}

    def conv(name: str, outputs: int, inputs: int, size: int, gain: float = 1.0) -> None:
        shape = (outputs, inputs, size, size)
        std = gain / math.sqrt(inputs * size * size)
        tensors[f"{name}.weight"] = normal(f"{name}.weight", shape, seed, std=std)
        tensors[f"{name}.bias"] = normal(f"{name}.bias", (outputs,), seed, std=0.05)

    def norm(name: str, channels: int) -> None:
        tensors[f"{name}.weight"] = normal(f"{name}.weight", (channels,), seed, mean=1.0, std=0.1)
        tensors[f"{name}.bias"] = normal(f"{name}.bias", (channels,), seed, std=0.1)

    def resnet(name: str, outputs: int, inputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", outputs, inputs, 3)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs, 3)
        if outputs != inputs:
            conv(f"{name}.conv_shortcut", outputs, inputs, 1)

    def middle(name: str, channels: int) -> None:
        resnet(f"{name}.resnets.0", channels, channels)
        norm(f"{name}.attentions.0.group_norm", channels)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            module = f"{name}.attentions.0.{part}"
            tensors[f"{module}.weight"] = normal(f"{module}.weight", (channels, channels), seed)
            tensors[f"{module}.bias"] = normal(f"{module}.bias", (channels,), seed, std=0.05)
        resnet(f"{name}.resnets.1", channels, channels)

    channels, latent, layers = config["block_out_channels"], config["latent_channels"], config["layers_per_block"]
    last = len(channels) - 1
    conv("encoder.conv_in", channels[0], config["in_channels"], 3)
    for i, width in enumerate(channels):
        for j in range(layers):
            resnet(f"encoder.down_blocks.{i}.resnets.{j}", width, channels[max(i - 1, 0)] if j == 0 else width)
        if i < last:
            conv(f"encoder.down_blocks.{i}.downsamplers.0.conv", width, width, 3)
    middle("encoder.mid_block", channels[-1])
    norm("encoder.conv_norm_out", channels[-1])
    conv("encoder.conv_out", 2 * latent, channels[-1], 3)
    conv("quant_conv", 2 * latent, 2 * latent, 1)
    conv("post_quant_conv", latent, latent, 1)
    channels = list(reversed(config.get("decoder_block_out_channels") or channels))
    conv("decoder.conv_in", channels[0], latent, 3)
    middle("decoder.mid_block", channels[0])
    for i, width in enumerate(channels):
        for j in range(layers + 1):
            resnet(f"decoder.up_blocks.{i}.resnets.{j}", width, channels[max(i - 1, 0)] if j == 0 else width)
        if i < last:
            conv(f"decoder.up_blocks.{i}.upsamplers.0.conv", width, width, 3)
    norm("decoder.conv_norm_out", channels[-1])
    # Pixels between -1 and 1 for the most part.
    conv("decoder.conv_out", config["out_channels"], channels[-1], 3, gain=0.6)
    features = latent * math.prod(config["patch_size"])
    tensors["bn.running_mean"] = normal("bn.running_mean", (features,), seed, std=0.1)
    # Never near zero: four deviations below the mean it is still 0.2.
    tensors["bn.running_var"] = normal("bn.running_var", (features,), seed, mean=1.0, std=0.2)
    tensors["bn.num_batches_tracked"] = ArrayTensor("bn.num_batches_tracked", (), "I64", np.array(1000, np.int64))
    return tensors


_BFL_VAE = (
    (r"^quant_conv\.", "encoder.quant_conv."),
    (r"^post_quant_conv\.", "decoder.post_quant_conv."),
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.up_blocks\.(\d+)\.resnets\.", r".up.\1.block."),
    (r"\.up_blocks\.(\d+)\.upsamplers\.0\.", r".up.\1.upsample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
)


def bfl_vae_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The autoencoder under the names of Black Forest Labs' files: the decoder's blocks are counted from the picture
    inwards, and projections of the attention are convolutions.
    """
    last = len(config["block_out_channels"]) - 1
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        bfl = re.sub(r"\.up_blocks\.(\d+)\.", lambda m: f".up_blocks.{last - int(m[1])}.", name)
        for pattern, replacement in _BFL_VAE:
            bfl = re.sub(pattern, replacement, bfl)
        if ".mid.attn_1." in bfl and len(tensor.shape) == 2:
            tensor = ReshapedTensor(bfl, (*tensor.shape, 1, 1), tensor.storage, tensor)
        renamed[bfl] = tensor
    return renamed


def write_vae(
    target: str | Path,
    sizes: Sizes = TINY,
    seed: int = 0,
    *,
    spelling: str = "diffusers",
    decoder: str = "full",
    dtype: str = "BF16",
) -> Path:
    """Writes the autoencoder with its ``full`` or its ``small`` decoder to ``target``: a folder as diffusers does, or
    one file for ``bfl``.
    """
    target, config = Path(target), dict(sizes.vae)
    if decoder == "small":
        config["decoder_block_out_channels"] = list(sizes.small_decoder)
    tensors = dense(vae_tensors(config, seed), dtype)
    if spelling == "bfl":
        write_file(target, bfl_vae_tensors(config, tensors))
        return target
    _write_json(target / "config.json", config)
    write_file(target / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    return target


# --- tokenizer and whole pipeline -----------------------------------------------------------------------------

# What Qwen3's template makes of plain messages.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINKING = ("<think>", "</think>")


def write_tokenizer(folder: str | Path, source: str | Path | None = None) -> int:
    """Writes a tokenizer into ``folder`` and returns how many tokens it has.

    It is a copy of the files in the folder ``source``, or else one whose tokens are single bytes and the special ones
    of Qwen3, with a chat template of the same outcome for plain messages.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        for file in sorted(Path(source).iterdir()):
            if file.suffix in (".json", ".txt", ".jinja"):
                shutil.copyfile(file, folder / file.name)
        return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in _THINKING])
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(256 + i): {"content": text, **flags, "special": text in _SPECIAL_TOKENS}
        for i, text in enumerate(_SPECIAL_TOKENS + _THINKING)
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size()


def write_pipeline(
    folder: str | Path,
    sizes: Sizes = TINY,
    seed: int = 0,
    *,
    decoder: str = "full",
    dtype: str = "BF16",
    tokenizer: str | Path | None = None,
) -> Path:
    """Writes the whole pipeline into ``folder`` as diffusers saves it; ``tokenizer`` is a folder to copy one from."""
    folder = Path(folder)
    tokens = write_tokenizer(folder / "tokenizer", tokenizer)
    if tokens > sizes.text_encoder["vocab_size"]:
        sizes = replace(sizes, text_encoder={**sizes.text_encoder, "vocab_size": tokens})
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_transformer(folder / "transformer", "diffusers", sizes, seed, dtype=dtype)
    write_text_encoder(folder / "text_encoder", "diffusers", sizes, seed, dtype=dtype)
    write_vae(folder / "vae", sizes, seed, decoder=decoder, dtype=dtype)
    index = {
        "_class_name": "Flux2KleinPipeline",
        "_diffusers_version": "0.37.0",
        "is_distilled": True,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    _write_json(folder / "model_index.json", index)
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- command line ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a FLUX.2-klein checkpoint of random weights.")
    parser.add_argument("part", choices=("pipeline", "transformer", "text-encoder", "vae", "tokenizer"))
    parser.add_argument("target", type=Path, help="a folder; a file for bfl, gguf and a transformer's mlx")
    parser.add_argument("--spelling", choices=SPELLINGS["transformer"], default="diffusers")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("BF16", "F32"), default="BF16", help="of dense weights")
    parser.add_argument("--decoder", choices=("full", "small"), default="full", help="of the VAE")
    parser.add_argument("--prefix", action="store_true", help=f"put {BFL_PREFIX} before BFL's names")
    parser.add_argument("--no-config", action="store_true", help="leave the text encoder's config.json out")
    parser.add_argument("--tokenizer", type=Path, help="a folder to copy the tokenizer from")
    options = parser.parse_args(arguments)
    if options.spelling not in SPELLINGS.get(options.part, ("diffusers",)):
        parser.error(f"{options.part} has no spelling {options.spelling}")
    target, sizes, seed, dtype = options.target, SIZES[options.size], options.seed, options.dtype
    target.parent.mkdir(parents=True, exist_ok=True)
    if options.part == "transformer":
        prefix = BFL_PREFIX if options.prefix else ""
        write_transformer(target, options.spelling, sizes, seed, dtype=dtype, prefix=prefix)
    elif options.part == "text-encoder":
        write_text_encoder(
            target,
            options.spelling,
            sizes,
            seed,
            dtype=dtype,
            config=not options.no_config,
            tokenizer=options.tokenizer,
        )
    elif options.part == "vae":
        write_vae(target, sizes, seed, spelling=options.spelling, decoder=options.decoder, dtype=dtype)
    elif options.part == "tokenizer":
        write_tokenizer(target, options.tokenizer)
    else:
        write_pipeline(target, sizes, seed, decoder=options.decoder, dtype=dtype, tokenizer=options.tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
