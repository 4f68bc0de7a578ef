"""How files spell a FLUX.2 transformer: the names of its tensors and where its configuration is found.

The architecture's own spelling is diffusers'. Black Forest Labs' single files (used by ComfyUI too, under a prefix)
fuse q, k and v and store the last modulation as shift, scale; mflux leaves two names shorter; GGUF files of the
architecture ``bonsai-image`` (oxibonsai) name quantized modules without ``.weight``. Sources:
https://github.com/black-forest-labs/flux2, https://github.com/filipstrand/mflux, https://github.com/cool-japan/oxibonsai
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.checkpoints.mlx import UnresolvedMlxTensor, with_width
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor, reorder_rows
from intaglio.exporters.config import ConfigKeys, shown

_PREFIX = "model.diffusion_model."
_MODULES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
    # mflux
    "time_guidance_embed.linear_1": "time_guidance_embed.timestep_embedder.linear_1",
    "time_guidance_embed.linear_2": "time_guidance_embed.timestep_embedder.linear_2",
}
# Inside a block: the kind of block as it is spelled, its module there, and diffusers' module.
_BLOCK_MODULES = {
    "double_blocks": {
        "img_attn.norm.query_norm": "attn.norm_q",
        "img_attn.norm.key_norm": "attn.norm_k",
        "txt_attn.norm.query_norm": "attn.norm_added_q",
        "txt_attn.norm.key_norm": "attn.norm_added_k",
        "img_attn.proj": "attn.to_out.0",
        "txt_attn.proj": "attn.to_add_out",
        "img_mlp.0": "ff.linear_in",
        "img_mlp.2": "ff.linear_out",
        "txt_mlp.0": "ff_context.linear_in",
        "txt_mlp.2": "ff_context.linear_out",
    },
    "single_blocks": {
        "linear1": "attn.to_qkv_mlp_proj",
        "linear2": "attn.to_out",
        "norm.query_norm": "attn.norm_q",
        "norm.key_norm": "attn.norm_k",
    },
    # mflux
    "transformer_blocks": {"attn.to_out": "attn.to_out.0"},
}
_BLOCKS = {"double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks"}
# Fused in one tensor of Black Forest Labs' files, a third of the rows each.
_FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_SWAPPED = {"final_layer.adaLN_modulation.1": "norm_out.linear"}

# GGUF key after ``bonsai-image.`` -> published key. The format requires all of them.
GGUF_KEYS = {
    "num_layers": "num_layers",
    "num_single_layers": "num_single_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_dim": "attention_head_dim",
    "joint_attention_dim": "joint_attention_dim",
    "in_channels": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "rope.theta": "rope_theta",
    "rope.axes_dims": "axes_dims_rope",
    "guidance_embeds": "guidance_embeds",
}
# What it has no key for, and every reader takes for granted.
GGUF_IMPLIED = {"patch_size": 1, "timestep_guidance_channels": 256, "eps": 1e-6}
# What no tensor tells is the same in all published models: the config.json of black-forest-labs/FLUX.2-dev and
# FLUX.2-klein-4B, and model.py of github.com/black-forest-labs/flux2.
UNTOLD = {"patch_size": 1, "axes_dims_rope": [32, 32, 32, 32], "rope_theta": 2000, "eps": 1e-6}
_WIDTHS = ("num_layers", "num_single_layers", "num_attention_heads", "joint_attention_dim", "guidance_embeds")
_SHARED = {
    "attention_head_dim": 128,
    "in_channels": 128,
    "out_channels": 128,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
}
_PUBLISHED = [
    dict(zip(_WIDTHS, widths, strict=True)) | _SHARED
    for widths in (
        (5, 20, 24, 7680, False),  # klein 4B
        (8, 24, 32, 12288, False),  # klein 9B
        (8, 48, 48, 15360, True),  # dev
    )
]


class _Widths(Protocol):
    @property
    def hidden_size(self) -> int: ...


class _Depths(Protocol):
    @property
    def num_layers(self) -> int: ...
    @property
    def num_single_layers(self) -> int: ...


def respell_flux2(tensors: Mapping[str, CheckpointTensor], config: _Widths) -> dict[str, CheckpointTensor]:
    """The tensors under diffusers' names, fused ones taken apart; names that no spelling has stay as they are.

    Raises WeightsError where a fused tensor does not come apart, or two become one.
    """
    result: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.removeprefix(_PREFIX).rpartition(".")
        block, inner = _in_block(stem)
        if block.startswith("double_blocks.") and inner in _FUSED:
            whole, thirds = _equal_parts(name, tensor, 3, config.hidden_size)
            modules = [f"{_block_name(block)}.{module}" for module in _FUSED[inner]]
            renamed = {f"{m}.{part}": reorder_rows(whole, rows) for m, rows in zip(modules, thirds, strict=True)}
        elif stem in _SWAPPED:
            whole, (shift, scale) = _equal_parts(name, tensor, 2, config.hidden_size)
            renamed = {f"{_SWAPPED[stem]}.{part}": reorder_rows(whole, np.concatenate([scale, shift]))}
        else:
            renamed = {_renamed(name): tensor}
        if twice := sorted(renamed.keys() & result.keys()):
            raise WeightsError(f"{name}: another tensor of the file is {twice[0]} as well; keep one spelling")
        result |= renamed
    return result


def flux2_modules(config: _Depths) -> Iterator[str]:
    """The names of modules in Black Forest Labs' spelling."""
    yield from (*_MODULES, *_SWAPPED)
    depths = {"double_blocks": config.num_layers, "single_blocks": config.num_single_layers}
    for kind, depth in depths.items():
        inner = [*_BLOCK_MODULES[kind], *(_FUSED if kind == "double_blocks" else ())]
        yield from (f"{kind}.{i}.{name}" for i in range(depth) for name in inner)


