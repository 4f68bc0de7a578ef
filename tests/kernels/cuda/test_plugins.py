"""The kernels with the arguments that TensorRT gives, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from intaglio.kernels.cuda import variants
from intaglio.trainer.ops.attention import flash_attention
from intaglio.trainer.ops.ternary import dequantize_ternary


@pytest.mark.parametrize("rows", [3, 70])
def test_ternary(rows: int) -> None:
    variant = variants.ternary_plugin_variant(rows, 40, 256, 64, "fp16", "fp32")
    x = torch.randn(rows, 256).half()
    codes = torch.randint(0, 3, (40, 64), dtype=torch.uint8) * 0b01010101  # four equal codes
    scales = torch.rand(40, 4)
    y = torch.full((rows, 40), math.nan, dtype=torch.float16)
    constants = variant.constants
    grid = -(-rows // constants["BLOCK_M"]) * -(-40 // constants["BLOCK_N"])
    packed = codes.view(torch.int8)
    variant.kernel[(grid,)](x, packed, scales, torch.zeros([]), rows, 40, 256, y, **constants)
    expected = x.double() @ dequantize_ternary(codes, scales, torch.float64).T
    assert (y.double() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("mask", [0, 1, 2])
def test_attention(mask: int) -> None:
    B, H, S, L, T, D = 2, 4, 2, 35, 50, 24
    variant = variants.attention_plugin_variant(D, "fp16", 0.3, softcap=2.0, causal=mask == 0, mask=mask)
    q, k, v = (torch.randn(B, heads, length, D).half() for heads, length in ((H, L), (S, T), (S, T)))
    o = torch.full((B, H, L, D), math.nan, dtype=torch.float16)
    grid = (-(-L // variant.constants["BLOCK_L"]), B * H)
    given = torch.rand(B, 1, L, T) > 0.3 if mask == 1 else torch.randn(B, 1, L, T)
    if mask == 0:
        variant.kernel[grid](q, k, v, H, S, L, T, o, **variant.constants)
    else:
        pointer = given.view(torch.uint8) if mask == 1 else given
        variant.kernel[grid](q, k, v, pointer, H, S, L, T, L * T, 0, o, **variant.constants)
    expected = flash_attention(
        q.double(), k.double(), v.double(), given if mask else None, mask == 0, 0.3, 2.0, causal_offset=T - L
    )
    assert (o.double() - expected).norm() <= 1e-3 * expected.norm()
