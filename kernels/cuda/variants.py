"""The kernels with types, constants and tiles: what is compiled ahead of time, in tests and for plugins."""

from __future__ import annotations

import dataclasses
from typing import Any

from intaglio.kernels.cuda import flash_attention, flash_attention_backward, plugins, ternary
from intaglio.kernels.cuda.ahead_of_time import PORTABLE_SM, Variant
from intaglio.kernels.cuda.tiles import (
    AttentionTile,
    MatmulTile,
    attention_tile,
    key_gradient_tile,
    largest_depth,
    query_gradient_tile,
    ternary_int8_tile,
    ternary_tile,
    width_of,
)

_ITEMSIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
_MASK_TYPES = ("*u8", "*u8", "*fp32")


def precision_of(dtype: str) -> str:
    """How products of ``dtype`` (``fp16``, ``bf16``, ``fp32``) are computed; float32 on tensor cores, three times."""
    return "tf32x3" if dtype == "fp32" else "tf32"


def matmul_constants(tile: MatmulTile) -> dict[str, Any]:
    """A tile as the constants of the matmul kernels."""
    return {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "GROUP_M": tile.band}


def attention_constants(tile: AttentionTile, head_dim: int) -> dict[str, Any]:
    """A tile as the constants of the attention kernels."""
    return {"D": head_dim, "WIDTH": width_of(head_dim), "BLOCK_L": tile.queries, "BLOCK_T": tile.keys}


def ternary_variant(
    rows: int,
    outputs: int,
    inputs: int,
    group_size: int,
    dtype: str,
    scale_dtype: str,
    sm: int,
    tile: MatmulTile | None = None,
) -> Variant:
    """The product of at most ``rows`` rows, float32 sums of parts where the tile splits the inputs."""
    scale_in_tile = dtype == scale_dtype
    tile = tile or ternary_tile(rows, outputs, inputs, group_size, scale_in_tile, sm)
    types = _ternary_types(dtype, scale_dtype) | {"y": f"*{dtype}" if tile.splits == 1 else "*fp32"}
    constants = {
        "GROUP": group_size,
        "SCALE_IN_TILE": scale_in_tile,
        "SWAPPED": tile.swapped,
        "SPLITS": tile.splits,
        **matmul_constants(tile),
    }
    aligned = frozenset({"x", "codes", "scales", "y", "N", "K"})
    return Variant(ternary.ternary_matmul_kernel, types, constants, tile.warps, tile.stages, aligned)


def ternary_plugin_variant(
    tile: MatmulTile, outputs: int, inputs: int, group_size: int, dtype: str, scale_dtype: str
) -> Variant:
    """A kernel of the plugins for an ``[outputs, inputs]`` weight, of ``tile`` no deeper than a group."""
    tile = dataclasses.replace(tile, depth=largest_depth(group_size, tile.depth))
    variant = ternary_variant(tile.rows, outputs, inputs, group_size, dtype, scale_dtype, PORTABLE_SM, tile)
    # The compiler may be told of a multiple of 16 only where it is one.
    odd = {name for name, size in (("N", outputs), ("K", inputs)) if size % 16}
    return dataclasses.replace(variant, aligned=variant.aligned - odd)


def _ternary_types(dtype: str, scale_dtype: str) -> dict[str, str]:
    return {"x": f"*{dtype}", "codes": "*u8", "scales": f"*{scale_dtype}"} | dict.fromkeys(("M", "N", "K"), "i32")


def ternary_int8_variant(rows: int, group_size: int, dtype: str, scale_dtype: str) -> Variant:
    """The product of int8 activations, in which K and N are multiples of 16."""
    tile = ternary_int8_tile(rows, group_size)
    types = {"digits": "*i8", "steps": "*fp32", "sums": "*fp32", "codes": "*u8", "scales": f"*{scale_dtype}"}
    types |= {"y": f"*{dtype}"} | dict.fromkeys(("M", "N", "K"), "i32")
    aligned = frozenset({"digits", "steps", "sums", "codes", "scales", "y", "N", "K"})
    constants = {"GROUP": group_size, **matmul_constants(tile)}
    return Variant(ternary.ternary_int8_matmul_kernel, types, constants, tile.warps, tile.stages, aligned)


