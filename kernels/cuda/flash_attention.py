"""Flash attention, forward, in Triton (https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691).

Legend: B batch, H query heads, S key and value heads (H is a multiple of S), L queries, T keys, D the head dim. All
four tensors lie ``[B, H or S, L or T, D]`` with any strides, that along D being 1. The scores are

    softcap * tanh(q @ k.T * scale / softcap) + mask         (without a softcap: q @ k.T * scale + mask)

Softmax and sums are float32. A query that may see no key gets zeros.
"""

# mypy: disable-error-code="no-untyped-def, misc"
# The dialect of Triton has no types that mypy could check.

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, softcap):
    """``softcap * tanh(scores / softcap)``, with no overflow at either end."""
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)))


@triton.jit
def visible_scores(
    scores, mask_at, mask_stride_l, mask_stride_t, queries, keys, L, T, offset,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Adds the mask to a tile of scores in powers of two, and makes -inf what is not to be seen.

    ``queries`` and ``keys`` are numbered along their axes of the tile, ``[n, 1]`` and ``[1, n]`` or the other way. MASK
    is 0 for none, 1 for booleans (true: seen), 2 for numbers to add. CHECKED looks at the end of T and at the
    diagonal, which whole blocks before them need not.
    """
    seen = tl.full(scores.shape, True, tl.int1)
    if CHECKED:
        seen = seen & (keys < T)
        if CAUSAL:
            seen = seen & (keys <= queries + offset)
    if MASK != 0:
        at = mask_at + queries.to(tl.int64) * mask_stride_l + keys.to(tl.int64) * mask_stride_t
        inside = (queries < L) & (keys < T)
        if MASK == 1:
            seen = seen & (tl.load(at, mask=inside, other=0) != 0)
        else:
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * _LOG2E
    if CHECKED or MASK == 1:
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend(
    total, largest, weight, q_LD, k_at, v_at, k_stride_t, v_stride_t,
    mask_at, mask_stride_l, mask_stride_t, queries, start, stop, L, T, scale, softcap, offset,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, CHECKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` to ``stop``: the weighted sum of values, and each query's largest score and sum of weights.

    Scores are in powers of two, which is what the hardware has. ``scale`` is positive.
    """
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, BLOCK_T)
    k_offsets = within[:, None] * k_stride_t + columns[None, :]
    v_offsets = within[:, None] * v_stride_t + columns[None, :]
    for first in range(start, stop, BLOCK_T):
        keys = first + within
        k_block = k_at + tl.cast(first, tl.int64) * k_stride_t
        v_block = v_at + tl.cast(first, tl.int64) * v_stride_t
        if CHECKED or D != WIDTH:
            inside = (within < T - first)[:, None] & (columns < D)[None, :]
            k_TD = tl.load(k_block + k_offsets, mask=inside, other=0.0)
        else:
            k_TD = tl.load(k_block + k_offsets)
        scores = tl.dot(q_LD, k_TD.T, input_precision=PRECISION)
        # Where nothing is added to products, their scale goes into the exponent: one instruction less for each.
        factor = 1.0
        if SOFTCAP:
            scores = capped(scores * scale, softcap) * _LOG2E
        elif MASK == 2:
            scores = scores * (scale * _LOG2E)
        else:
            factor = scale * _LOG2E
        scores = visible_scores(
            scores, mask_at, mask_stride_l, mask_stride_t, queries[:, None], keys[None, :], L, T, offset,
            MASK, CAUSAL, CHECKED,
        )  # fmt: skip
        if CHECKED or D != WIDTH:
            v_TD = tl.load(v_block + v_offsets, mask=inside, other=0.0)
        else:
            v_TD = tl.load(v_block + v_offsets)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        # Where nothing was seen yet: -inf minus -inf is no number.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores * factor - base[:, None])
        weight = weight * shrink + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v_TD.dtype), v_TD, total * shrink[:, None], input_precision=PRECISION)
        largest = new_largest
    return total, largest, weight


@triton.jit
def flash_attention_kernel(
    q, k, v, mask,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_s, k_stride_t, v_stride_b, v_stride_s, v_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_l, mask_stride_t, o_stride_b, o_stride_h, o_stride_l,
    H, S, L, T, scale, softcap, offset, o, logsumexp,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, LOGSUMEXP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The attention of BLOCK_L queries of one head; grid ``(ceil(L / BLOCK_L), H, B)``.

    CAUSAL: query i sees keys up to ``i + offset``. A mask's strides are 0 along axes that it has once; MASK is that of
    :func:`visible_scores`. WIDTH is the power of two, 16 or more, that holds D. With LOGSUMEXP, float32
    ``[B, H, L]`` gets the logarithm of each query's sum of exponentials (+inf where it saw no key), for the backward.
    """
    queries = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shared_head = head // (H // S)
    columns = tl.arange(0, WIDTH)
    rows = queries.to(tl.int64)
    inside = (queries < L)[:, None] & (columns < D)[None, :]
    q_at = q + batch * q_stride_b + head * q_stride_h
    q_LD = tl.load(q_at + rows[:, None] * q_stride_l + columns[None, :], mask=inside, other=0.0)
    k_at = k + batch * k_stride_b + shared_head * k_stride_s
    v_at = v + batch * v_stride_b + shared_head * v_stride_s
    mask_at = mask + batch * mask_stride_b + head * mask_stride_h
    # A positive scale keeps the order of products; one of 0 would make -inf no number.
    if scale < 0:
        q_LD = -q_LD
    scale = tl.maximum(tl.abs(tl.cast(scale, tl.float32)), 1e-30)

    # Blocks of keys that every query sees whole need no checks.
    stop = T
    whole = T // BLOCK_T * BLOCK_T
    if CAUSAL:
        first_query = tl.program_id(0) * BLOCK_L
        stop = tl.maximum(tl.minimum(T, first_query + BLOCK_L + offset), 0)
        whole = tl.minimum(whole, tl.maximum(first_query + offset + 1, 0) // BLOCK_T * BLOCK_T)
    total = tl.zeros((BLOCK_L, WIDTH), tl.float32)
    largest = tl.full((BLOCK_L,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_L,), tl.float32)
    total, largest, weight = _attend(
        total, largest, weight, q_LD, k_at, v_at, k_stride_t, v_stride_t,
        mask_at, mask_stride_l, mask_stride_t, queries, 0, whole, L, T, scale, softcap, offset,
        D, MASK, CAUSAL, SOFTCAP, False, PRECISION, BLOCK_T, WIDTH,
    )  # fmt: skip
    total, largest, weight = _attend(
        total, largest, weight, q_LD, k_at, v_at, k_stride_t, v_stride_t,
        mask_at, mask_stride_l, mask_stride_t, queries, whole, stop, L, T, scale, softcap, offset,
        D, MASK, CAUSAL, SOFTCAP, True, PRECISION, BLOCK_T, WIDTH,
    )  # fmt: skip
    attended = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    o_at = o + batch * o_stride_b + head * o_stride_h
    tl.store(o_at + rows[:, None] * o_stride_l + columns[None, :], attended.to(o.dtype.element_ty), mask=inside)
    if LOGSUMEXP:
        logarithm = tl.log2(tl.where(weight == 0.0, 1.0, weight))
        sums = tl.where(weight == 0.0, float("inf"), (largest + logarithm) / _LOG2E)
        tl.store(logsumexp + (batch * H + head) * L + queries, sums, mask=queries < L)
