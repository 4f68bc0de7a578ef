"""Packed checkpoints in torch: the codes and scales of the file, kept through saving, and gradients past them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import peft
import pytest
import torch
import transformers
from diffusers import Flux2Transformer2DModel
from flux2_models import TERNARY as FLUX2
from flux2_models import feeds, tiny_model
from safetensors.numpy import load_file, save_file
from torch import nn

from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.checkpoints.tensors import QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes
from intaglio.kernels.quantize import SCALE_DTYPE, Quantization
from intaglio.trainer.loading import FrozenQuantizedLinear, load_quantized
from intaglio.trainer.quantization import QuantizationRule, quantize_linears
from intaglio.trainer.saving import save_quantized

TERNARY = Quantization("ternary", 128)


def llama(*, tied: bool, seed: int = 3) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=["llama", "llama-tied", "flux2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A quantized model, another of its class with other weights, and where the first is saved."""
    if request.param == "flux2":
        model: Any = tiny_model(FLUX2)
        other: Any = Flux2Transformer2DModel(**FLUX2).eval()
        rules = [QuantizationRule("*transformer_blocks.*", TERNARY)]
    else:
        tied = request.param == "llama-tied"
        model, other = llama(tied=tied).eval(), llama(tied=tied, seed=4).eval()
        rules = [
            QuantizationRule("*.mlp.down_proj", Quantization("int8")),
            QuantizationRule("*.mlp.*", Quantization("affine4", 32)),
            QuantizationRule("model.layers.*", TERNARY),
        ]
    quantize_linears(model, rules)
    folder = tmp_path_factory.mktemp(request.param)
    save_quantized(model, folder)
    return model, other, folder


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, Flux2Transformer2DModel):
            inputs = feeds(FLUX2, 1, [(3, 4)], 5)
            return model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).sample
        return model(input_ids=torch.arange(24).view(2, 12)).logits


def test_a_loaded_model_computes_what_the_saved_one_did_and_is_saved_alike(
    saved: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    model, other, folder = saved
    packed = load_quantized(other, folder)
    frozen = [name for name, module in other.named_modules() if isinstance(module, FrozenQuantizedLinear)]
    assert sorted(packed) == sorted(frozen)
    assert len(packed) == (16 if isinstance(other, Flux2Transformer2DModel) else 14)
    assert torch.equal(outputs(other), outputs(model))
    # Requantizing would change scales.
    with pytest.raises(ConfigError, match="is a FrozenQuantizedLinear"):
        quantize_linears(other, [QuantizationRule("*.0.*", TERNARY)])
    # Neither a cast of the model nor a copy of it changes a scale.
    save_quantized(other.to(torch.float16).float(), tmp_path)
    before, after = (load_file(next(path.glob("*.safetensors"))) for path in (folder, tmp_path))
    assert before.keys() == after.keys()
    triplets = [
        name for name in before if name.removesuffix(".weight") in packed or name.endswith(("scales", "biases"))
    ]
    assert len(triplets) == 3 * len(packed)
    assert all(np.array_equal(before[name], after[name]) for name in triplets)
    configs = [json.loads((path / "config.json").read_text())["quantization"] for path in (folder, tmp_path)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), SCALE_DTYPE, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_unpacked_weights_are_the_reference_s(bits: int, dtype: np.dtype[Any], has_offsets: bool) -> None:
    rng = np.random.default_rng(bits)
    layout = QuantizedLayout(GroupedQuantFormat(bits, 32, 1), dtype, has_offsets)
    codes = pack_codes(rng.integers(0, 1 << bits, (9, 96)).astype(np.uint8), bits)
    scales, offsets = (rng.standard_normal((9, 3)).astype(dtype) for _ in range(2))
    rows = GroupedQuantRows(codes, scales, offsets if has_offsets else np.zeros((), dtype))
    layer = FrozenQuantizedLinear(rows, layout)
    assert (layer.in_features, layer.out_features) == (96, 9)
    for moved in (layer, layer.half(), layer.to(torch.bfloat16)):
        assert np.array_equal(moved.unpacked().numpy(), dequantize(rows, layout.format))
    back = layer.rows()
    assert np.array_equal(back.codes, rows.codes)
    assert np.array_equal(back.scales, rows.scales)
    assert np.array_equal(back.offsets, rows.offsets)
    other = FrozenQuantizedLinear(GroupedQuantRows(codes * 0, scales * 0, rows.offsets), layout)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.unpacked(), layer.unpacked())


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_pass_a_frozen_layer(autocast: bool) -> None:
    """As those of a dense layer of the same weights; the weight itself has none."""
    rng = np.random.default_rng(6)
    layout = QuantizedLayout(GroupedQuantFormat(4, 32, 8), SCALE_DTYPE, has_offsets=False)
    codes = pack_codes(rng.integers(0, 16, (24, 64)).astype(np.uint8), 4)
    scales = rng.uniform(0.01, 0.1, (24, 2)).astype(SCALE_DTYPE)
    layer = FrozenQuantizedLinear(
        GroupedQuantRows(codes, scales, np.zeros((), SCALE_DTYPE)), layout, nn.Parameter(torch.randn(24))
    )
    dense = nn.Linear(64, 24)
    dense.load_state_dict({"weight": layer.unpacked(), "bias": layer.bias.detach()})
    x = torch.randn(2, 5, 64)
    found = []
    for module in (layer, dense):
        inputs = x.clone().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(inputs)
        (y.float() ** 2).sum().backward()
        found.append([y, inputs.grad, module.bias.grad])
    for ours, expected in zip(*found, strict=True):
        assert ours is not None
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=2e-2 if autocast else 1e-6, atol=0.1 if autocast else 1e-5)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_adapters_go_onto_packed_layers_and_are_not_merged_into_them() -> None:
    """peft would add to the unpacked weight, which is lost without a word."""
    layout = QuantizedLayout(GroupedQuantFormat(8, 32, 128), SCALE_DTYPE, has_offsets=False)
    rows = GroupedQuantRows(np.full((4, 32), 130, np.uint8), np.ones((4, 1), SCALE_DTYPE), np.zeros((), SCALE_DTYPE))
    layer = FrozenQuantizedLinear(rows, layout)
    assert (layer.weight == 2).all()
    assert type(layer.weight + 1) is torch.Tensor
    with pytest.raises(WeightsError, match="a packed layer cannot be changed"):
        layer.weight.data += 1
    base = nn.Sequential(layer, nn.LayerNorm(4))
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    x = torch.randn(3, 32)
    adapter = model.base_model.model[0]
    delta = adapter.get_delta_weight("default")
    torch.testing.assert_close(adapter(x), x @ (layer.unpacked() + delta).T)
    with pytest.raises(WeightsError, match="a packed layer cannot be changed"):
        model.merge_and_unload()


