"""Triton kernels of the ternary ``GroupedQuantMatMul``: 2-bit codes with zero point 1 and no offsets.

Legend: M rows of ``x``, N outputs, K inputs, G inputs of a group. ``x`` is ``[M, K]`` row-major float16 or bfloat16,
``codes`` uint8 ``[N, K / 4]`` and ``scales`` ``[N, K / G]`` as :mod:`intaglio.kernels.grouped_quant` says, ``y`` is
``[M, N]``. Products are accumulated in float32; on integers in int32 within a group.

A byte holds four neighbouring inputs. Codes become numbers in registers, two at a time, and are joined in the order of
``x``, so that neither side is rearranged in memory.
"""

# mypy: disable-error-code="no-untyped-def, misc"
# The dialect of Triton has no types that mypy could check.

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The tile of a program: programs that run together share columns of codes and a few bands of rows."""
    bands = tl.cdiv(rows, BLOCK_M)
    width = GROUP_M * tl.cdiv(columns, BLOCK_N)
    first = program // width * GROUP_M
    height = tl.minimum(bands - first, GROUP_M)
    within = program % width
    return first + within % height, within // height


@triton.jit
def _halves(word):
    """The lower and the upper 16 bits of 32."""
    return word.to(tl.uint16), (word >> 16).to(tl.uint16)


@triton.jit
def _signs_of_tile(words, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Words of eight codes ``[BLOCK_N, BLOCK_K / 8]``, uint16, to -1, 0 and 1 ``[BLOCK_N, BLOCK_K]``.

    Two neighbouring codes stay in one register all the way, as the two halves that matrix instructions want.
    """
    # A number with the code as its low bits: 1024 + code in float16, 128 + code in bfloat16 (7 bits of mantissa).
    MAGIC: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
    ONE: tl.constexpr = 129.0 if tl.bfloat16 == DTYPE else 1025.0
    # The word in the lower half, and once more in the upper, one code further.
    twice = words.to(tl.uint32)
    twice = twice | ((twice << 14) & 0xFFFF0000)
    w0, w1 = _halves((twice & 0x00030003) | MAGIC)
    w2, w3 = _halves(((twice >> 4) & 0x00030003) | MAGIC)
    w4, w5 = _halves(((twice >> 8) & 0x00030003) | MAGIC)
    w6, w7 = _halves(((twice >> 12) & 0x00030003) | MAGIC)
    # One tree of joins of 16 bits: in 32, Triton lays the operands out for slower loads.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    numbers = tl.join(even, odd).reshape(BLOCK_N, BLOCK_K).to(DTYPE, bitcast=True)
    return numbers - tl.full((), ONE, DTYPE)


