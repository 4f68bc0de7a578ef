"""``FusedAttention`` through onnxruntime, compared with a float64 reference, with torch and with itself.

Shape suffixes: B batch, H query heads, K key heads, S queries, T keys, D numbers of a query, E of a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import DOMAIN

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "amx")
INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "cos", "sin")
HEADS_FIRST = {f"{name}_heads_first": 1 for name in ("query", "key", "value", "output")}
EXACT, FAST = 2e-6, 5e-3


def model(feeds: dict[str, np.ndarray], attributes: dict[str, Any], presents: bool) -> ir.Model:
    """One FusedAttention of inputs with the ranks and dtypes of ``feeds``."""
    values = {}
    for name, array in feeds.items():
        shape = ir.Shape([f"{name}_{axis}" for axis in range(array.ndim)])
        values[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=shape)
    inputs = [values.get(name) for name in INPUTS]
    node = ir.node("FusedAttention", inputs, attributes, domain=DOMAIN, num_outputs=3 if presents else 1)
    for output, name in zip(node.outputs, ("attended", "present_key", "present_value"), strict=False):
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph(list(values.values()), node.outputs, nodes=[node], opset_imports=imports, name="attention")
    return ir.Model(graph, ir_version=11)


def load(feeds: dict[str, np.ndarray], threads: int = 2, presents: bool = False, **attributes: Any) -> Any:
    """A session; heads come first unless ``attributes`` say otherwise, and their numbers are those of the feeds."""
    said = {
        "q_num_heads": feeds["query"].shape[1],
        "kv_num_heads": feeds["key"].shape[1],
        **HEADS_FIRST,
        **attributes,
    }
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    data = ir.serde.serialize_model(model(feeds, said, presents)).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def attend(feeds: dict[str, np.ndarray], threads: int = 2, **attributes: Any) -> np.ndarray:
    """The output, in memory that was full of NaN."""
    session = load(feeds, threads, **attributes)
    attended_shape = session.run(None, feeds)[0].shape
    poisoned = ort.OrtValue.ortvalue_from_numpy(np.full(attended_shape, np.nan, np.float32))
    if not poisoned.numpy().size:
        return poisoned.numpy()
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_ortvalue_output("attended", poisoned)
    session.run_with_iobinding(binding)
    return np.array(poisoned.numpy())


def random_feeds(seed: int, B: int, H: int, K: int, S: int, T: int, D: int, E: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, H, S, D), "key": (B, K, T, D), "value": (B, K, T, E)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reference(feeds: dict[str, np.ndarray], scale: float | None = None) -> np.ndarray:
    """The definition, in float64; a row that sees nothing is zeros."""
    q_BHSD, k_BKTD, v_BKTE = (feeds[name].astype(np.float64) for name in ("query", "key", "value"))
    group = q_BHSD.shape[1] // k_BKTD.shape[1]
    k_BHTD, v_BHTE = np.repeat(k_BKTD, group, axis=1), np.repeat(v_BKTE, group, axis=1)
    scores = q_BHSD @ k_BHTD.swapaxes(2, 3) * (q_BHSD.shape[3] ** -0.5 if scale is None else scale)
    mask = feeds.get("mask")
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    largest = scores.max(axis=3, keepdims=True, initial=np.finfo(np.float32).min)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=3, keepdims=True)
    return (weights / np.where(total == 0, 1, total)) @ v_BHTE


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    try:
        load(random_feeds(0, 1, 1, 1, 1, 1, 1, 1))
    except Exception as error:
        if "this machine or this build lacks" not in str(error):
            raise
        pytest.skip(f"{request.param} is not to be had here")
    return request.param


SIZES = [  # B, H, K, S, T, D, E
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 1, 5, 7, 8, 8),
    (1, 9, 3, 1, 700, 64, 64),
    (2, 8, 2, 2, 257, 80, 80),
    (1, 4, 2, 3, 256, 256, 256),
    (1, 2, 2, 9, 65, 40, 24),
    (1, 2, 1, 64, 64, 32, 16),
    (1, 3, 3, 97, 130, 72, 88),
    (2, 4, 2, 67, 515, 128, 128),
    (1, 2, 2, 200, 1100, 64, 64),
    (1, 1, 1, 70, 90, 256, 256),
    (1, 2, 2, 100, 64, 130, 17),
    (1, 1, 1, 50, 80, 512, 512),
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_every_size_matches_the_float64_definition(sizes: tuple[int, ...], instruction_set: str) -> None:
    feeds = random_feeds(sum(sizes), *sizes)
    expected = reference(feeds)
    for attributes, bound in (({}, EXACT), ({"fast": 1}, FAST), ({"scale": 1.5 * sizes[5] ** -0.5}, EXACT)):
        found = attend(feeds, **attributes)
        assert found.dtype == np.float32
        wanted = reference(feeds, attributes["scale"]) if "scale" in attributes else expected
        assert relative_l2(found, wanted) <= bound, attributes


@pytest.mark.parametrize("sizes", [(1, 2, 1, 96, 4096, 128, 128), (1, 4, 4, 1, 300, 64, 64)], ids=["many", "one"])
def test_torch_is_not_closer(sizes: tuple[int, ...], instruction_set: str) -> None:
    """Sharp distributions too: their scores are larger, and so is their rounding."""
    for sharpness in (1, 3):
        feeds = random_feeds(1, *sizes)
        feeds["query"] *= np.float32(sharpness)
        tensors = [torch.from_numpy(feeds[name]) for name in ("query", "key", "value")]
        with torch.no_grad():
            theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True).numpy()
        expected = reference(feeds)
        assert relative_l2(attend(feeds), expected) <= 1.5 * relative_l2(theirs, expected) + 1e-7


MASKS = [(130, 515), (1, 515), (130, 1), (1, 1), (1, 130, 515), (4, 130, 515), (2, 1, 130, 515), (2, 4, 1, 515), (515,)]


@pytest.mark.parametrize("shape", MASKS, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("queries", [1, 130])
def test_masks_are_broadcast(shape: tuple[int, ...], queries: int, instruction_set: str) -> None:
    rng = np.random.default_rng(len(shape))
    shape = tuple(queries if size == 130 else size for size in shape)
    feeds = random_feeds(2, 2, 4, 2, queries, 515, 64, 48)
    visible = rng.random(shape) < 0.3
    for mask in (visible, rng.normal(size=shape).astype(np.float32) * 3):
        if mask.shape[-1] == 1 and mask.dtype == bool:
            mask = np.ones_like(mask)
        feeds["mask"] = mask
        assert relative_l2(attend(feeds), reference(feeds)) <= EXACT


@pytest.mark.parametrize("queries", [1, 6, 300])
def test_causal_and_windowed_masks(queries: int, instruction_set: str) -> None:
    """Whole blocks of keys that nothing sees, before and after those that are seen."""
    T = 1300
    feeds = random_feeds(3, 1, 2, 1, queries, T, 64, 64)
    key_T, query_S1 = np.arange(T), T - queries + np.arange(queries)[:, None]
    for window in (T, 40, 1):
        feeds["mask"] = (key_T <= query_S1) & (key_T > query_S1 - window)
        assert relative_l2(attend(feeds), reference(feeds)) <= EXACT
    # Keys that nothing sees may hold anything.
    feeds["key"][:, :, : T - queries] = np.nan
    feeds["value"][:, :, : T - queries] = 0
    assert relative_l2(attend(feeds), reference({**feeds, "key": np.nan_to_num(feeds["key"])})) <= EXACT


@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (150, 150), (150, 90), (90, 600)], ids=str)
def test_is_causal_counts_from_the_first_key(lengths: tuple[int, int], instruction_set: str) -> None:
    """As ONNX defines it for a call without a past."""
    S, T = lengths
    feeds = random_feeds(4, 1, 3, 3, S, T, 64, 64)
    mask = np.tril(np.ones((S, T), bool))
    expected = reference({**feeds, "mask": mask})
    assert relative_l2(attend(feeds, is_causal=1), expected) <= EXACT
    half = np.random.default_rng(0).random((S, T)) < 0.5
    half[:, 0] = True
    expected = reference({**feeds, "mask": mask & half})
    assert relative_l2(attend({**feeds, "mask": half}, is_causal=1), expected) <= EXACT


@pytest.mark.parametrize("queries", [1, 100])
def test_rows_that_see_nothing(queries: int, instruction_set: str) -> None:
    """Minus infinity everywhere gives zeros, as in torch and onnxruntime; a finite bias only shifts the scores."""
    feeds = random_feeds(5, 1, 2, 2, queries, 90, 32, 32)
    visible = np.ones((queries, 90), bool)
    visible[0] = False
    for mask in (visible, np.where(visible, 0, -np.inf).astype(np.float32)):
        found = attend({**feeds, "mask": mask})
        assert not found[:, :, 0].any()
        if queries > 1:
            assert relative_l2(found, reference({**feeds, "mask": mask})) <= EXACT
    lowest = np.where(visible, 0, np.finfo(np.float32).min).astype(np.float32)
    found = attend({**feeds, "mask": lowest})
    np.testing.assert_allclose(found[:, :, 0], feeds["value"].mean(axis=2), atol=1e-6)


@pytest.mark.parametrize("queries", [1, 100])
def test_huge_scores_do_not_overflow(queries: int, instruction_set: str) -> None:
    feeds = random_feeds(6, 1, 2, 2, queries, 300, 64, 64)
    for size in (1e3, 1e8, 1e18):
        scaled = {**feeds, "query": feeds["query"] * np.float32(size)}
        found = attend(scaled)
        assert np.isfinite(found).all()
        # The largest score takes all: another may be chosen only where two are as good as equal.
        assert (np.abs(found - reference(scaled)).max(axis=3) > 1e-3).mean() <= (0.05 if size == 1e3 else 0)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("queries", [4, 130])
def test_what_is_not_finite_stays_where_it_is(what: float, queries: int, instruction_set: str) -> None:
    feeds = random_feeds(7, 1, 2, 2, queries, 600, 64, 64)
    clean = attend(feeds)
    query = feeds["query"].copy()
    query[0, 1, 2, 3] = what
    found = attend({**feeds, "query": query})
    assert not np.isfinite(found[0, 1, 2]).any()
    others = np.ones(found.shape, bool)
    others[0, 1, 2] = False
    assert np.isfinite(found[others]).all()
    assert relative_l2(found[others], clean[others]) <= EXACT
    # In a value: one number of every row of the head.
    value = feeds["value"].copy()
    value[0, 0, 500, 7] = what
    found = attend({**feeds, "value": value})
    assert not np.isfinite(found[0, 0, :, 7]).any()
    found[0, 0, :, 7], expected = 0, clean.copy()
    expected[0, 0, :, 7] = 0
    assert relative_l2(found, expected) <= EXACT
    # In a key: every row of the head.
    key = feeds["key"].copy()
    key[0, 1, 30] = np.nan
    found = attend({**feeds, "key": key})
    assert np.isnan(found[0, 1]).all()
    assert relative_l2(found[0, 0], clean[0, 0]) <= EXACT


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("size", [10, 30, 300, 1e5])
def test_outliers_take_nothing_from_the_others(name: str, size: float, instruction_set: str) -> None:
    """A channel of a few tokens that is far larger than the rest, and meets nothing on the other side."""
    feeds = random_feeds(8, 1, 1, 1, 80, 520, 128, 128)
    if name == "value":
        feeds["value"][:, :, 7, 3] = size
        feeds["key"][:, :, 7] = 0
        feeds["query"] *= np.float32(3)
    else:
        other = "key" if name == "query" else "query"
        feeds[name][..., 5] = size
        feeds[other][..., 5] = 0
    found, expected = attend(feeds), reference(feeds)
    # Without the outlier's own column.
    keep = np.arange(128) != (3 if name == "value" else -1)
    assert relative_l2(found[..., keep], expected[..., keep]) <= EXACT
    if name == "value":
        error = np.abs(found[..., 3] - expected[..., 3])
        weights = reference({**feeds, "value": np.abs(feeds["value"])})[..., 3]
        assert (error <= 3e-6 * weights + 1e-6).all()


def test_tiny_and_large_numbers(instruction_set: str) -> None:
    """Far from 1 on both sides, and denormal: scores of zero are equal weights."""
    for query_size, value_size in ((1e-30, 1e-30), (1e-38, 1e-40), (1.0, 1e30), (1e12, 1e-12)):
        feeds = random_feeds(9, 1, 1, 1, 80, 100, 64, 64)
        feeds["query"] *= np.float32(query_size)
        feeds["key"] *= np.float32(1 / query_size if query_size > 1 else 1)
        feeds["value"] *= np.float32(value_size)
        assert relative_l2(attend(feeds) / value_size, reference(feeds) / value_size) <= (
            1e-3 if value_size < 1e-38 else EXACT
        )


@pytest.mark.parametrize("queries", [1, 100])
def test_exponentials_are_exact_to_two_units(queries: int, instruction_set: str) -> None:
    """Two keys with the scores 0 and x: the quotient of both weights is e^x."""
    x = -np.random.default_rng(10).uniform(0, 80, size=3000).astype(np.float32)
    feeds = {
        "query": np.repeat(x[:, None, None, None], queries, axis=2),
        "key": np.tile(np.array([0, 1], np.float32).reshape(1, 1, 2, 1), (len(x), 1, 1, 1)),
        "value": np.tile(np.eye(2, dtype=np.float32), (len(x), 1, 1, 1)),
    }
    found = attend(feeds, scale=1.0)[:, 0, 0].astype(np.float64)
    quotient = found[:, 1] / found[:, 0]
    # Both were divided by the same number, which rounds each once more.
    assert (np.abs(quotient / np.exp(x.astype(np.float64)) - 1) <= 3 * 2.0**-23).all()


@pytest.mark.parametrize("attributes", [{}, {"fast": 1}], ids=["exact", "fast"])
@pytest.mark.parametrize("sizes", [(1, 3, 1, 1, 2000, 64, 64), (1, 4, 2, 333, 700, 64, 64), (3, 2, 2, 40, 50, 24, 24)])
def test_threads_change_no_bit(sizes: tuple[int, ...], attributes: dict[str, int], instruction_set: str) -> None:
    feeds = random_feeds(11, *sizes)
    one, two, three = (attend(feeds, threads, **attributes) for threads in (1, 2, 3))
    np.testing.assert_array_equal(one.view(np.uint32), two.view(np.uint32))
    np.testing.assert_array_equal(one.view(np.uint32), three.view(np.uint32))


@pytest.mark.parametrize("tokens", [1, 70])
def test_layouts_change_no_bit(tokens: int, instruction_set: str) -> None:
    """Heads first or tokens first, and heads in the middle of wider rows."""
    B, H, K, D, E = 2, 4, 2, 32, 48
    feeds = random_feeds(12, B, H, K, tokens, tokens, D, E)
    expected = attend(feeds)
    rows = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in feeds.items()}
    counts = {"q_num_heads": H, "kv_num_heads": K}
    tokens_first = {**counts, **dict.fromkeys(HEADS_FIRST, 0)}
    np.testing.assert_array_equal(attend(rows, **tokens_first), expected.swapaxes(1, 2).reshape(B, tokens, H * E))
    flat = {name: array.reshape(B, tokens, -1) for name, array in rows.items()}
    np.testing.assert_array_equal(attend(flat, **{**tokens_first, "output_heads_first": 1}), expected)
    # One wide row of all three, as one projection gives it.
    wide = np.concatenate([np.full((B, tokens, 3), 1e30, np.float32), *flat.values()], axis=2)
    offsets = {"query_offset": 3, "key_offset": 3 + H * D, "value_offset": 3 + (H + K) * D}
    sizes = {"head_size": D, "value_head_size": E}
    sliced = attend(
        {"query": wide, "key": wide, "value": wide}, **{**tokens_first, **offsets, **sizes, "output_heads_first": 1}
    )
    np.testing.assert_array_equal(sliced, expected)


def rotated(x_BHSD: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: int) -> np.ndarray:
    """ONNX's RotaryEmbedding in float64."""
    x, (cos, sin) = x_BHSD.astype(np.float64), (a.astype(np.float64)[:, None] for a in (cos, sin))
    turned, pairs = x.copy(), cos.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("pairs", [32, 20])
