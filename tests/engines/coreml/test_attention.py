"""Attention and rotary embeddings of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import evaluated, expected, packaged
from coreml_nodes import check_node, floats, one_node

from intaglio.exporters.bundle import Dim

RNG = np.random.default_rng()
B, S, T, E = 2, 5, 7, 8


def _qkv(heads: int = 4, kv_heads: int = 4, keys: int = T) -> list[np.ndarray]:
    return [floats(B, heads, S, E), floats(B, kv_heads, keys, E), floats(B, kv_heads, keys, E)]


def _visible(*shape: int) -> np.ndarray:
    mask = RNG.random(shape) < 0.6
    mask[..., 0] = True
    return mask


MASKS = {
    "none": None,
    "boolean": lambda: _visible(S, T),
    "boolean of heads": lambda: _visible(B, 4, S, T),
    "of batches": lambda: _visible(B, 1, S, T),
    "additive": lambda: floats(B, 1, S, T),
    "weight": lambda: (_visible(S, T),),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_masks_and_shared_heads(mask, kv_heads, scale):
    given = MASKS[mask]() if MASKS[mask] else None
    check_node("Attention", [*_qkv(4, kv_heads), given], 23, rtol=2e-5, **({} if scale is None else {"scale": scale}))


def test_causal_attention():
    check_node("Attention", _qkv(keys=S), 23, is_causal=1, rtol=2e-5)


def test_soft_caps_are_made_by_hand():
    check_node("Attention", _qkv(), 23, softcap=1.5, rtol=2e-5)


def test_past_keys_and_values():
    inputs = [*_qkv(4, 2, S), None, floats(B, 2, 3, E), floats(B, 2, 3, E)]
    check_node("Attention", inputs, 23, outputs=3, rtol=2e-5)


def test_heads_in_one_axis():
    inputs = [floats(B, S, 4 * E), floats(B, T, 2 * E), floats(B, T, 2 * E)]
    check_node("Attention", inputs, 23, q_num_heads=4, kv_num_heads=2, rtol=2e-5)


def test_lengths_that_vary():
    dims = {"b": Dim(min=1, max=4), "s": Dim(min=1, max=16)}
    check_node("Attention", _qkv(4, 2), 23, vary=f"b,4,s,{E}", dims=dims, is_causal=0, rtol=2e-5)


def test_attention_is_one_fused_op():
    model, _ = one_node("Attention", [*_qkv(), _visible(S, T)], 23)
    ops = [op.op_type for op in packaged(model).program.functions["main"].operations]
    assert ops.count("scaled_dot_product_attention") == 1
    assert "softmax" not in ops


def test_a_softmax_of_another_dtype_than_the_graph_asks_for_is_noted():
    halves = [each.astype(np.float16) for each in _qkv()]
    for precision, softcap, said in ((1, 0.0, 1), (1, 2.0, 0), (10, 0.0, 0)):
        model, _ = one_node("Attention", halves, 23, softmax_precision=precision, softcap=softcap)
        assert sum("softmax" in note for note in packaged(model).notes) == said


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_a_query_that_a_float_mask_hides_everything_from_gets_zeros(is_causal, softcap):
    mask = np.where(_visible(B, 1, S, S), floats(B, 1, S, S), -np.inf).astype(np.float32)
    mask[0, 0, 2] = mask[1, 0, 0] = -np.inf
    model, feeds = one_node("Attention", [*_qkv(keys=S), mask], 23, is_causal=is_causal, softcap=softcap)
    (found,), (theirs,) = evaluated(model, feeds)[0], expected(model, feeds)
    assert not found[0, :, 2].any()
    assert not found[1, :, 0].any()
    np.testing.assert_allclose(found, np.nan_to_num(theirs), atol=2e-5)


def test_a_wide_mask_hides_everything_from_a_query_of_float16():
    halves = [each.astype(np.float16) for each in _qkv(keys=S)]
    mask = np.where(_visible(B, 1, S, S), 0, -np.inf).astype(np.float32)
    mask[1, 0, 3] = -np.inf
    model, feeds = one_node("Attention", [*halves, mask], 23, outputs=1)
    (found,) = evaluated(model, feeds)[0]
    assert not found[1, :, 3].any()
    assert np.isfinite(found).all()
    assert found[0].any(axis=-1).all()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("turned", [0, 4])
@pytest.mark.parametrize("is_flat", [False, True])
def test_rotary_embeddings(interleaved, turned, is_flat):
    x = floats(B, S, 4 * E) if is_flat else floats(B, 4, S, E)
    half = (turned or E) // 2
    tables = [(floats(32, half),), (floats(32, half),), RNG.integers(0, 32, (B, S))]
    more = {"num_heads": 4} if is_flat else {}
    check_node("RotaryEmbedding", [x, *tables], 23, interleaved=interleaved, rotary_embedding_dim=turned, **more)
