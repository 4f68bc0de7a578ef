"""Attention as TensorRT launches it from a plugin: inputs, then int32 numbers, then outputs; no other arguments.

Tensors are contiguous and all numbers that are not int32 are constants. ``ternary_matmul_kernel`` takes its arguments
in that order already.
"""

# mypy: disable-error-code="no-untyped-def, misc"
# The dialect of Triton has no types that mypy could check.

import triton
import triton.language as tl

from intaglio.kernels.cuda.flash_attention import flash_attention_kernel


@triton.jit
def attention_plugin_kernel(
    q, k, v, H, S, L, T, o,
    D: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of contiguous ``[B, H, L, D]``, ``[B, S, T, D]`` twice, without a mask; CAP is 0 for no softcap.

    CAUSAL: query i sees keys 0 to i, as ONNX has it. Grid ``(ceil(L / BLOCK_L), H, B)``.
    """
    flash_attention_kernel(
        q, k, v, q, H * L * D, L * D, D, S * T * D, T * D, D, S * T * D, T * D, D, 0, 0, 0, 0, H * L * D, L * D, D,
        H, S, L, T, SCALE, CAP, 0, o, o, D, 0, CAUSAL, CAP > 0.0, False, PRECISION, BLOCK_L, BLOCK_T, WIDTH,
    )  # fmt: skip


@triton.jit
def masked_attention_plugin_kernel(
    q, k, v, mask, H, S, L, T, mask_stride_b, mask_stride_h, mask_stride_l, o,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As :func:`attention_plugin_kernel`, with a mask ``[B or 1, H or 1, L or 1, T]`` whose strides are 0 along a 1."""
    flash_attention_kernel(
        q, k, v, mask, H * L * D, L * D, D, S * T * D, T * D, D, S * T * D, T * D, D,
        mask_stride_b, mask_stride_h, mask_stride_l, 1, H * L * D, L * D, D,
        H, S, L, T, SCALE, CAP, 0, o, o, D, MASK, CAUSAL, CAP > 0.0, False, PRECISION, BLOCK_L, BLOCK_T, WIDTH,
    )  # fmt: skip
