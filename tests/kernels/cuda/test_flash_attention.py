"""Flash attention and its gradients in Triton's interpreter, against float64 and torch's own differentiation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from intaglio.errors import InputError
from intaglio.kernels.cuda import tiles
from intaglio.trainer.ops.attention import launch_attention, launch_backward

BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    S: int
    L: int
    T: int
    D: int
    mask: str = ""
    is_causal: bool = False
    offset: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    dtype: torch.dtype = torch.float16


CASES = [
    Case(2, 4, 2, 45, 37, 40),
    Case(1, 2, 2, 1, 70, 64),
    Case(1, 2, 1, 70, 129, 128, scale=0.3),
    Case(1, 4, 1, 70, 70, 80, is_causal=True),
    Case(1, 1, 1, 20, 93, 64, is_causal=True, offset=73),
    Case(1, 2, 2, 70, 21, 33, is_causal=True, offset=-49),
    Case(2, 2, 1, 33, 50, 72, mask="bool"),
    Case(2, 2, 1, 33, 50, 7, mask="keys"),
    Case(1, 4, 2, 33, 50, 72, mask="numbers", softcap=2.0),
    Case(1, 2, 1, 66, 66, 96, mask="bool", is_causal=True, softcap=0.7),
    Case(1, 2, 2, 20, 36, 256, dtype=torch.bfloat16, is_causal=True, offset=16),
    Case(1, 2, 1, 33, 50, 64, mask="numbers", dtype=torch.bfloat16),
    Case(1, 2, 2, 33, 50, 32, mask="bool", is_causal=True, softcap=2.0, dtype=torch.float32),
    Case(1, 2, 1, 19, 35, 160, mask="numbers", dtype=torch.float32),
    Case(1, 2, 1, 17, 19, 1, is_causal=True),
    Case(1, 2, 1, 5, 40, 255, softcap=3.0),
    Case(1, 2, 2, 18, 20, 129, mask="bool", dtype=torch.float32),
    Case(1, 2, 1, 33, 35, 16, scale=-0.7),
    Case(1, 2, 1, 33, 35, 16, mask="numbers", scale=-0.7),
]


def inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Query, key, value and the output's gradient, which lie as ``[B, L, H, D]``, and the mask."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(case.B, length, heads, case.D, generator=generator).to(case.dtype).transpose(1, 2)
        for heads, length in ((case.H, case.L), (case.S, case.T), (case.S, case.T), (case.H, case.L))
    ]
    if case.mask == "bool":
        mask: torch.Tensor | None = torch.rand(case.B, 1, case.L, case.T, generator=generator) > 0.3
    elif case.mask == "keys":
        mask = torch.rand(case.B, 1, 1, case.T, generator=generator) > 0.3
    elif case.mask == "numbers":
        mask = torch.randn(1, case.H, case.L, case.T, generator=generator)
    else:
        return tensors, None
    return tensors, mask.expand(case.B, case.H, case.L, case.T)


def attended(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """By the definition, with a loop over heads, in the dtype of the inputs."""
    outputs = []
    for head in range(case.H):
        shared = head * case.S // case.H
        scores = q[:, head] @ k[:, shared].mT * (case.scale or 1 / math.sqrt(case.D))
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        seen = torch.ones(case.L, case.T, dtype=torch.bool)
        if case.is_causal:
            seen = seen.tril(case.offset)
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask[:, head]
        elif mask is not None:
            scores = scores + mask[:, head]
        weights = torch.softmax(scores.masked_fill(~seen, -1e30), -1) * seen.any(-1, keepdim=True)
        outputs.append(weights @ v[:, shared])
    return torch.stack(outputs, 1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def settings(case: Case) -> tuple[bool, float, float, int]:
    return case.is_causal, case.scale or 1 / math.sqrt(case.D), case.softcap, case.offset


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case) -> None:
    (q, k, v, do), mask = inputs(case)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = attended(case, *leaves, mask)
    expected.backward(do.double())

    o, logsumexp = launch_attention(q, k, v, mask, *settings(case))
    assert o.dtype == case.dtype
    assert o.isfinite().all()
    assert error(o, expected.detach()) <= BOUNDS[case.dtype]
    gradients = launch_backward(do, q, k, v, mask, o, logsumexp, *settings(case))
    for found, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert found.isfinite().all()
        assert error(found, leaf.grad) <= 2 * BOUNDS[case.dtype]


def test_queries_that_see_nothing_get_zeros() -> None:
    case = Case(1, 2, 2, 40, 21, 32, is_causal=True, offset=-19)
    (q, k, v, do), _ = inputs(case)
    o, logsumexp = launch_attention(q, k, v, None, *settings(case))
    assert (o[:, :, :19] == 0).all()
    assert (o[:, :, 19:] != 0).any(-1).all()
    assert (logsumexp[:, :, :19] == math.inf).all()
    dq, _, _ = launch_backward(do, q, k, v, None, o, logsumexp, *settings(case))
    assert (dq[:, :, :19] == 0).all()


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_rows_that_are_wholly_masked_get_zeros(kind: torch.dtype) -> None:
    case = Case(1, 2, 1, 20, 37, 24)
    (q, k, v, do), _ = inputs(case)
    seen = torch.ones(20, 37, dtype=torch.bool)
    seen[3], seen[11:15] = False, False
    mask = seen if kind == torch.bool else torch.zeros(20, 37).masked_fill(~seen, -math.inf)
    wide = mask.expand(1, 2, 20, 37)
    o, logsumexp = launch_attention(q, k, v, wide, *settings(case))
    expected = attended(case, q.double(), k.double(), v.double(), seen.expand(1, 2, 20, 37))
    assert (o[:, :, [3, 11, 14]] == 0).all()
    assert error(o, expected) <= BOUNDS[torch.float16]
    gradients = launch_backward(do, q, k, v, wide, o, logsumexp, *settings(case))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, [3, 11, 14]] == 0).all()


def test_a_scale_of_zero_weighs_all_alike() -> None:
    case = Case(1, 1, 1, 20, 37, 24, is_causal=True, offset=17)
    (q, k, v, _), _ = inputs(case)
    o, _ = launch_attention(q, k, v, None, True, 0.0, 0.0, 17)
    means = torch.stack([v.double()[:, :, : row + 18].mean(2) for row in range(20)], 2)
    assert error(o, means) <= BOUNDS[torch.float16]


def test_large_scores_do_not_overflow() -> None:
    case = Case(1, 1, 1, 20, 40, 16, scale=50.0)
    (q, k, v, _), _ = inputs(case)
    o, _ = launch_attention(q * 20, k * 20, v, None, *settings(case))
    assert error(o, attended(case, (q * 20).double(), (k * 20).double(), v.double(), None)) <= 1e-3
    capped = Case(1, 1, 1, 20, 40, 16, scale=50.0, softcap=30.0)
    o, _ = launch_attention(q * 20, k * 20, v, None, *settings(capped))
    assert error(o, attended(capped, (q * 20).double(), (k * 20).double(), v.double(), None)) <= 1e-3


@pytest.mark.parametrize("queries", [16, 64])
@pytest.mark.parametrize("keys", [16, 128])
def test_every_size_of_tile(queries: int, keys: int) -> None:
    case = Case(1, 2, 1, 70, 150, 48, is_causal=True, offset=80)
    (q, k, v, _), _ = inputs(case)
    tile: Any = tiles.AttentionTile(queries, keys, 4, 1)
    o, _ = launch_attention(q, k, v, None, *settings(case), tile=tile)
    assert error(o, attended(case, q.double(), k.double(), v.double(), None)) <= BOUNDS[torch.float16]


def test_heads_that_are_too_wide() -> None:
    with pytest.raises(InputError, match="the head dim is 257"):
        tiles.width_of(257)
