"""The product with a ternary weight as a torch operator: 2-bit codes on the GPU, with a gradient for ``x``."""

from __future__ import annotations

from typing import Any

import torch

from intaglio.errors import InputError
from intaglio.trainer.ops.launch import architecture, blocks, on_its_device, require_triton


def ternary_matmul(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, int8: bool = False) -> torch.Tensor:
    """``x`` ``[..., in]`` times the transposed ternary weight, ``[..., out]`` in the dtype of ``x``.

    ``codes`` uint8 ``[out, in / 4]`` and ``scales`` ``[out, in / group]`` are those of
    :mod:`intaglio.kernels.grouped_quant`, with zero point 1. With ``int8``, activations are rounded to int8, one step a
    row and group. ``x`` has a gradient (of the product without that rounding). On CUDA ``x`` is float16 or bfloat16 and
    groups are multiples of 16 (of 32 with ``int8``). Raises InputError where shapes or dtypes do not fit.
    """
    _check(x, codes, scales)
    result: torch.Tensor = _ternary_matmul(x, codes, scales, int8)
    return result


def dequantize_ternary(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight ``[out, in]``, computed in float32 and rounded to ``dtype``."""
    result: torch.Tensor = _dequantize(codes, scales, dtype)
    return result


def _check(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    if codes.dtype != torch.uint8 or codes.ndim != 2 or scales.ndim != 2 or len(codes) != len(scales):
        raise InputError(
            f"codes are {codes.dtype} {list(codes.shape)} and scales {list(scales.shape)}; expected uint8 "
            "[out, in / 4] and [out, in / group]"
        )
    inputs = codes.shape[1] * 4
    if x.shape[-1] != inputs or scales.shape[1] == 0 or inputs % scales.shape[1]:
        raise InputError(
            f"x has {x.shape[-1]} inputs, codes hold {inputs} and scales {scales.shape[1]} groups; expected as many "
            "inputs as codes, and groups of one size"
        )
    if x.device.type == "cuda" and x.dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"x is {x.dtype}; the CUDA kernels take float16 and bfloat16: cast it")


@torch.library.custom_op(
    "intaglio::ternary_matmul",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scales, bool int8) -> Tensor",
)
def _ternary_matmul(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, int8: bool) -> torch.Tensor:
    """The reference: float32, or float64 where ``x`` is."""
    computed = torch.promote_types(x.dtype, torch.float32)
    values = x.to(computed)
    if int8:
        values = _rounded_to_int8(values, scales.shape[1])
    return (values @ _weight(codes, scales).to(computed).T).to(x.dtype)


def _rounded_to_int8(x: torch.Tensor, groups: int) -> torch.Tensor:
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    largest = grouped.abs().amax(-1, keepdim=True)
    step = torch.where(largest.isfinite(), largest / 127, torch.nan)
    scaled = grouped / torch.where(step > 0, step, 1)
    digits = scaled.sign() * (scaled.abs() + 0.5).floor()
    return (digits * step).reshape(x.shape)


def _weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    signs = (codes[:, :, None] >> shifts & 3).float().reshape(*scales.shape, -1) - 1
    return (signs * scales.float()[:, :, None]).reshape(len(codes), -1)


@_ternary_matmul.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, int8: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@_ternary_matmul.register_kernel("cuda")
@on_its_device
def _on_cuda(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, int8: bool) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    launch = launch_int8_matmul if int8 else launch_matmul
    return launch(rows, codes.contiguous(), scales.contiguous()).reshape(*x.shape[:-1], codes.shape[0])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    codes, scales = ctx.saved_tensors
    return gradient @ _dequantize(codes, scales, gradient.dtype), None, None, None


_ternary_matmul.register_autograd(_gradient, setup_context=_remember)


@torch.library.custom_op(
    "intaglio::dequantize_ternary",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
)
def _dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _weight(codes, scales).to(dtype)


@_dequantize.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 4), dtype=dtype)


@_dequantize.register_kernel("cuda")
@on_its_device
def _dequantize_on_cuda(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return launch_dequantize(codes.contiguous(), scales.contiguous(), dtype)


def launch_matmul(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tile: Any = None) -> torch.Tensor:
    """Runs ``ternary_matmul_kernel`` on ``x`` ``[rows, in]``; ``tile`` is a ``MatmulTile``, chosen if None."""
    require_triton()
    from intaglio.kernels.cuda import ternary
    from intaglio.kernels.cuda.tiles import ternary_tile
    from intaglio.kernels.cuda.variants import matmul_constants

    (M, K), N, group_size = x.shape, len(codes), x.shape[1] // scales.shape[1]
    scale_in_tile = x.dtype == scales.dtype
    tile = tile or ternary_tile(M, N, K, group_size, scale_in_tile, *architecture(x.device))
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    split = tile.splits > 1
    parts = torch.empty((tile.splits, M, N), dtype=torch.float32, device=x.device) if split else y
    ternary.ternary_matmul_kernel[(blocks(M, tile.rows) * blocks(N, tile.columns), tile.splits)](
        x, codes, scales, M, N, K, parts,
        GROUP=group_size, SCALE_IN_TILE=scale_in_tile, SWAPPED=tile.swapped, SPLITS=tile.splits,
        **matmul_constants(tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split:
        ternary.sum_splits_kernel[(blocks(M * N, 512),)](parts, M * N, y, SPLITS=tile.splits, BLOCK=512)
    return y


def launch_int8_matmul(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tile: Any = None) -> torch.Tensor:
    """Rounds ``x`` ``[rows, in]`` to int8 and runs ``ternary_int8_matmul_kernel``."""
    require_triton()
    from intaglio.kernels.cuda import ternary
    from intaglio.kernels.cuda.tiles import ternary_int8_tile
    from intaglio.kernels.cuda.variants import matmul_constants

    (M, K), N, group_size = x.shape, len(codes), x.shape[1] // scales.shape[1]
    tile = tile or ternary_int8_tile(M, group_size)
    digits = torch.empty((M, K), dtype=torch.int8, device=x.device)
    steps, sums = (torch.empty((M, K // group_size), dtype=torch.float32, device=x.device) for _ in range(2))
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    width = 1 << (group_size - 1).bit_length()
    height = max(1, 2048 // width)
    ternary.quantize_rows_kernel[(blocks(M, height), K // group_size)](
        x, M, K, digits, steps, sums, GROUP=group_size, WIDTH=width, BLOCK_M=height
    )
    ternary.ternary_int8_matmul_kernel[(blocks(M, tile.rows) * blocks(N, tile.columns),)](
        digits, steps, sums, codes, scales, M, N, K, y,
        GROUP=group_size, **matmul_constants(tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def launch_dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Runs ``dequantize_ternary_kernel``; ``dtype`` is float16 or bfloat16."""
    require_triton()
    from intaglio.kernels.cuda.ternary import dequantize_ternary_kernel
    from intaglio.kernels.cuda.tiles import largest_depth

    N, K = len(codes), codes.shape[1] * 4
    group_size = K // scales.shape[1]
    w = torch.empty((N, K), dtype=dtype, device=codes.device)
    if w.numel() == 0:
        return w
    depth = largest_depth(group_size, 128)
    dequantize_ternary_kernel[(blocks(N, 32), K // depth)](
        codes, scales, N, K, w, GROUP=group_size, BLOCK_N=32, BLOCK_K=depth
    )
    return w
