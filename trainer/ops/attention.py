"""Flash attention as a torch operator, with a backward; softcap and shared heads included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from intaglio.errors import InputError
from intaglio.trainer.ops.launch import TYPE_NAMES, architecture, blocks, on_its_device, require_triton

# Of a grid, behind the first one.
_LARGEST_AXIS = 65535


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    causal_offset: int = 0,
) -> torch.Tensor:
    """Attention ``[B, H, L, D]`` of ``query`` ``[B, H, L, D]``, ``key`` and ``value`` ``[B, S, T, D]``, S dividing H.

    As ``torch.nn.functional.scaled_dot_product_attention`` with ``enable_gqa``, and: scores are softcapped before the
    mask is added, where ``softcap`` is not 0; with ``is_causal`` query i sees keys up to ``i + causal_offset``, and a
    mask may be given too; a query that sees no key gets zeros. ``mask`` is boolean (true: seen) or of numbers to add,
    and broadcasts to ``[B, H, L, T]``; it has no gradient. D is at most 256, and on CUDA B and H are at most 65535.
    Raises InputError on what does not fit.
    """
    _check(query, key, value, mask)
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    attended: torch.Tensor = _attention(query, key, value, mask, is_causal, scale, softcap, causal_offset)[0]
    return attended


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    B, H, L, D = query.shape
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (B, D) or H % key.shape[1]:
        raise InputError(
            f"query is {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}; expected "
            "[B, H, L, D] and twice [B, S, T, D] with S dividing H"
        )
    if not 1 <= D <= 256 or len({query.dtype, key.dtype, value.dtype}) != 1:
        raise InputError(
            f"the head dim is {D} and the dtypes {query.dtype}, {key.dtype}, {value.dtype}; expected a head dim up to "
            "256 and one dtype"
        )
    if query.device.type == "cuda" and query.dtype not in TYPE_NAMES:
        raise InputError(f"query is {query.dtype}; the CUDA kernels take float16, bfloat16 and float32")
    if query.device.type == "cuda" and max(B, H) > _LARGEST_AXIS:
        raise InputError(f"query is {list(query.shape)}; the CUDA kernels take batches and heads up to {_LARGEST_AXIS}")
    scores = (B, H, L, key.shape[2])
    if mask is not None and not _broadcasts(mask.shape, scores):
        raise InputError(f"the mask is {list(mask.shape)}, expected what broadcasts to {list(scores)}")
    if mask is not None and mask.requires_grad:
        raise InputError("the mask asks for a gradient, which flash attention does not compute; detach it")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, own) for size, own in zip(shape[::-1], to[::-1], strict=False))


_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? mask"
_SETTINGS = "bool is_causal, float scale, float softcap, int offset"


@torch.library.custom_op(
    "intaglio::flash_attention", mutates_args=(), schema=f"({_ARGUMENTS}, {_SETTINGS}) -> (Tensor, Tensor)"
)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: the attention, and the logarithm of each query's sum of exponentials (+inf if it saw no key)."""
    q, k, v = (_wide(tensor) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // key.shape[1], 1) for tensor in (k, v))
    scores, _ = _scores(q, k, mask, is_causal, scale, softcap, offset)
    logsumexp = torch.logsumexp(scores, -1)
    logsumexp = torch.where(logsumexp == -math.inf, math.inf, logsumexp)
    weights = torch.exp(scores - logsumexp[..., None])
    return (weights @ v).to(query.dtype), logsumexp.float()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores, -inf where not seen, and the softcap's slope at each."""
    scores = q @ k.transpose(-1, -2) * scale
    slopes = torch.ones_like(scores)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slopes = softcap * bent, 1 - bent * bent
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        places = torch.arange(scores.shape[-2], device=q.device)[:, None] + offset
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=q.device) > places, -math.inf)
    return scores, slopes


@_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:3], dtype=torch.float32
    )


