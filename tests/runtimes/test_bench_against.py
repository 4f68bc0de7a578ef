"""Competitors of ``bench``: who runs beside what, on the same model, and what is said of one that is absent."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from klein import make_checkpoint
from klein_sizes import SIZES, TINY

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.errors import InputError, RuntimeMissingError
from intaglio.runtimes import bench_against
from intaglio.runtimes.bench_against import find_gguf, generation
from intaglio.runtimes.bench_picture import _of_linears, _operations
from intaglio.runtimes.competitors import sd_cpp_transformer
from intaglio.runtimes.competitors.child import Competitor
from intaglio.runtimes.competitors.openvino_linears import linears
from intaglio.runtimes.competitors.text_protocol import time_generation


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a language model, compiled."""
    folder = tmp_path_factory.mktemp("smollm2") / "bundle"
    intaglio.export(smollm2_gguf, folder, stages=["generate"])
    intaglio.compile(folder)
    return folder


def test_who_runs_beside_what(smollm2: Path, klein: Path) -> None:
    for bundle, options, message in (
        (smollm2, {"against": "diffusers"}, "diffusers runs beside bundles for text-to-image"),
        (klein, {"against": "llama.cpp"}, "llama.cpp runs beside bundles for text-generation"),
        (klein, {"against": "nobody"}, "'nobody' is unknown; .* there is onnxruntime, diffusers, sd.cpp, openvino"),
        (klein, {"gguf": "a.gguf"}, "gguf has no meaning"),
        (smollm2, {"gguf": "a.gguf"}, "give --against llama.cpp with it"),
        (smollm2, {"gguf": "a.gguf", "against": "llama.cpp"}, "a.gguf: no such file"),
    ):
        with pytest.raises(InputError, match=message):
            intaglio.bench(bundle, **options)


@pytest.mark.parametrize("name", ["llama.cpp", "onnxruntime"])
def test_an_absent_one_is_said_with_what_installs_it(
    name: str, smollm2: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench_against.COMPETITORS["text-generation"], name, "intaglio.no.such.module")
    options = {"gguf": smollm2_gguf} if name == "llama.cpp" else {}
    message = (
        rf"^{name} cannot be run beside ours: .*No module named .*; install it with `pip install 'intaglio\[bench\]'`"
    )
    with pytest.raises(RuntimeMissingError, match=message):
        intaglio.bench(smollm2, against=name, prompt_tokens=4, new_tokens=2, repeats=1, **options)


def test_one_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "ends_at_once.py").write_text("raise ValueError('so it ends')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        with pytest.raises(RuntimeMissingError, match=r"^somebody cannot be run beside ours: ValueError: so it ends$"):
            Competitor("somebody", "ends_at_once", {})
        (tmp_path / "ends_later.py").write_text(
            "print('ready', flush=True); input(); import os; os.kill(os.getpid(), 4)"
        )
        with Competitor("somebody", "ends_later", {}) as competitor:
            assert competitor.ready == "ready"
            with pytest.raises(RuntimeMissingError, match="it ended with -4"):
                competitor.ask("go")
            assert competitor.ended_with == -4


def test_onnxruntime_alone_writes_beside_ours(smollm2: Path) -> None:
    result = intaglio.bench(smollm2, against="onnxruntime", prompt_tokens=6, new_tokens=3, repeats=2)
    (row,) = result["rows"]
    assert row["onnxruntime_version"].startswith("onnxruntime 1.")
    assert row["onnxruntime_unpacks_at_load"] in (True, False)
    for part in ("prefill", "decode"):
        assert row[f"onnxruntime_{part}_tokens_per_second"] > 0
        ratio = row[f"{part}_tokens_per_second"] / row[f"onnxruntime_{part}_tokens_per_second"]
        assert row[f"{part}_times_onnxruntime"] == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize("unpack", [True, False])
def test_onnxruntime_alone_gives_what_ours_gives(smollm2: Path, unpack: bool) -> None:
    from intaglio.runtimes.competitors.onnxruntime_graph import GraphSession
    from intaglio.runtimes.decoding import Decoding

    theirs = GraphSession(smollm2, "generate", threads=2, unpack=unpack)
    ours = open_engine(smollm2).load("generate", threads=2)
    logits = [Decoding(session, [[1, 5, 9, 2000]]).step() for session in (ours, theirs)]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-3, atol=1e-3)


def test_onnxruntime_alone_paints_beside_ours(klein: Path) -> None:
    result = intaglio.bench(klein, height=32, width=32, repeats=2, against="onnxruntime")
    rows = {row["stage"]: row for row in result["rows"]}
    assert rows["transformer"]["onnxruntime_seconds"] >= 0
    assert rows["transformer"]["of_onnxruntime"] > 0
    assert not any("of_onnxruntime" in row for stage, row in rows.items() if stage != "transformer")