def test_rotary_embedding(interleaved: int, tokens: int, pairs: int, instruction_set: str) -> None:
    feeds = random_feeds(13, 2, 4, 2, tokens, tokens, 64, 32)
    angles = np.random.default_rng(0).uniform(-9, 9, size=(2, tokens, pairs))
    feeds |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    turned = {n: rotated(feeds[n], feeds["cos"], feeds["sin"], interleaved) for n in ("query", "key")}
    assert relative_l2(attend(feeds, interleaved=interleaved), reference({**feeds, **turned})) <= EXACT
    # One embedding for the whole batch.
    feeds |= {name: feeds[name][:1] for name in ("cos", "sin")}
    turned = {n: rotated(feeds[n], feeds["cos"], feeds["sin"], interleaved) for n in ("query", "key")}
    assert relative_l2(attend(feeds, interleaved=interleaved), reference({**feeds, **turned})) <= EXACT


@pytest.mark.parametrize(("past", "new"), [(0, 3), (9, 1), (600, 1), (40, 80)])
def test_a_past_comes_first(past: int, new: int, instruction_set: str) -> None:
    rng = np.random.default_rng(past)
    whole = random_feeds(14, 2, 4, 2, new, past + new, 64, 48)
    whole["mask"] = (rng.random((2, 1, new, past + new)) < 0.6) | (np.arange(past + new) == past)
    angles = rng.uniform(-9, 9, size=(2, new, 32))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    feeds = {
        "query": whole["query"],
        "key": np.ascontiguousarray(whole["key"][:, :, past:]),
        "value": np.ascontiguousarray(whole["value"][:, :, past:]),
        "mask": whole["mask"],
        "past_key": np.ascontiguousarray(whole["key"][:, :, :past]),
        "past_value": np.ascontiguousarray(whole["value"][:, :, :past]),
        "cos": cos,
        "sin": sin,
    }
    turned_key = whole["key"].copy()
    turned_key[:, :, past:] = rotated(feeds["key"], cos, sin, 0)
    expected = reference({**whole, "query": rotated(whole["query"], cos, sin, 0), "key": turned_key})
    session = load(feeds, presents=True)
    attended, present_key, present_value = session.run(None, feeds)
    assert relative_l2(attended, expected) <= EXACT
    np.testing.assert_allclose(present_key, turned_key, atol=2e-6)
    np.testing.assert_array_equal(present_value, whole["value"])
    # The same in place: buffers that are longer than what is filled of them, and hold anything beyond.
    room = past + new + 5
    buffers = {}
    for name, array in (("past_key", feeds["past_key"]), ("past_value", feeds["past_value"])):
        buffers[name] = np.full((2, 2, room, array.shape[3]), np.nan, np.float32)
        buffers[name][:, :, :past] = array
    values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in {**feeds, **buffers}.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("attended")
    binding.bind_ortvalue_output("present_key", values["past_key"])
    binding.bind_ortvalue_output("present_value", values["past_value"])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), attended)
    np.testing.assert_array_equal(buffers["past_key"][:, :, : past + new], present_key)
    np.testing.assert_array_equal(buffers["past_value"][:, :, : past + new], present_value)
    assert all(np.isnan(buffer[:, :, past + new :]).all() for buffer in buffers.values())
    # And with buffers that are longer, but not shared.
    given = session.run(None, {**feeds, **{n: np.where(np.isnan(b), 7, b) for n, b in buffers.items()}})
    np.testing.assert_array_equal(given[0], attended)
    assert given[1].shape == buffers["past_key"].shape