def test_a_published_mlx_model_with_a_packed_embedding(tmp_path: Path) -> None:
    """Written by the mlx package: 4 bits in all matrices, the tied embedding among them."""
    model = llama(tied=True)
    arrays = {name: mx.array(value.numpy()) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    expected = llama(tied=True, seed=9)
    state, written = expected.state_dict(), dict[str, np.ndarray]()
    for name, value in arrays.items():
        if value.ndim < 2:
            written[name] = np.array(value)
            state[name] = torch.from_numpy(np.array(value))
            continue
        parts = mx.quantize(value, group_size=64, bits=4)
        module = name.removesuffix(".weight")
        written |= {
            f"{module}.{key}": np.array(p) for key, p in zip(("weight", "scales", "biases"), parts, strict=True)
        }
        state[name] = torch.from_numpy(np.array(mx.dequantize(*parts, group_size=64, bits=4)))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    expected.load_state_dict(state)
    save_file(written, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    loaded = llama(tied=True, seed=10)
    assert len(load_quantized(loaded, tmp_path)) == 14
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(outputs(loaded.eval()), outputs(expected.eval()))


def test_tensors_of_another_model_are_refused(saved: tuple[Any, Any, Path], tmp_path: Path) -> None:
    _, _, folder = saved
    file = next(folder.glob("*.safetensors"))
    stored = load_file(file)
    dense = next(
        name for name in stored if f"{name.removesuffix('.weight')}.scales" not in stored and ".scales" not in name
    )

    def load(tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, tmp_path / file.name)
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        other: Any = Flux2Transformer2DModel(**FLUX2) if "diffusion" in file.name else llama(tied="tied" in folder.name)
        load_quantized(other, tmp_path)

    load(stored)
    with pytest.raises(WeightsError, match=r"odd\.weight is no tensor of"):
        load({**stored, "odd.weight": np.zeros(3, np.float32)})
    with pytest.raises(WeightsError, match=f"has no {dense}, which"):
        load({name: value for name, value in stored.items() if name != dense})
    with pytest.raises(WeightsError, match=rf"{dense} is \[3\], expected"):
        load({**stored, dense: np.zeros(3, np.float32)})
