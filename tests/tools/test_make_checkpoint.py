"""The checkpoints that the maker writes are what diffusers, transformers, MLX and gguf take them for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from klein import make_checkpoint as maker

from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.gguf_writer import GgufTensor
from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize, unpack_codes

SEED = 5
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")


def arrays(path: Path) -> dict[str, np.ndarray]:
    """What MLX reads from a safetensors file, float32."""
    return {name: np.array(array.astype(mx.float32)) for name, array in mx.load(str(path)).items()}


def unpacked(path: Path, bits: int, group_size: int) -> dict[str, np.ndarray]:
    """What MLX makes of a file of quantized matrices in the dtype of their scales."""
    stored = mx.load(str(path))
    found = {}
    for name, array in stored.items():
        module = name.removesuffix(".weight")
        if array.dtype == mx.uint32:
            parts = (array, stored[f"{module}.scales"], stored[f"{module}.biases"])
            found[name] = np.array(mx.dequantize(*parts, group_size=group_size, bits=bits).astype(mx.float32))
        elif not name.endswith((".scales", ".biases")):
            found[name] = np.array(array.astype(mx.float32))
    return found


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return maker.write_pipeline(tmp_path_factory.mktemp("klein") / "pipeline", seed=SEED)


@pytest.fixture(scope="module")
def transformer(folder: Path) -> dict[str, np.ndarray]:
    """The transformer's values under diffusers' names."""
    return arrays(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def test_diffusers_runs_the_whole_pipeline(folder: Path) -> None:
    pipe = diffusers.Flux2KleinPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config.is_distilled
    images = pipe(
        prompt="a tiny bonsai tree",
        height=64,
        width=48,
        num_inference_steps=4,
        text_encoder_out_layers=maker.TINY.layers,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images
    assert images.shape == (1, 64, 48, 3)
    # A picture that is neither grey nor only black and white.
    assert images.std() > 0.05
    assert ((images == 0) | (images == 1)).mean() < 0.2


@pytest.mark.parametrize(
    ("part", "load"),
    [
        ("transformer", diffusers.Flux2Transformer2DModel.from_pretrained),
        ("vae", diffusers.AutoencoderKLFlux2.from_pretrained),
        ("text_encoder", transformers.Qwen3ForCausalLM.from_pretrained),
    ],
)
def test_every_tensor_has_its_place_in_the_component(folder: Path, part: str, load: Callable[..., Any]) -> None:
    model, report = load(folder / part, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    file = next((folder / part).glob("*.safetensors"))
    state = {name: value.float().numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    same(state, arrays(file))


@pytest.mark.parametrize(("dtype", "storage"), [("BF16", "BF16"), ("F32", "F32")])
def test_small_decoder_and_float32(tmp_path: Path, dtype: str, storage: str) -> None:
    maker.write_vae(tmp_path, seed=SEED, decoder="small", dtype=dtype)
    model, report = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.decoder.conv_out.weight.shape == (3, maker.TINY.small_decoder[0], 3, 3)
    assert model.encoder.conv_in.weight.shape[0] == maker.TINY.vae["block_out_channels"][0]
    stored = open_checkpoint(tmp_path).tensors
    assert {tensor.storage for tensor in stored.values()} == {storage, "I64"}
    assert model.bn.running_var.min() > 0


def test_packed_transformer_is_the_same_model(tmp_path: Path, transformer: dict[str, np.ndarray]) -> None:
    maker.write_transformer(tmp_path / "packed.safetensors", "mlx", seed=SEED)
    same(unpacked(tmp_path / "packed.safetensors", 2, 128), transformer)
    stored = mx.load(str(tmp_path / "packed.safetensors"))
    assert {array.dtype for array in stored.values()} == {mx.uint32, mx.bfloat16}
    quantized = [name.removesuffix(".weight") for name, array in stored.items() if array.dtype == mx.uint32]
    assert len(quantized) == 2 * 12 + 3 * 2
    zeros = []
    for module in quantized:
        scales = np.array(stored[f"{module}.scales"].astype(mx.float32))
        np.testing.assert_array_equal(np.array(stored[f"{module}.biases"].astype(mx.float32)), -scales)
        np.testing.assert_array_equal(scales.astype(np.float16).astype(np.float32), scales)
        weight = transformer[f"{module}.weight"]
        assert abs(weight.std() * np.sqrt(weight.shape[1]) - 1) < 0.05, module
        # Common to all inputs a mean would grow from block to block.
        assert abs(weight.mean()) < 5 * weight.std() / np.sqrt(weight.size), module
        zeros.append((weight == 0).mean())
    assert 0.3 < np.mean(zeros) < 0.4


def test_gguf_transformer_is_the_same_model(tmp_path: Path, transformer: dict[str, np.ndarray]) -> None:
    maker.write_transformer(tmp_path / "dit.gguf", "gguf", seed=SEED)
    opened = open_checkpoint(tmp_path / "dit.gguf")
    found = {}
    for name, tensor in opened.tensors.items():
        rows = tensor.read()
        if isinstance(rows, GroupedQuantRows):
            assert tensor.storage == "TQ2_0_g128"
            assert tensor.layout is not None
            found[f"{name}.weight"] = dequantize(rows, tensor.layout.format)
        else:
            assert tensor.storage == "BF16"
            found[name] = rows.astype(np.float32)
    same(found, transformer)
    names = list(opened.tensors)
    count = sum(not name.endswith(".weight") for name in names)
    assert names == sorted(names[:count]) + sorted(names[count:])
    assert opened.metadata["bonsai-image.attention.head_dim"] == 64


@pytest.mark.parametrize("prefix", ["", maker.BFL_PREFIX])
def test_bfl_transformer_is_the_same_model(tmp_path: Path, transformer: dict[str, np.ndarray], prefix: str) -> None:
    path = maker.write_transformer(tmp_path / "bfl.safetensors", "bfl", seed=SEED, prefix=prefix)
    # diffusers' own conversion of these files.
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    stored = arrays(path)
    assert all(name.startswith(prefix) for name in stored)
    state = {name.removeprefix(prefix): torch.from_numpy(array) for name, array in stored.items()}
    assert "double_blocks.1.txt_attn.norm.key_norm.scale" in state
    converted = convert_flux2_transformer_checkpoint_to_diffusers(state)
    same({name: value.numpy() for name, value in converted.items()}, transformer)


@pytest.mark.parametrize("config", [True, False])
def test_packed_text_encoder_is_the_same_model(tmp_path: Path, folder: Path, config: bool) -> None:
    maker.write_text_encoder(tmp_path, "mlx", seed=SEED, config=config)
    same(unpacked(tmp_path / "model.safetensors", 4, 64), arrays(folder / "text_encoder" / "model.safetensors"))
    assert (tmp_path / "config.json").is_file() == config
    if config:
        assert json.loads((tmp_path / "config.json").read_text())["quantization"] == {"bits": 4, "group_size": 64}
    stored = mx.load(str(tmp_path / "model.safetensors"))
    codes = unpack_codes(np.array(stored["model.embed_tokens.weight"]).view(np.uint8), 4)
    assert set(np.unique(codes)) == set(range(16))
    scales, biases = (
        np.array(stored[f"model.embed_tokens.{n}"].astype(mx.float32), "f8") for n in ("scales", "biases")
    )
    assert (scales < 0).any()
    # No rounding anywhere: the dense bfloat16 values are the products and sums themselves.
    exact = codes.reshape(*scales.shape, 64) * scales[..., None] + biases[..., None]
    dense = arrays(folder / "text_encoder" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(dense, exact.reshape(dense.shape))


@pytest.mark.parametrize("decoder", ["full", "small"])
def test_bfl_vae_is_the_same_model(tmp_path: Path, decoder: str) -> None:
    """By diffusers' own conversion of these files, which turns the convolutions of the attention into linear layers."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    stored = arrays(maker.write_vae(tmp_path / "ae.safetensors", spelling="bfl", seed=SEED, decoder=decoder))
    maker.write_vae(tmp_path / "vae", seed=SEED, decoder=decoder)
    assert stored["decoder.mid.attn_1.q.weight"].shape == (stored["decoder.conv_in.bias"].size,) * 2 + (1, 1)
    # Which has these two at the top, and does not know the statistics.
    inner = {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}
    state, expected = {}, arrays(tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    for name, array in stored.items():
        module, _, part = name.rpartition(".")
        state[f"{inner.get(module, module)}.{part}"] = torch.from_numpy(array)
    statistics = {name: array.numpy() for name, array in state.items() if name.startswith("bn.")}
    converted = convert_ldm_vae_checkpoint(state, dict(maker.TINY.vae))
    same({name: value.numpy() for name, value in converted.items()} | statistics, expected)


def test_gguf_text_encoder_is_the_same_model(tmp_path: Path, folder: Path) -> None:
    """By the names, keys and unpacking of llama.cpp's package: every value, and the tokenizer."""
    reader = gguf.GGUFReader(maker.write_text_encoder(tmp_path / "te.gguf", "gguf", seed=SEED))
    config = maker.TINY.text_encoder
    expected = arrays(folder / "text_encoder" / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    spelled = {names.get_name(name, (".weight",)): array for name, array in expected.items()}
    same({t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}, spelled)
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {"Q4_1"}
    keys = gguf.Keys
    for key, value in (
        (keys.LLM.BLOCK_COUNT, config["num_hidden_layers"]),
        (keys.LLM.CONTEXT_LENGTH, config["max_position_embeddings"]),
        (keys.LLM.EMBEDDING_LENGTH, config["hidden_size"]),
        (keys.LLM.FEED_FORWARD_LENGTH, config["intermediate_size"]),
        (keys.Attention.HEAD_COUNT, config["num_attention_heads"]),
        (keys.Attention.HEAD_COUNT_KV, config["num_key_value_heads"]),
        (keys.Attention.KEY_LENGTH, config["head_dim"]),
        (keys.Attention.VALUE_LENGTH, config["head_dim"]),
        (keys.Attention.LAYERNORM_RMS_EPS, np.float32(config["rms_norm_eps"])),
        (keys.Rope.FREQ_BASE, config["rope_theta"]),
    ):
        assert reader.fields[key.format(arch="qwen3")].contents() == value, key
    assert reader.fields[keys.General.ARCHITECTURE].contents() == "qwen3"
    assert reader.fields[keys.Tokenizer.CHAT_TEMPLATE].contents() == maker.CHAT_TEMPLATE
    ours = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert reader.fields[keys.Tokenizer.LIST].contents() == ours.convert_ids_to_tokens(range(len(ours)))


def test_tokenizer(folder: Path, tmp_path: Path, qwen3_folder: Path) -> None:
    ours = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(ours) == maker.TINY.text_encoder["vocab_size"]
    messages = [{"role": "user", "content": "a tiny bonsai tree"}]
    settings = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    text = ours.apply_chat_template(messages, **settings)
    assert maker.write_tokenizer(tmp_path, qwen3_folder) == 151669
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text == theirs.apply_chat_template(messages, **settings)
    assert ours.decode(ours(text)["input_ids"]) == text
    # Each special token is one, and so is each byte of the rest.
    assert len(ours(text)["input_ids"]) == len(text) - sum(len(t) - 1 for t in _SPECIAL)


def test_any_part_of_a_tensor_and_any_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import random_tensors

    monkeypatch.setattr(random_tensors, "_BLOCK_VALUES", 256 * 10)
    first, again, other = (maker.transformer_tensors(maker.TINY.transformer, seed) for seed in (1, 1, 2))
    name = "transformer_blocks.0.attn.to_q.weight"
    whole = first[name].read()
    assert isinstance(whole, GroupedQuantRows)
    for start, stop in ((0, 1), (7, 31), (10, 20), (255, 256)):
        part = again[name].read_rows(start, stop)
        assert isinstance(part, GroupedQuantRows)
        np.testing.assert_array_equal(part.codes, whole.codes[start:stop])
        np.testing.assert_array_equal(part.scales, whole.scales[start:stop])
    assert (other[name].read().codes != whole.codes).any()
    assert (first[name.replace("to_q", "to_k")].read().codes != whole.codes).any()


def test_published_sizes() -> None:
    tensors = maker.transformer_tensors(maker.SIZES["4B"].transformer)
    quantized = [t for t in tensors.values() if t.layout is not None]
    assert (len(quantized), len(tensors)) == (100, 169)
    assert sum(int(np.prod(t.shape)) for t in quantized) == 3_680_501_760
    assert sum(int(np.prod(t.shape)) for t in tensors.values()) == 3_875_544_576
    assert sum(GgufTensor(n, t).source.nbytes for n, t in tensors.items()) == 1_367_718_912
    encoder = maker.text_encoder_tensors(maker.SIZES["4B"].text_encoder)
    assert sum(int(np.prod(t.shape)) for t in encoder.values() if len(t.shape) == 2) == 4_022_272_000
    assert len(encoder) == 253 + 145
    vae = maker.SIZES["4B"].vae
    assert len(maker.vae_tensors(vae)) == 251
    small = {**vae, "decoder_block_out_channels": maker.SIZES["4B"].small_decoder}
    sizes = [
        sum(int(np.prod(t.shape)) for n, t in maker.vae_tensors(c).items() if n.startswith(("decoder.", "post_quant")))
        for c in (vae, small)
    ]
    assert [round(size / 1e5) for size in sizes] == [496, 279]


def test_command_line(tmp_path: Path, transformer: dict[str, np.ndarray]) -> None:
    tool = str(Path(__file__).resolve().parents[2] / "tools" / "make_checkpoint.py")
    target = tmp_path / "new" / "packed.safetensors"
    command = [sys.executable, tool, "transformer", str(target), "--spelling", "mlx", "--seed", str(SEED)]
    subprocess.run(command, check=True)
    same(unpacked(target, 2, 128), transformer)
    refused = subprocess.run([sys.executable, tool, "vae", "x", "--spelling", "mlx"], capture_output=True, check=False)
    assert refused.returncode == 2
    assert b"vae has no spelling mlx" in refused.stderr
