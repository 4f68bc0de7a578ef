"""One model in every format: exported, run on the CPU engine and compared with transformers on the same weights.

Bound: relative L2 <= 1e-5 of the logits. Measured: at most 6e-7. Values of quantized weights are bit for bit those of
the ``gguf`` package and of mlx.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from mlx_files import dequantized, quantize_folder
from tiny_models import _BLOCKS, GGUF_MODELS, TinyModel, _qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.exporters.checkpoints.gguf_unpack import bit_planes
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, unpack_codes
from intaglio.runtimes.parity import compare

BOUND = 1e-5
MODELS = {
    "llama-llama3": GGUF_MODELS["llama-llama3"],
    "llama-biases": GGUF_MODELS["llama-biases"],
    # The width that transformers takes for granted in GGUF files.
    "qwen3": TinyModel("qwen3", _qwen3(**{**_BLOCKS, "head_dim": 128})),
}


@dataclass
class Source:
    folder: Path
    oracle: transformers.PreTrainedModel

    def weights(self) -> dict[str, np.ndarray]:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.oracle.named_parameters()}


_SOURCES: dict[str, Source] = {}


@pytest.fixture(params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    name: str = request.param
    if name not in _SOURCES:
        folder = tmp_path_factory.mktemp(name) / "source"
        _SOURCES[name] = Source(folder, MODELS[name].build(folder))
        _write_tokenizer(folder, _SOURCES[name].oracle.config.vocab_size)
    return _SOURCES[name]


def _write_tokenizer(folder: Path, size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 3]
    vocab = {token: i for i, token in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    # Numbers that transformers fills in, and that name other tokens here.
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": tokenizer.token_to_id("<s>"), "eos_token_id": tokenizer.token_to_id("</s>")}
    (folder / "config.json").write_text(json.dumps(config))


def check_outputs(checkpoint: Path, source: Source, values: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Exports and runs ``checkpoint`` and the oracle with ``values``; returns the initializers of the graph."""
    intaglio.export(checkpoint, folder, stages=["score"])
    intaglio.compile(folder)
    engine = open_engine(folder)
    assert engine.bundle.language_model.unused_tensors == ()
    ids = np.random.default_rng(3).integers(0, engine.bundle.language_model.config["vocab_size"], (2, 40))
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(40), ids.shape).copy(),
    }
    found = engine.load("score").run(feeds)["logits"]
    oracle = copy.deepcopy(source.oracle)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.copy_(torch.from_numpy(values[name].copy()))
        expected = oracle(torch.from_numpy(ids)).logits.numpy()
    assert compare("logits", found, expected).relative_l2 <= BOUND
    graph = ir.load(folder / "score.onnx").graph
    return {name: value.const_value.numpy() for name, value in graph.initializers.items()}  # type: ignore[union-attr]


def gguf_values(source: Source, storage: str) -> dict[str, np.ndarray]:
    """The weights after the gguf package's own quantization."""
    kind = gguf.GGMLQuantizationType[storage]
    return {
        name: gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim > 1 else values
        for name, values in source.weights().items()
    }


def mlx_values(source: Source, folder: Path, bits: int, group_size: int) -> dict[str, np.ndarray]:
    file = folder / "model.safetensors"
    return {
        name: dequantized(file, name.removesuffix(".weight"), bits, group_size) if values.ndim > 1 else values
        for name, values in source.weights().items()
    }


def matrices(source: Source) -> list[str]:
    return [name for name, values in source.weights().items() if values.ndim > 1]


def test_safetensors(source: Source, tmp_path: Path) -> None:
    check_outputs(source.folder, source, source.weights(), tmp_path / "bundle")


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_1", "Q4_0"])
def test_gguf(source: Source, tmp_path: Path, storage: str) -> None:
    path = tmp_path / "model.gguf"
    report = intaglio.convert(source.folder, path, storage=storage)
    assert {t.storage for t in report.rounded} == {storage}
    expected = gguf_values(source, storage)
    stored = check_outputs(path, source, expected, tmp_path / "bundle")
    bits = 8 if storage == "Q8_0" else 4
    zero_point = {"Q8_0": 128, "Q4_0": 8, "Q4_1": 0}[storage]
    for name in matrices(source):
        codes, scales, offsets = (stored[f"{name}.{part}"] for part in ("codes", "scales", "offsets"))
        blocks = gguf.quantize(source.weights()[name], gguf.GGMLQuantizationType[storage])
        blocks = blocks.reshape(len(codes), -1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[storage])
        np.testing.assert_array_equal(scales, blocks[..., :2].copy().view(np.float16)[..., 0])
        if storage == "Q8_0":
            np.testing.assert_array_equal(codes.reshape(len(codes), -1, 32) ^ 0x80, blocks[..., 2:])
        else:
            of_file = bit_planes(blocks[..., -16:], 4, 16).reshape(len(codes), -1)
            np.testing.assert_array_equal(unpack_codes(codes, 4), of_file)
        rows = GroupedQuantRows(codes, scales, offsets)
        values = dequantize(rows, GroupedQuantFormat(bits, 32, zero_point))
        np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx(source: Source, tmp_path: Path, bits: int, dtype: mx.Dtype) -> None:
    folder = quantize_folder(source.folder, tmp_path / "mlx", bits, 32, dtype)
    stored = check_outputs(folder, source, mlx_values(source, folder, bits, 32), tmp_path / "bundle")
    arrays = mx.load(str(folder / "model.safetensors"))
    for name in matrices(source):
        module = name.removesuffix(".weight")
        np.testing.assert_array_equal(stored[f"{name}.codes"], np.array(arrays[name]).view(np.uint8))
        for part, theirs in (("scales", "scales"), ("offsets", "biases")):
            expected = np.array(arrays[f"{module}.{theirs}"].astype(mx.float32))
            np.testing.assert_array_equal(stored[f"{name}.{part}"].astype(np.float32), expected)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (6, 32)])