def _equal_parts(
    name: str, tensor: CheckpointTensor, count: int, width: int
) -> tuple[CheckpointTensor, list[np.ndarray]]:
    """The tensor, of which the input ``width`` settles how it is packed, and its rows in ``count`` equal parts."""
    rows = tensor.shape[0] if tensor.shape else 0
    if not rows or rows % count:
        raise WeightsError(f"{name}: is {list(tensor.shape)}, expected rows in {count} equal parts")
    return with_width(tensor, (rows, width)), np.split(np.arange(rows), count)


def _in_block(stem: str) -> tuple[str, str]:
    """``("double_blocks.3", "img_mlp.0")``; the first is empty outside blocks."""
    match = re.fullmatch(r"((?:double|single|transformer)_blocks\.\d+)\.(.+)", stem)
    return (match[1], match[2]) if match else ("", stem)


def _block_name(block: str) -> str:
    kind, _, index = block.partition(".")
    return f"{_BLOCKS.get(kind, kind)}.{index}"


def _renamed(name: str) -> str:
    """The name in diffusers' spelling of a tensor that is stored as diffusers stores it."""
    stem, _, part = name.removeprefix(_PREFIX).rpartition(".")
    block, inner = _in_block(stem)
    if not block:
        return f"{_MODULES[stem]}.{part}" if stem in _MODULES else name.removeprefix(_PREFIX)
    modules = _BLOCK_MODULES[block.partition(".")[0]]
    if inner not in modules:
        return name.removeprefix(_PREFIX)
    # The weight of a norm is named scale there; MLX's quantized modules have scales.
    return f"{_block_name(block)}.{modules[inner]}.{'weight' if part == 'scale' else part}"


def flux2_gguf_name(name: str) -> str | None:
    """The name of a GGUF tensor with the ``.weight`` that files leave out for quantized modules."""
    return None if name.endswith((".weight", ".scale", ".bias")) else f"{name}.weight"