def test_causal_attention_counts_after_the_past(instruction_set: str) -> None:
    whole = random_feeds(15, 1, 2, 2, 70, 130, 32, 32)
    feeds = {
        "query": whole["query"],
        **{name: np.ascontiguousarray(whole[name][:, :, 60:]) for name in ("key", "value")},
        **{f"past_{name}": np.ascontiguousarray(whole[name][:, :, :60]) for name in ("key", "value")},
    }
    expected = reference({**whole, "mask": np.arange(130) <= 60 + np.arange(70)[:, None]})
    assert relative_l2(load(feeds, presents=True, is_causal=1).run(None, feeds)[0], expected) <= EXACT


@pytest.mark.parametrize("sizes", [(0, 2, 2, 3, 3, 16, 16), (1, 2, 2, 0, 3, 16, 16), (1, 2, 2, 3, 0, 16, 16)])
def test_nothing_to_do(sizes: tuple[int, ...], instruction_set: str) -> None:
    """Without keys, too, a row sees nothing."""
    B, H, _, S, _, _, E = sizes
    found = attend(random_feeds(16, *sizes))
    assert found.shape == (B, H, S, E)
    assert not found.any()


def test_random_sizes(instruction_set: str) -> None:
    rng = np.random.default_rng(17)
    for seed in range(40):
        K = int(rng.integers(1, 4))
        H = K * int(rng.integers(1, 4))
        S, T = (int(n) for n in rng.integers(1, 200, size=2))
        D, E = (int(n) for n in rng.integers(1, 150, size=2))
        feeds = random_feeds(seed, int(rng.integers(1, 3)), H, K, S, T, D, E)
        if seed % 2:
            feeds["mask"] = rng.random((S, T)) < 0.5
        found, expected = attend(feeds), reference(feeds)
        assert relative_l2(found, expected) <= EXACT, (seed, H, K, S, T, D, E)
        assert relative_l2(attend(feeds, fast=1), expected) <= FAST


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key": np.zeros((1, 2, 7, 9), np.float32)}, "do not fit each other"),
        ({"value": np.zeros((1, 2, 6, 8), np.float32)}, "do not fit each other"),
        ({"key": np.zeros((1, 3, 7, 8), np.float32)}, r"key has shape \[1, 3, 7, 8\], expected"),
        ({"mask": np.ones((5, 6), bool)}, r"mask has shape \[5, 6\], expected one that is broadcast to \[1, 4, 5, 7\]"),
        ({"mask": np.ones((5, 7), np.int64)}, "mask is int64, expected bool or float32"),
        ({"cos": np.ones((1, 5, 4), np.float32)}, "one of cos and sin is left out"),
        (
            {"query": np.zeros((1, 5, 32), np.float32), "key": np.zeros((7, 8), np.float32)},
            "expected three or four dims",
        ),
        ({"past_key": np.zeros((1, 2, 3, 8), np.float32)}, "past_key and past_value have shapes"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, np.ndarray], named: str) -> None:
    feeds = {**random_feeds(18, 1, 4, 2, 5, 7, 8, 8), **change}
    session = load(feeds, q_num_heads=4, kv_num_heads=2)
    with pytest.raises(Exception, match=f"FusedAttention: .*{named}"):
        session.run(None, feeds)


