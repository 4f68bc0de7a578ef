"""Flash attention, backward, in Triton; what it computes and the legend are in :mod:`.flash_attention`.

Three kernels: ``delta``, the dot product of each output with its gradient; then the gradients of keys and values, by
blocks of keys; then that of queries, by blocks of queries. Each output is written once, by one program, so that the
result is the same every time. The weights are computed again from the scores and ``logsumexp``.
"""

# mypy: disable-error-code="no-untyped-def, misc"
# The dialect of Triton has no types that mypy could check.

import triton
import triton.language as tl

from intaglio.kernels.cuda.flash_attention import capped, visible_scores

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_delta_kernel(
    o, o_stride_b, o_stride_h, o_stride_l, do, do_stride_b, do_stride_h, do_stride_l, H, L, delta,
    D: tl.constexpr, BLOCK_L: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``delta[b, h, l] = sum(o * do)`` in float32; grid ``(ceil(L / BLOCK_L), H, B)``."""
    queries = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    rows = queries.to(tl.int64)[:, None]
    inside = (queries < L)[:, None] & (columns < D)[None, :]
    o_at = o + batch * o_stride_b + head * o_stride_h + rows * o_stride_l + columns[None, :]
    do_at = do + batch * do_stride_b + head * do_stride_h + rows * do_stride_l + columns[None, :]
    products = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
    products *= tl.load(do_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + (batch * H + head) * L + queries, tl.sum(products, axis=1), mask=queries < L)


@triton.jit
def _weights_and_slopes(
    products, sums, mask_at, mask_stride_l, mask_stride_t, queries, keys, L, T, scale, softcap, offset,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The weights of softmax, and what the gradient of a score is multiplied with to be that of its product.

    ``sums`` is ``logsumexp`` in powers of two.
    """
    slopes = tl.full(products.shape, 1.0, tl.float32)
    if SOFTCAP:
        scores = capped(products * scale, softcap)
        slopes = 1.0 - (scores / softcap) * (scores / softcap)
        scores = scores * _LOG2E
    else:
        scores = products * (scale * _LOG2E)
    scores = visible_scores(
        scores, mask_at, mask_stride_l, mask_stride_t, queries, keys, L, T, offset, MASK, CAUSAL, True
    )
    return tl.exp2(scores - sums), slopes


@triton.jit
def attention_key_gradient_kernel(
    q, k, v, mask, do, logsumexp, delta,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_s, k_stride_t, v_stride_b, v_stride_s, v_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_l, mask_stride_t, do_stride_b, do_stride_h, do_stride_l,
    dk_stride_b, dk_stride_s, dk_stride_t, dv_stride_b, dv_stride_s, dv_stride_t,
    H, S, L, T, scale, softcap, offset, dk, dv,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of BLOCK_T keys of one head, over all query heads that share it; grid ``(ceil(T / BLOCK_T),
    S, B)``.
    """
    first_key = tl.program_id(0) * BLOCK_T
    keys = first_key + tl.arange(0, BLOCK_T)
    shared_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    rows = keys.to(tl.int64)[:, None]
    inside = (keys < T)[:, None] & (columns < D)[None, :]
    k_at = k + batch * k_stride_b + shared_head * k_stride_s + rows * k_stride_t + columns[None, :]
    v_at = v + batch * v_stride_b + shared_head * v_stride_s + rows * v_stride_t + columns[None, :]
    k_TD = tl.load(k_at, mask=inside, other=0.0)
    v_TD = tl.load(v_at, mask=inside, other=0.0)
    dk_TD = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    dv_TD = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    start = 0
    if CAUSAL:
        # The first query that sees a key of this block.
        start = tl.maximum(first_key - offset, 0) // BLOCK_L * BLOCK_L
    for within in range(H // S):
        head = shared_head * (H // S) + within
        q_head = q + batch * q_stride_b + head * q_stride_h
        do_head = do + batch * do_stride_b + head * do_stride_h
        mask_at = mask + batch * mask_stride_b + head * mask_stride_h
        row = (batch * H + head) * L
        for first in range(start, L, BLOCK_L):
            queries = first + tl.arange(0, BLOCK_L)
            there = (queries < L)[:, None] & (columns < D)[None, :]
            at = queries.to(tl.int64)[:, None]
            q_LD = tl.load(q_head + at * q_stride_l + columns[None, :], mask=there, other=0.0)
            do_LD = tl.load(do_head + at * do_stride_l + columns[None, :], mask=there, other=0.0)
            sums = tl.load(logsumexp + row + queries, mask=queries < L, other=float("inf")) * _LOG2E
            deltas = tl.load(delta + row + queries, mask=queries < L, other=0.0)
            products = tl.dot(k_TD, q_LD.T, input_precision=PRECISION)
            weights, slopes = _weights_and_slopes(
                products, sums[None, :], mask_at, mask_stride_l, mask_stride_t, queries[None, :], keys[:, None],
                L, T, scale, softcap, offset, MASK, CAUSAL, SOFTCAP,
            )  # fmt: skip
            dv_TD = tl.dot(weights.to(do_LD.dtype), do_LD, dv_TD, input_precision=PRECISION)
            gradient = tl.dot(v_TD, do_LD.T, input_precision=PRECISION)
            gradient = weights * (gradient - deltas[None, :]) * slopes
            dk_TD = tl.dot(gradient.to(q_LD.dtype), q_LD, dk_TD, input_precision=PRECISION)
    dk_at = dk + batch * dk_stride_b + shared_head * dk_stride_s + rows * dk_stride_t + columns[None, :]
    dv_at = dv + batch * dv_stride_b + shared_head * dv_stride_s + rows * dv_stride_t + columns[None, :]
    tl.store(dk_at, (dk_TD * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv_at, dv_TD.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def attention_query_gradient_kernel(
    q, k, v, mask, do, logsumexp, delta,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_s, k_stride_t, v_stride_b, v_stride_s, v_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_l, mask_stride_t, do_stride_b, do_stride_h, do_stride_l,
    dq_stride_b, dq_stride_h, dq_stride_l,
    H, S, L, T, scale, softcap, offset, dq,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``dq`` of BLOCK_L queries of one head; grid ``(ceil(L / BLOCK_L), H, B)``."""
    first_query = tl.program_id(0) * BLOCK_L
    queries = first_query + tl.arange(0, BLOCK_L)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shared_head = head // (H // S)
    columns = tl.arange(0, WIDTH)
    rows = queries.to(tl.int64)[:, None]
    inside = (queries < L)[:, None] & (columns < D)[None, :]
    q_at = q + batch * q_stride_b + head * q_stride_h + rows * q_stride_l + columns[None, :]
    do_at = do + batch * do_stride_b + head * do_stride_h + rows * do_stride_l + columns[None, :]
    q_LD = tl.load(q_at, mask=inside, other=0.0)
    do_LD = tl.load(do_at, mask=inside, other=0.0)
    row = (batch * H + head) * L
    sums = tl.load(logsumexp + row + queries, mask=queries < L, other=float("inf")) * _LOG2E
    deltas = tl.load(delta + row + queries, mask=queries < L, other=0.0)
    k_head = k + batch * k_stride_b + shared_head * k_stride_s
    v_head = v + batch * v_stride_b + shared_head * v_stride_s
    mask_at = mask + batch * mask_stride_b + head * mask_stride_h
    dq_LD = tl.zeros((BLOCK_L, WIDTH), tl.float32)
    stop = T
    if CAUSAL:
        stop = tl.maximum(tl.minimum(T, first_query + BLOCK_L + offset), 0)
    for first in range(0, stop, BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        there = (keys < T)[:, None] & (columns < D)[None, :]
        at = keys.to(tl.int64)[:, None]
        k_TD = tl.load(k_head + at * k_stride_t + columns[None, :], mask=there, other=0.0)
        v_TD = tl.load(v_head + at * v_stride_t + columns[None, :], mask=there, other=0.0)
        products = tl.dot(q_LD, k_TD.T, input_precision=PRECISION)
        weights, slopes = _weights_and_slopes(
            products, sums[:, None], mask_at, mask_stride_l, mask_stride_t, queries[:, None], keys[None, :],
            L, T, scale, softcap, offset, MASK, CAUSAL, SOFTCAP,
        )  # fmt: skip
        gradient = tl.dot(do_LD, v_TD.T, input_precision=PRECISION)
        gradient = weights * (gradient - deltas[:, None]) * slopes
        dq_LD = tl.dot(gradient.to(k_TD.dtype), k_TD, dq_LD, input_precision=PRECISION)
    dq_at = dq + batch * dq_stride_b + head * dq_stride_h + rows * dq_stride_l + columns[None, :]
    tl.store(dq_at, (dq_LD * scale).to(dq.dtype.element_ty), mask=inside)