def attention_variant(
    head_dim: int, dtype: str, sm: int, mask: int = 0, causal: bool = False, softcap: bool = False
) -> Variant:
    """The forward kernel with ``logsumexp``, for rows that begin at multiples of 16 elements where the head dim
    is one; ``mask`` as the kernel says.
    """
    tile = attention_tile(head_dim, _ITEMSIZES[dtype], sm)
    return _attention(flash_attention.flash_attention_kernel, tile, head_dim, dtype, mask, causal, softcap)


def key_gradient_variant(
    head_dim: int, dtype: str, sm: int, mask: int = 0, causal: bool = False, softcap: bool = False
) -> Variant:
    """The backward kernel of keys and values."""
    tile = key_gradient_tile(head_dim, _ITEMSIZES[dtype], sm)
    kernel = flash_attention_backward.attention_key_gradient_kernel
    return _attention(kernel, tile, head_dim, dtype, mask, causal, softcap)


def query_gradient_variant(
    head_dim: int, dtype: str, mask: int = 0, causal: bool = False, softcap: bool = False
) -> Variant:
    """The backward kernel of queries."""
    tile = query_gradient_tile(head_dim, _ITEMSIZES[dtype])
    kernel = flash_attention_backward.attention_query_gradient_kernel
    return _attention(kernel, tile, head_dim, dtype, mask, causal, softcap)


def _attention(
    kernel: Any, tile: AttentionTile, head_dim: int, dtype: str, mask: int, causal: bool, softcap: bool
) -> Variant:
    names = list(kernel.arg_names)
    strides = [name for name in names if "_stride_" in name]
    types = dict.fromkeys([*strides, "H", "S", "L", "T", "offset"], "i32") | {"scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), f"*{dtype}")
    types |= {"mask": _MASK_TYPES[mask], "logsumexp": "*fp32", "delta": "*fp32"}
    constants = {
        "MASK": mask,
        "CAUSAL": causal,
        "SOFTCAP": softcap,
        "LOGSUMEXP": True,
        "PRECISION": precision_of(dtype),
        **attention_constants(tile, head_dim),
    }
    aligned = {name for name, kind in types.items() if kind.startswith("*")}
    if head_dim % 16 == 0:
        aligned |= {name for name in strides if not name.startswith("mask")}
    return Variant(
        kernel,
        {name: types[name] for name in names if name in types},
        {name: value for name, value in constants.items() if name in names},
        tile.warps,
        tile.stages,
        frozenset(aligned & set(names)),
    )


def attention_plugin_variant(
    head_dim: int, dtype: str, scale: float, softcap: float = 0.0, causal: bool = False, mask: int = 0
) -> Variant:
    """The plugin's kernel: without a mask (0), or with booleans (1) or numbers of the same dtype to add (2)."""
    tile = attention_tile(head_dim, _ITEMSIZES[dtype], PORTABLE_SM, portable=True)
    constants = {
        "SCALE": scale,
        "CAP": softcap,
        "PRECISION": precision_of(dtype),
        **attention_constants(tile, head_dim),
    }
    types = dict.fromkeys(("q", "k", "v", "o"), f"*{dtype}") | dict.fromkeys(("H", "S", "L", "T"), "i32")
    aligned = frozenset({"q", "k", "v", "o"})
    if mask == 0:
        kernel = plugins.attention_plugin_kernel
        return Variant(kernel, types, constants | {"CAUSAL": causal}, tile.warps, tile.stages, aligned)
    types |= {"mask": "*u8" if mask == 1 else f"*{dtype}"}
    types |= dict.fromkeys(("mask_stride_b", "mask_stride_h", "mask_stride_l"), "i32")
    kernel = plugins.masked_attention_plugin_kernel
    return Variant(kernel, types, constants | {"MASK": mask, "CAUSAL": causal}, tile.warps, tile.stages, aligned)
