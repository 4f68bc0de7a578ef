"""The key-value cache as states: chunks, padding, positions and masks, against onnxruntime on the portable graph.

States are float16, so that logits differ from those of a float32 cache. The bound is 5e-3 of relative L2.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from coreml_decoders import CacheDecoder, StateDecoder, bundle_dims, relative_l2, token_feeds, write_decoder
from coreml_models import model
from gguf_models import TinyGGUF
from tiny_models import GGUF_MODELS, TINY_MODELS

import intaglio
from intaglio.engines.coreml.cache_calls import cache_calls
from intaglio.engines.coreml.description import (
    CacheDescription,
    FunctionDescription,
    PackageDescription,
    read_description,
)
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.states import convert_with_cache, depends_on_call_length, has_cache
from intaglio.errors import CompileError, EngineError, InputError

BOUND = 5e-3
CONTEXT, CHUNK = 32, 8
TINY = {tiny.name: tiny for tiny in TINY_MODELS}
# Pieces of a text, as they are appended: chunks that are full, padded, of one token, to the end of the context.
PIECES = (13, 1, 1, 8, 2, 4, 3)


def appended(state: StateDecoder, cache: CacheDecoder, ids: np.ndarray, mask: np.ndarray) -> tuple[float, list]:
    """Appends tokens to both; the difference of their logits and the calls that it took."""
    past = state.length
    found = state.append(token_feeds(ids, mask, past))
    # In the same pieces: dynamic rotary embeddings look at the greatest position of a call.
    done = 0
    for _, tokens in state.calls:
        part, end = ids[:, done : done + tokens], past + done + tokens
        expected = cache.append(token_feeds(part, mask[:, :end], past + done))
        done += tokens
    return relative_l2(found, expected), state.calls


@pytest.mark.parametrize("name", ["llama-biases", "llama-dynamic", "qwen2-windows", "qwen3"])
def test_text_in_pieces(name: str, tmp_path: Path) -> None:
    TINY[name].build(tmp_path / "checkpoint")
    intaglio.export(tmp_path / "checkpoint", tmp_path / "bundle")
    assert depends_on_call_length(ir.load(tmp_path / "bundle" / "generate.onnx")) == TINY[name].dynamic
    description = write_decoder(tmp_path / "bundle", tmp_path / "m.mlpackage", context=CONTEXT, chunk=CHUNK)
    state = StateDecoder(tmp_path / "m.mlpackage", description)
    cache = CacheDecoder(tmp_path / "bundle")
    rng = np.random.default_rng()
    ids = rng.integers(0, 97, (1, CONTEXT))
    ways = []
    for end in np.cumsum(PIECES):
        error, calls = appended(state, cache, ids[:, state.length : end], np.ones((1, end), np.int64))
        assert error <= BOUND
        ways.append(calls)
    assert ways[0] == [("prefill", 8), ("prefill", 4), ("decode", 1)]
    assert ways[3] == [("prefill", 8)]
    # No room for a padded chunk: token by token.
    assert ways[-1] == [("decode", 1)] * 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
    intaglio.compile(folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> tuple[Path, PackageDescription]:
    path = bundle.parent / "generate.mlpackage"
    return path, write_decoder(bundle, path, context=64, chunk=16)


@pytest.mark.parametrize("prompt", ["h", "hello world", "To be, or not to be, that is the qu"])
def test_greedy_text_is_that_of_the_cpu(prompt: str, bundle: Path, decoder: tuple[Path, PackageDescription]) -> None:
    pipeline = intaglio.load(bundle)
    expected = pipeline(prompt, max_new_tokens=24)
    state = StateDecoder(*decoder)
    tokens: list[int] = []
    waiting = pipeline.tokenizer.encode(prompt)
    while len(tokens) < len(expected.token_ids):
        mask = np.ones((1, state.length + len(waiting)), np.int64)
        logits = state.append(token_feeds(np.array([waiting]), mask, state.length))
        waiting = [int(logits[0, -1].argmax())]
        tokens += waiting
    assert tuple(tokens) == expected.token_ids


def test_what_is_behind_the_position_is_not_seen(decoder: tuple[Path, PackageDescription]) -> None:
    ids, mask = np.random.default_rng().integers(0, 256, (1, 20)), np.ones((1, 20), np.int64)
    fresh, used = StateDecoder(*decoder), StateDecoder(*decoder)
    for buffer in used.state.values():
        buffer[...] = 1000.0
    np.testing.assert_array_equal(
        fresh.append(token_feeds(ids, mask, 0)),
        used.append(token_feeds(ids, mask, 0)),
    )


def test_a_text_taken_back(decoder: tuple[Path, PackageDescription]) -> None:
    rng = np.random.default_rng()
    ids = rng.integers(0, 256, (1, 20))
    state, fresh = StateDecoder(*decoder), StateDecoder(*decoder)
    state.append(token_feeds(rng.integers(0, 256, (1, 40)), np.ones((1, 40), np.int64), 0))
    state.length = 0
    for end in (18, 20):
        feeds = token_feeds(ids[:, state.length : end], np.ones((1, end), np.int64), state.length)
        np.testing.assert_array_equal(state.append(feeds), fresh.append(feeds))


def test_rows_padded_on_the_left(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.mlpackage"
    state = StateDecoder(path, write_decoder(bundle, path, context=CONTEXT, chunk=CHUNK, batch=2))
    cache = CacheDecoder(bundle, batch=2)
    ids = np.random.default_rng().integers(0, 256, (2, 16))
    mask = np.ones((2, 16), np.int64)
    mask[0, :5] = 0
    for end in (13, 14, 16):
        error, _ = appended(state, cache, ids[:, state.length : end], mask[:, :end])
        assert error <= BOUND


@pytest.mark.parametrize("narrow", [False, True], ids=["exported", "narrowed"])
def test_float16(narrow: bool, bundle: Path, tmp_path: Path) -> None:
    """Exported as float16, and narrowed from float32: both are compared with float32."""
    half, path = bundle, tmp_path / "m.mlpackage"
    if not narrow:
        half = tmp_path / "half"
        intaglio.export(bundle.parent / "checkpoint", half, dtype="float16")
    state = StateDecoder(path, write_decoder(half, path, context=CONTEXT, chunk=CHUNK, narrow=narrow))
    cache = CacheDecoder(bundle)
    ids = np.random.default_rng().integers(0, 256, (1, CONTEXT))
    for end in np.cumsum(PIECES[:5]):
        error, _ = appended(state, cache, ids[:, state.length : end], np.ones((1, end), np.int64))
        assert error <= BOUND
    # Nothing is widened on its way into the cache or out of it.
    program = Evaluator(path).program.functions["decode"]
    made = {output.name: op.type for op in program.block.operations for output in op.outputs}
    for operation in program.block.operations:
        if operation.type == "slice_update":
            (update,) = operation.arguments["update"]
            assert made[update.name] != "cast"


def test_packed_weights_are_stored_once(tmp_path: Path) -> None:
    tiny = TinyGGUF(GGUF_MODELS["llama-wide"], gguf.GGMLQuantizationType.TQ2_0)
    tiny.build(tmp_path / "source")
    intaglio.export(tmp_path / "source" / "model.gguf", tmp_path / "bundle")
    path = tmp_path / "m.mlpackage"
    state = StateDecoder(path, write_decoder(tmp_path / "bundle", path, context=CONTEXT, chunk=CHUNK))
    cache = CacheDecoder(tmp_path / "bundle")
    ids = np.random.default_rng().integers(0, 97, (1, 12))
    error, _ = appended(state, cache, ids, np.ones((1, 12), np.int64))
    assert error <= BOUND
    weights = [tmp_path / f"{name}.mlpackage/Data/com.apple.CoreML/weights/weight.bin" for name in ("decode", "m")]
    one, both = (file.stat().st_size for file in weights)
    assert one <= both <= 1.02 * one


def test_the_description(decoder: tuple[Path, PackageDescription]) -> None:
    path, description = decoder
    function = description.functions["prefill"]
    assert [(t.name, t.package_dtype, t.shape) for t in function.inputs] == [
        ("input_ids", "int32", (1, 16)),
        ("attention_mask", "int32", (1, 64)),
        ("position_ids", "int32", (1, 16)),
        ("position", "int32", (1,)),
    ]
    assert [t.name for t in function.outputs] == ["logits"]
    assert function.cache == CacheDescription(context=64, tokens=16, position="position")
    assert function.sizes == {"batch": 1, "sequence": 16, "total_sequence": 64}
    assert [(s.past, s.present, s.shape) for s in function.states[:2]] == [
        ("past_key_values.0.key", "present.0.key", (1, 2, 64, 8)),
        ("past_key_values.0.value", "present.0.value", (1, 2, 64, 8)),
    ]
    # One state serves all functions.
    assert {s.package_name for s in function.states} == set(StateDecoder(path, description).state)
    assert description.functions["decode"].states == function.states
    with pytest.raises(ValueError, match=r"default function 'other' is not among \['decode', 'prefill'\]"):
        PackageDescription(default_function="other", functions=description.functions)


def test_feeds_that_do_not_fit(decoder: tuple[Path, PackageDescription]) -> None:
    function = decoder[1].functions["decode"]
    feeds = {**token_feeds(np.array([[3]]), np.ones((1, 64), np.int64), 0), "position": np.array([0])}
    feeds["position_ids"] = feeds["position_ids"][:, :1]
    assert {name: array.dtype.name for name, array in function.pack(feeds).items()} == dict.fromkeys(feeds, "int32")
    with pytest.raises(InputError, match="input_ids holds 3000000000, and Core ML's integers end at 2147483647"):
        function.pack({**feeds, "input_ids": np.array([[3_000_000_000]])})
    with pytest.raises(InputError, match="input_ids is float32, expected int64"):
        function.pack({**feeds, "input_ids": np.ones((1, 1), np.float32)})
    with pytest.raises(InputError, match=r"missing: \['position'\]"):
        function.pack({name: array for name, array in feeds.items() if name != "position"})


def _package(context: int, *chunks: int) -> PackageDescription:
    functions = {
        f"f{tokens}": FunctionDescription(
            inputs=(), outputs=(), cache=CacheDescription(context=context, tokens=tokens, position="position")
        )
        for tokens in chunks
    }
    return PackageDescription(default_function=next(iter(functions)), functions=functions)


@pytest.mark.parametrize("chunks", [(1,), (1, 8), (8, 1), (1, 6, 16)])
def test_calls_append_every_token_once_and_end_with_one_that_is_full(chunks: tuple[int, ...]) -> None:
    context = 26
    package = _package(context, *chunks)
    for past in range(context):
        for count in range(1, context - past + 1):
            ids = np.arange(past, past + count)[None]
            calls = cache_calls(package, {"input_ids": ids, "position_ids": ids}, past)
            reached = past
            for call in calls:
                given, cache = call.feeds["input_ids"][0], package.functions[call.function].cache
                assert cache is not None
                assert call.feeds["position"] == [reached]
                assert len(given) == cache.tokens
                assert reached + cache.tokens <= context
                np.testing.assert_array_equal(given[: call.tokens], np.arange(reached, reached + call.tokens))
                assert np.all(given[call.tokens :] == given[call.tokens - 1])
                reached += call.tokens
            assert reached == past + count
            assert calls[-1].tokens == len(calls[-1].feeds["input_ids"][0])
            assert len(calls) <= count


def test_calls_that_cannot_be() -> None:
    ids = np.zeros((1, 9), np.int64)
    with pytest.raises(InputError, match="9 tokens cannot be appended to 42: the engine's context is 50"):
        cache_calls(_package(50, 1, 8), {"input_ids": ids}, 42)
    with pytest.raises(InputError, match="0 tokens"):
        cache_calls(_package(50, 1, 8), {"input_ids": ids[:, :0]}, 0)
    with pytest.raises(EngineError, match="no function that appends one token"):
        cache_calls(_package(50, 8), {"input_ids": ids}, 0)


def test_a_graph_without_a_cache(bundle: Path) -> None:
    graph = ir.load(bundle / "score.onnx")
    assert not has_cache(graph)
    assert has_cache(ir.load(bundle / "generate.onnx"))
    with pytest.raises(CompileError, match=r"score: no key-value cache is found.*another target"):
        convert_with_cache(graph, "score", context=64, tokens=1, dims=bundle_dims(bundle))
    with pytest.raises(CompileError, match="a call of 65 tokens does not fit a context of 64"):
        convert_with_cache(graph, "score", context=64, tokens=65)


APPENDS = """g (float[batch,1,past,2] x, float[batch,1,new,2] n) => (float[batch,1,total,2] y{outputs})
    {{ {before} y = Concat<axis = 2>({past}, n) {after} }}"""


def _append(past: str = "x", before: str = "", after: str = "", outputs: str = "") -> ir.Model:
    return ir.from_proto(model(APPENDS.format(past=past, before=before, after=after, outputs=outputs)))


def test_a_past_that_is_read_otherwise() -> None:
    graph = _append(after="s = ReduceSum(x)", outputs=", float s")
    with pytest.raises(CompileError, match=r"'x' is read by ReduceSum .* as well as appended to"):
        convert_with_cache(graph, "m", context=8, tokens=1)


def test_whole_shapes_and_casts_of_a_past(tmp_path: Path) -> None:
    """A graph of float16 inside, whose interface is float32, and which asks for all dims of its past."""
    graph = ir.from_proto(
        model("""g (float[batch,1,past,2] x, float16[batch,1,new,2] n)
            => (float[batch,1,total,2] y, int64[4] s, int64[2] t, float16[batch,1,total,2] z) {
            h = Cast<to = 10>(x) c = Concat<axis = -2>(h, n) y = Cast<to = 1>(c)
            s = Shape(x) t = Shape<start = -2>(h) z = Neg(c) }""")
    )
    converted, function = convert_with_cache(graph, "m", context=4, tokens=2)
    write_package(converted, tmp_path / "m.mlpackage")
    evaluator = Evaluator(tmp_path / "m.mlpackage")
    state = evaluator.make_state()
    new = np.random.default_rng().standard_normal((1, 1, 2, 2)).astype(np.float16)
    found = function.unpack(evaluator.run(function.pack({"n": new, "position": np.array([1])}), state=state))
    assert list(found) == ["s", "t", "z"]
    np.testing.assert_array_equal(found["s"], [1, 1, 1, 2])
    np.testing.assert_array_equal(found["t"], [1, 2])
    np.testing.assert_array_equal(found["z"][:, :, 1:3], -new)
    assert not found["z"][:, :, [0, 3]].any()
    np.testing.assert_array_equal(state["x"][:, :, 1:3], new)


UNKNOWN = """g (float[1,heads,past,2] x, float[1,heads,1,2] n) => (float[1,heads,total,2] y) {
    y = Concat<axis = 2>(x, n) }"""


def test_sizes_of_a_cache_that_are_not_known() -> None:
    with pytest.raises(CompileError, match=r"axis 1 of 'x' has no size that is known.*--shapes heads=N"):
        convert_with_cache(ir.from_proto(model(UNKNOWN)), "m", context=8, tokens=1)


def test_a_cache_of_others_stays_inputs_and_outputs(tmp_path: Path) -> None:
    proto = model("""g (float[1,1,before,2] x, float[1,1,1,2] n) => (float[1,1,after,2] y) {
        y = Concat<axis = 2>(x, n) }""")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    intaglio.compile(tmp_path / "m.onnx", "coreml", shapes="before=1:2:4")
    (package,) = tmp_path.rglob("*.mlpackage")
    function = read_description(package).functions["main"]
    assert [tensor.name for tensor in function.inputs] == ["x", "n"]
    assert [tensor.name for tensor in function.outputs] == ["y"]
    assert not function.states
