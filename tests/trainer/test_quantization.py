"""Quantized linear layers: equal to the quantizer's reference to the bit, gradients straight through."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from intaglio.kernels.grouped_quant import dequantize
from intaglio.kernels.quantize import Quantization, quantize
from intaglio.trainer.quantization import (
    quantized_weight,
)

EVERY = [Quantization("int8"), *(Quantization(f, g) for f in ("ternary", "affine4") for g in (32, 64, 128))]
TERNARY = Quantization("ternary", 128)


def random_weight(seed: int, rows: int, width: int) -> torch.Tensor:
    """Magnitudes from far below the smallest scale to above the largest."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((rows, width // 32, 32), generator=generator)
    size = torch.exp2(torch.rand((rows, width // 32, 1), generator=generator) * 36 - 18)
    shift = torch.randn((rows, width // 32, 1), generator=generator)
    return ((normal + shift) * size).reshape(rows, width)


@pytest.mark.parametrize("quantization", EVERY, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_forward_weight_is_the_reference_to_the_bit(quantization: Quantization, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # More than one chunk, the last one short; and groups that are zero.
        weight = random_weight(5, 700, 384)
        weight[3] = 0
        weight[4, :130] = 0
        found = quantized_weight(weight, quantization).numpy()
    finally:
        torch.set_num_threads(before)
    rows = quantize(weight.numpy(), quantization)
    assert np.array_equal(found, dequantize(rows, quantization.layout(384)))