def recognize_flux2(checkpoint: Checkpoint) -> ConfigKeys | None:
    """The configuration of a FLUX.2 file that comes without one, from the shapes of its tensors; None for others.

    What shapes do not tell is filled in for the published models only. Of any other geometry it is left out, so that
    whoever asks for it says what is missing.
    """
    tensors = {_renamed(name): tensor for name, tensor in checkpoint.tensors.items()}
    # The modulation shared by all blocks is FLUX.2's own.
    if not {"single_stream_modulation.linear.weight", "context_embedder.weight", "x_embedder.weight"} <= tensors.keys():
        return None
    values, assumed = _geometry(tensors), dict[str, Any]()
    for published in _PUBLISHED:
        if all(published[key] == value for key, value in values.items()) and {*_WIDTHS} <= {*values}:
            assumed = {k: v for k, v in {**published, **UNTOLD}.items() if k not in {**values, **checkpoint.config}}
            break
    source = f"{checkpoint.path} (without a config.json)"
    return ConfigKeys({**values, **assumed, **checkpoint.config}, source, assumed=assumed)


def _geometry(tensors: Mapping[str, CheckpointTensor]) -> dict[str, Any]:
    """The keys that shapes tell. Tensors that are missing, or packed so that their width is open, tell nothing."""

    def size(name: str, axis: int) -> int:
        tensor = tensors.get(f"{name}.weight")
        if tensor is None or len(tensor.shape) <= axis or (axis and isinstance(tensor, UnresolvedMlxTensor)):
            return 0
        return tensor.shape[axis]

    def count(pattern: str) -> int:
        return sum(re.fullmatch(pattern, name) is not None for name in tensors)

    width, head_dim = size("x_embedder", 0), size("transformer_blocks.0.attn.norm_q", 0)
    values: dict[str, Any] = {
        "num_layers": count(r"transformer_blocks\.\d+\.ff\.linear_in\.weight"),
        "num_single_layers": count(r"single_transformer_blocks\.\d+\.attn\.to_out\.weight"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim if head_dim else 0,
        "in_channels": size("x_embedder", 1),
        "out_channels": size("proj_out", 0),
        "joint_attention_dim": size("context_embedder", 1),
        "timestep_guidance_channels": size("time_guidance_embed.timestep_embedder.linear_1", 1),
        "mlp_ratio": _ratio(size("transformer_blocks.0.ff.linear_in", 0) // 2, width),
    }
    known = {key: value for key, value in values.items() if value}
    return known | {"guidance_embeds": bool(size("time_guidance_embed.guidance_embedder.linear_1", 0))}


def _ratio(inner: int, width: int) -> float:
    ratio = inner / width if width else 0.0
    # Multiplied and cut off to an integer again, it must give what it came from.
    return ratio if int(width * ratio) == inner else math.nextafter(ratio, math.inf)


def flux2_gguf_config(checkpoint: Checkpoint) -> ConfigKeys:
    """The configuration of a GGUF file of the architecture ``bonsai-image``, checked against its tensors.

    The format has ten keys; it means a patch size of 1 and an eps of 1e-6. Raises ConfigError.
    """
    source, metadata = str(checkpoint.path), checkpoint.metadata
    spelling = {published: f"bonsai-image.{key}" for key, published in GGUF_KEYS.items()}
    if missing := [key for key in spelling.values() if key not in metadata]:
        raise ConfigError(
            f"{source}: has no {', '.join(missing)}, which every bonsai-image file has; convert the model again"
        )
    values = {published: metadata[key] for published, key in spelling.items()}
    values |= {key: value.tolist() for key, value in values.items() if isinstance(value, np.ndarray)}
    names = {name: flux2_gguf_name(name) or name for name in checkpoint.tensors}
    told = _geometry({_renamed(names[name]): tensor for name, tensor in checkpoint.tensors.items()})
    keys = ConfigKeys({**values, **GGUF_IMPLIED, **told}, source, spelling)
    for key in [key for key in values if key in told]:
        # The ratio is stored as float32.
        if not isinstance(values[key], int | float) or not math.isclose(values[key], told[key], rel_tol=1e-6):
            raise keys.wrong(key, f"is {shown(values[key])}, but the tensors are those of {told[key]!r}")
    return keys