def test_the_gguf_file_is_found_where_the_source_was(smollm2: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    engine = open_engine(smollm2)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    assert find_gguf(engine, smollm2_gguf) == (smollm2_gguf, True)
    assert find_gguf(engine, other) == (other, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTAGLIO_CACHE", str(tmp_path))
        patch.chdir(tmp_path)
        name = engine.bundle.language_model.source.files[0].name
        if not (engine.bundle_path.parent / name).exists():
            with pytest.raises(InputError, match=r"its source .* is not here as a GGUF file; say where with --gguf"):
                find_gguf(engine, None)
            # One of the same name that is another is none.
            (tmp_path / name).write_bytes(other.read_bytes())
            with pytest.raises(InputError, match="is not here"):
                find_gguf(engine, None)
        shutil.copyfile(smollm2_gguf, tmp_path / name)
        assert find_gguf(engine, None)[1]


class _Counting:
    """A generation that counts and says which token comes next."""

    def __init__(self) -> None:
        self.steps, self.tokens = 0, list[int]()

    def step(self) -> np.ndarray:
        self.steps += 1
        return np.eye(5, dtype=np.float32)[[self.steps % 5]]

    def put(self, tokens_B: np.ndarray) -> None:
        self.tokens += tokens_B.tolist()


def test_a_generation_is_a_prefill_and_greedy_tokens() -> None:
    counting = _Counting()
    prefill, steps = time_generation(counting, 3)
    assert prefill >= 0
    assert len(steps) == 3
    assert counting.tokens == [1, 2, 3, 4]
    assert json.loads(generation([1, 2], 3)) == {"prompt": [1, 2], "new_tokens": 3}


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_writes_beside_ours(smollm2: Path, smollm2_gguf: Path) -> None:
    result = intaglio.bench(smollm2, against="llama.cpp", gguf=smollm2_gguf, prompt_tokens=6, new_tokens=3, repeats=2)
    (row,) = result["rows"]
    assert row["llama_cpp_version"].startswith("llama-cpp-python ")
    assert row["llama_cpp_runs_the_bundles_source"]
    assert row["decode_times_llama_cpp"] > 0


def test_stable_diffusion_cpp_gets_a_transformer_of_this_configuration() -> None:
    """Names and shapes of the files, as our own maker of checkpoints writes them."""
    for sizes in (TINY, SIZES["4B"]):
        tensors = make_checkpoint.transformer_tensors(sizes.transformer)
        expected = {k: t.shape for k, t in make_checkpoint.bfl_tensors(sizes.transformer, tensors).items()}
        assert dict(sd_cpp_transformer.transformer_shapes(sizes.transformer)) == expected
    sizes = SIZES["4B"]
    named = make_checkpoint.bfl_vae_tensors(sizes.vae, make_checkpoint.vae_tensors(sizes.vae))
    expected = {name: tensor.shape for name, tensor in named.items() if name != "bn.num_batches_tracked"}
    assert dict(sd_cpp_transformer.autoencoder_shapes()) == expected
    found = list(sd_cpp_transformer.text_encoder_shapes())
    tensors = make_checkpoint.text_encoder_tensors(sizes.text_encoder)
    assert sorted(shape for _, shape in found) == sorted(tensor.shape for tensor in tensors.values())
    assert len(dict(found)) == len(tensors)


def test_its_files_hold_ternary_weights(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "a.gguf"
    shapes = [("matrix", (3, 512)), ("narrow", (4, 128)), ("vector", (7,)), ("kernel", (2, 3, 3, 3))]
    sd_cpp_transformer.write_gguf(path, "flux", iter(shapes))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, shape in shapes:
        assert tuple(int(n) for n in reversed(tensors[name].shape)) == shape
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds == {"matrix": "TQ2_0", "narrow": "F16", "vector": "F32", "kernel": "F16"}
    weight = gguf.quants.dequantize(tensors["matrix"].data, tensors["matrix"].tensor_type)
    assert set(np.unique(np.sign(weight))) == {-1, 0, 1}


def test_openvino_runs_the_linear_layers_of_a_step() -> None:
    config = {
        "num_attention_heads": 24, "attention_head_dim": 128, "mlp_ratio": 3.0, "num_layers": 5,
        "num_single_layers": 20,
    }  # fmt: skip
    shapes = linears(config, 1024, 512)
    assert shapes[1536, 3072, 27648] == shapes[1536, 12288, 3072] == 20
    found = sum(2 * rows * inputs * outputs * count for (rows, inputs, outputs), count in shapes.items())

    class Component:
        pass

    class Engine:
        class bundle:  # noqa: N801
            components = {"transformer": Component}  # noqa: RUF012

    Component.config = config  # type: ignore[attr-defined]
    feeds = {"hidden_states": np.empty((1, 1024, 1)), "encoder_hidden_states": np.empty((1, 512, 1))}
    attention = 25 * 2 * 2 * 1536**2 * 3072
    assert found == _operations(Engine, feeds) - attention  # type: ignore[arg-type]


def test_our_linear_layers_are_told_from_the_profile() -> None:
    profile: dict[str, Any] = {
        "operators": [
            {"op_type": "GroupedQuantMatMul", "ms": 700.0},
            {"op_type": "MatMul", "ms": 100.0},
            {"op_type": "Attention", "ms": 900.0},
        ]
    }
    row = _of_linears("openvino", "openvino 1", profile, [1.0, 2.0])
    assert row["linears_seconds"] == 0.8
    assert row["openvino_linears_best_seconds"] == 1.0
    assert row["linears_of_openvino"] == 0.8


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_runs_beside_ours(klein: Path) -> None:
    rows = intaglio.bench(klein, height=32, width=32, repeats=1, against="openvino")["rows"]
    (row,) = [row for row in rows if row["stage"] == "transformer"]
    assert row["openvino_linears_best_seconds"] >= 0
    assert "profile" not in row