def run_in_place(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Attended, with present in the memory of past."""
    session = load(feeds, presents=True)
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("attended")
    for name in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{name}", values[f"past_{name}"])
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()


@pytest.mark.parametrize("mask", [None, np.ones((), bool)])
def test_a_past_in_place_needs_a_mask_with_its_keys(mask: np.ndarray | None) -> None:
    """Without new keys, present has the shape of past, filled or not."""
    feeds = random_feeds(20, 1, 2, 2, 3, 0, 8, 8)
    feeds |= {f"past_{name}": np.full((1, 2, 6, 8), np.nan, np.float32) for name in ("key", "value")}
    with pytest.raises(Exception, match="appended to in place, which needs a mask"):
        run_in_place(feeds if mask is None else {**feeds, "mask": mask})
    for name in ("key", "value"):
        feeds[f"past_{name}"][:, :, :4] = 1
    assert np.isfinite(run_in_place({**feeds, "mask": np.ones((3, 4), bool)})).all()


def test_a_mask_is_not_broadcast_along_a_past() -> None:
    feeds = random_feeds(21, 1, 2, 2, 1, 1, 8, 8)
    feeds["mask"] = np.ones((1, 1), bool)
    # The first token of a text, and nothing else.
    past = {f"past_{name}": np.full((1, 2, 6, 8), np.nan, np.float32) for name in ("key", "value")}
    assert relative_l2(run_in_place({**feeds, **past}), reference(feeds)) <= EXACT
    with pytest.raises(Exception, match=r"the mask has shape \[1, 1\], expected one with all 7 keys in its last dim"):
        load({**feeds, **past}, presents=True).run(None, {**feeds, **past})


def test_a_full_buffer_is_named() -> None:
    feeds = random_feeds(19, 1, 2, 2, 3, 3, 8, 8)
    feeds |= {"past_key": np.zeros((1, 2, 6, 8), np.float32), "past_value": np.zeros((1, 2, 6, 8), np.float32)}
    feeds["mask"] = np.ones((3, 8), bool)
    with pytest.raises(
        Exception, match="the mask is for 8 keys, but there are 3 new ones, and the past has room for 6"
    ):
        load(feeds, presents=True).run(None, feeds)


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(Exception, match="q_num_heads 3 is not a multiple of kv_num_heads 2"):
        load(random_feeds(20, 1, 3, 2, 1, 1, 8, 8))