@torch.library.custom_op(
    "intaglio::flash_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}, Tensor attended, Tensor logsumexp, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    attended: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float,
    softcap: float,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of the gradients of query, key and value."""
    q, k, v, do, o = (_wide(tensor) for tensor in (query, key, value, gradient, attended))
    shared = q.shape[1] // key.shape[1]
    k, v = (tensor.repeat_interleave(shared, 1) for tensor in (k, v))
    scores, slopes = _scores(q, k, mask, is_causal, scale, softcap, offset)
    weights = torch.exp(scores - logsumexp[..., None].to(scores.dtype))
    delta = (do * o).sum(-1, keepdim=True)
    slope = weights * (do @ v.transpose(-1, -2) - delta) * slopes * scale
    dk, dv = (
        tensor.unflatten(1, (-1, shared)).sum(2)
        for tensor in (slope.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ do)
    )
    return (slope @ k).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, mask, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    gradients = _attention_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, None, None, None)


_attention.register_autograd(_gradients, setup_context=_remember)


def launch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float,
    offset: int,
    tile: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``flash_attention_kernel``; ``tile`` is an ``AttentionTile``, chosen if None."""
    require_triton()
    from intaglio.kernels.cuda.flash_attention import flash_attention_kernel
    from intaglio.kernels.cuda.tiles import attention_tile

    q, k, v = (_rows(tensor) for tensor in (query, key, value))
    B, H, L, D = q.shape
    tile = tile or attention_tile(D, q.element_size(), architecture(q.device)[0])
    o = torch.empty((B, H, L, D), dtype=q.dtype, device=q.device)
    logsumexp = torch.empty((B, H, L), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, logsumexp
    pointer, mask_strides, kind = _mask(mask, q)
    flash_attention_kernel[(blocks(L, tile.queries), H, B)](
        q, k, v, pointer, *_strides(q, k, v), *mask_strides, *_strides(o),
        H, k.shape[1], L, k.shape[2], scale, softcap, offset, o, logsumexp,
        LOGSUMEXP=True, **_constants(tile, q, kind, is_causal, softcap),
    )  # fmt: skip
    return o, logsumexp


def launch_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    attended: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float,
    softcap: float,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the three kernels of the backward."""
    require_triton()
    from intaglio.kernels.cuda import flash_attention_backward as kernels
    from intaglio.kernels.cuda.tiles import key_gradient_tile, query_gradient_tile, width_of

    do, q, k, v, o = (_rows(tensor) for tensor in (gradient, query, key, value, attended))
    B, H, L, D = q.shape
    S, T = k.shape[1:3]
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=q.device) for tensor in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty((B, H, L), dtype=torch.float32, device=q.device)
    kernels.attention_delta_kernel[(blocks(L, 32), H, B)](
        o, *_strides(o), do, *_strides(do), H, L, delta, D=D, BLOCK_L=32, WIDTH=width_of(D)
    )
    pointer, mask_strides, kind = _mask(mask, q)
    inputs = (q, k, v, pointer, do, logsumexp, delta, *_strides(q, k, v), *mask_strides, *_strides(do))
    sizes = (H, S, L, T, scale, softcap, offset)
    tile = key_gradient_tile(D, q.element_size(), architecture(q.device)[0])
    kernels.attention_key_gradient_kernel[(blocks(T, tile.keys), S, B)](
        *inputs, *_strides(dk, dv), *sizes, dk, dv, **_constants(tile, q, kind, is_causal, softcap)
    )
    tile = query_gradient_tile(D, q.element_size())
    kernels.attention_query_gradient_kernel[(blocks(L, tile.queries), H, B)](
        *inputs, *_strides(dq), *sizes, dq, **_constants(tile, q, kind, is_causal, softcap)
    )
    return dq, dk, dv


_attention.register_kernel("cuda")(on_its_device(launch_attention))
_attention_backward.register_kernel("cuda")(on_its_device(launch_backward))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _mask(mask: torch.Tensor | None, q: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """What the kernels take for a mask, its strides, and which kind it is."""
    if mask is None:
        return q, (0, 0, 0, 0), 0
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), mask.stride(), 1
    return mask, mask.stride(), 2


def _constants(tile: Any, q: torch.Tensor, mask: int, is_causal: bool, softcap: float) -> dict[str, Any]:
    from intaglio.kernels.cuda.variants import attention_constants, precision_of

    return {
        "MASK": mask,
        "CAUSAL": is_causal,
        "SOFTCAP": softcap != 0,
        "PRECISION": precision_of(TYPE_NAMES[q.dtype]),
        **attention_constants(tile, q.shape[-1]),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