@triton.jit
def ternary_matmul_kernel(
    x,
    codes,
    scales,
    M,
    N,
    K,
    y,
    GROUP: tl.constexpr,
    SCALE_IN_TILE: tl.constexpr,
    SWAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``y = x @ w.T``; grid ``(tiles, SPLITS)``. Where K is split, ``y`` is float32 ``[SPLITS, M, N]``, to be summed.

    SCALE_IN_TILE multiplies the weights before the product, which is exact where scales have the dtype of ``x``;
    otherwise each product is scaled in float32, and BLOCK_K divides GROUP. SWAPPED computes ``w @ x.T``, with the
    decoded weights as the operand that tensor cores read from registers.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row_tile, column_tile = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the edge the last row is read again, so that whole tiles are loaded without a mask.
    x_rows = tl.minimum(rows, M - 1).to(tl.int64)
    w_rows = tl.minimum(columns, N - 1).to(tl.int64)
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + x_rows[:, None] * K + inputs[None, :]
    words_at = codes.to(tl.pointer_type(tl.uint16)) + w_rows[:, None] * (K // 8) + tl.arange(0, BLOCK_K // 8)[None, :]
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    scales_at = scales + w_rows * (K // GROUP)

    depth = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    start = tl.program_id(1) * depth
    stop = tl.minimum(start + depth, K)
    if SWAPPED:
        accumulated = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        accumulated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        if GROUPS > 1:
            # K need not be a multiple of several groups.
            x_MK = tl.load(x_at + k, mask=(inputs < K - k)[None, :], other=0.0)
            packed = tl.load(words_at + k // 8, mask=(tl.arange(0, BLOCK_K // 8) < (K - k) // 8)[None, :], other=0)
        else:
            x_MK = tl.load(x_at + k)
            packed = tl.load(words_at + k // 8)
        w_NK = _signs_of_tile(packed, BLOCK_N, BLOCK_K, DTYPE)
        if GROUPS > 1:
            groups = k // GROUP + tl.arange(0, GROUPS)
            in_row = groups < K // GROUP
            scale = tl.load(scales_at[:, None] + groups[None, :], mask=in_row[None, :], other=0.0).to(DTYPE)
            w_NK = (w_NK.reshape(BLOCK_N, GROUPS, GROUP) * scale[:, :, None]).reshape(BLOCK_N, BLOCK_K)
        else:
            scale = tl.load(scales_at + k // GROUP)
            if SCALE_IN_TILE:
                w_NK = w_NK * scale.to(DTYPE)[:, None]
        if SCALE_IN_TILE or GROUPS > 1:
            if SWAPPED:
                accumulated = tl.dot(w_NK, x_MK.T, accumulated)
            else:
                accumulated = tl.dot(x_MK, w_NK.T, accumulated)
        else:
            if SWAPPED:
                accumulated += tl.dot(w_NK, x_MK.T) * scale.to(tl.float32)[:, None]
            else:
                accumulated += tl.dot(x_MK, w_NK.T) * scale.to(tl.float32)[None, :]
    if SWAPPED:
        accumulated = accumulated.T
    at = tl.program_id(1).to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y + at, accumulated.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_splits_kernel(parts, size, y, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """``y[i] = sum(parts[:, i])``, in float32 and always in the same order; ``parts`` ``[SPLITS, size]``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, mask=inside, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_ternary_kernel(
    codes, scales, N, K, w, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The dense weight ``w`` ``[N, K]``, for a product by somebody else's matmul; grid ``(N tiles, K tiles)``."""
    DTYPE: tl.constexpr = w.dtype.element_ty
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K
    in_rows = (rows < N)[:, None]
    words = codes.to(tl.pointer_type(tl.uint16)) + rows[:, None] * (K // 8) + k // 8
    packed = tl.load(words + tl.arange(0, BLOCK_K // 8)[None, :], mask=in_rows, other=0)
    signs = _signs_of_tile(packed, BLOCK_N, BLOCK_K, DTYPE)
    scale = tl.load(scales + rows * (K // GROUP) + k // GROUP, mask=rows < N, other=0.0)
    weight = signs.to(tl.float32) * scale.to(tl.float32)[:, None]
    tl.store(w + rows[:, None] * K + k + tl.arange(0, BLOCK_K)[None, :], weight.to(DTYPE), mask=in_rows)


@triton.jit
def quantize_rows_kernel(x, M, K, digits, steps, sums, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """``x`` to int8: ``digits`` ``[M, K]``, ``steps`` and ``sums`` float32 ``[M, K / GROUP]``; grid (M tiles, groups).

    ``steps`` is the largest magnitude of a group over 127, and ``sums`` what its digits add up to. WIDTH is the power
    of two that holds GROUP. A group with a value that is not finite has the step NaN.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    group = tl.program_id(1)
    within = tl.arange(0, WIDTH)
    inside = (rows < M)[:, None] & (within < GROUP)[None, :]
    at = rows[:, None] * K + group * GROUP + within[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    finite = tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), axis=1) == 0
    inverse = tl.where(finite & (largest > 0), 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    scaled = tl.where(finite[:, None], values, 0.0) * inverse[:, None]
    # Halves go away from zero, so that x and -x have opposite digits.
    rounded = tl.where(scaled < 0, -tl.floor(0.5 - scaled), tl.floor(scaled + 0.5)).to(tl.int32)
    step = tl.where(finite, largest / 127.0, float("nan"))
    tl.store(digits + at, rounded.to(tl.int8), mask=inside)
    at_group = rows * (K // GROUP) + group
    tl.store(steps + at_group, step, mask=rows < M)
    tl.store(sums + at_group, tl.sum(rounded, axis=1).to(tl.float32), mask=rows < M)


@triton.jit
def ternary_int8_matmul_kernel(
    digits,
    steps,
    sums,
    codes,
    scales,
    M,
    N,
    K,
    y,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The product of what :func:`quantize_rows_kernel` wrote. BLOCK_K divides GROUP and is at least 32.

    The codes are multiplied as they are, and ``sums`` taken off: no subtraction for each weight.
    """
    row_tile, column_tile = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = tl.minimum(rows, M - 1).to(tl.int64)
    w_rows = tl.minimum(columns, N - 1).to(tl.int64)
    digits_at = digits + x_rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    codes_at = codes + w_rows[:, None] * (K // 4) + tl.arange(0, BLOCK_K // 4)[None, :]
    x_groups = x_rows * (K // GROUP)
    w_groups = w_rows * (K // GROUP)
    accumulated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(K // GROUP):
        dots = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for part in tl.static_range(GROUP // BLOCK_K):
            k = group * GROUP + part * BLOCK_K
            x_MK = tl.load(digits_at + k)
            packed = tl.load(codes_at + k // 4)
            even = tl.join(packed & 3, (packed >> 4) & 3)
            odd = tl.join((packed >> 2) & 3, packed >> 6)
            w_NK = tl.join(even, odd).reshape(BLOCK_N, BLOCK_K).to(tl.int8, bitcast=True)
            dots = tl.dot(x_MK, w_NK.T, dots, out_dtype=tl.int32)
        taken = dots.to(tl.float32) - tl.load(sums + x_groups + group)[:, None]
        step = tl.load(steps + x_groups + group)
        scale = tl.load(scales + w_groups + group).to(tl.float32)
        accumulated += taken * step[:, None] * scale[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y + at, accumulated.to(y.dtype.element_ty), mask=inside)