def test_mlx_in_other_widths_without_settings(source: Source, tmp_path: Path, bits: int, group_size: int) -> None:
    """Nothing but the declared width tells 6 bits in groups of 32 from 3 bits in groups of 64."""
    folder = quantize_folder(source.folder, tmp_path / "mlx", bits, group_size)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    values = mlx_values(source, folder, bits, group_size)
    stored = check_outputs(folder, source, values, tmp_path / "bundle")
    for name in matrices(source):
        rows = GroupedQuantRows(*(stored[f"{name}.{part}"] for part in ("codes", "scales", "offsets")))
        held = {3: 4, 6: 8}[bits]
        np.testing.assert_array_equal(dequantize(rows, GroupedQuantFormat(held, group_size, 0)), values[name])


def test_mlx_to_gguf_and_back(source: Source, tmp_path: Path) -> None:
    folder = quantize_folder(source.folder, tmp_path / "mlx", 4, 32)
    report = intaglio.convert(folder, tmp_path / "model.gguf")
    assert report.rounded == ()
    assert {t.storage for t in report.tensors if t.source_storage == "MLX4"} == {"Q4_1"}
    values = mlx_values(source, folder, 4, 32)
    check_outputs(tmp_path / "model.gguf", source, values, tmp_path / "bundle")
    if source.oracle.config.rope_parameters["rope_type"] == "llama3":
        return  # config.json has no key for what the file says of it
    intaglio.convert(tmp_path / "model.gguf", tmp_path / "again")
    before, after = (mx.load(str(path / "model.safetensors")) for path in (folder, tmp_path / "again"))
    assert set(before) == set(after)
    for name, array in before.items():
        if array.ndim > 1:
            assert array.dtype == after[name].dtype
        assert np.array_equal(np.array(array.astype(mx.float32)), np.array(after[name].astype(mx.float32))), name
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_1", "Q4_0"])
def test_gguf_to_mlx_and_back(source: Source, tmp_path: Path, storage: str) -> None:
    if source.oracle.config.rope_parameters["rope_type"] == "llama3":
        pytest.skip("config.json has no key for rope_freqs.weight")
    path, folder = tmp_path / "model.gguf", tmp_path / "mlx"
    intaglio.convert(source.folder, path, storage=storage)
    report = intaglio.convert(path, folder)
    assert report.rounded == ()
    bits = 8 if storage == "Q8_0" else 4
    expected = gguf_values(source, storage)
    for name, values in mlx_values(source, folder, bits, 32).items():
        np.testing.assert_array_equal(values, expected[name], name)
    check_outputs(folder, source, expected, tmp_path / "bundle")
    intaglio.convert(folder, tmp_path / "again.gguf")
    assert path.read_bytes() == (tmp_path / "again.gguf").read_bytes()


@pytest.mark.parametrize("storage", [None, "F16", "Q8_0"])
def test_transformers_loads_the_gguf_file(source: Source, tmp_path: Path, storage: str | None) -> None:
    if source.oracle.config.model_type == "llama" and source.oracle.config.attention_bias:
        pytest.skip("transformers does not look for biases in GGUF files of llama")
    intaglio.convert(source.folder, tmp_path / "model.gguf", storage=storage)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )  # fmt: skip
    assert type(loaded) is type(source.oracle)
    expected = source.weights() if storage is None else gguf_values(source, storage)
    found = {name: parameter.detach().numpy() for name, parameter in loaded.named_parameters()}
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.architecture"].contents() == source.oracle.config.model_type


def test_transformers_loads_the_folder(source: Source, tmp_path: Path) -> None:
    if source.oracle.config.rope_parameters["rope_type"] == "llama3":
        pytest.skip("config.json has no key for rope_freqs.weight")
    intaglio.convert(source.folder, tmp_path / "model.gguf")
    intaglio.convert(tmp_path / "model.gguf", tmp_path / "folder", shard_bytes=40_000)
    assert (tmp_path / "folder" / "model.safetensors.index.json").is_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32, attn_implementation="eager"
    )  # fmt: skip
    assert type(loaded) is type(source.oracle)
    ids = torch.arange(40)[None] % 97
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, source.oracle(ids).logits)
