"""Adapters that peft and diffusers made, in our graphs, against peft's and diffusers' own models.

Bounds: relative L2 of logits and predictions 1e-5 in float32, where measured are at most 2e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import flux2_models
import gguf
import numpy as np
import peft
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_flux2_lora_to_diffusers
from gguf_models import TinyGGUF
from klein import make_checkpoint as maker
from run_graph import run_onnxruntime, run_tract
from safetensors.torch import load_file, save_file
from tiny_models import GGUF_MODELS, TINY_MODELS

import intaglio
from intaglio.runtimes.parity import compare

BOUND = 1e-5
TINY = {tiny.name: tiny for tiny in TINY_MODELS}
QUANTIZED = {
    "llama-biases-Q4_0": TinyGGUF(GGUF_MODELS["llama-biases"], gguf.GGMLQuantizationType.Q4_0),
    "qwen3-Q4_1": TinyGGUF(GGUF_MODELS["qwen3"], gguf.GGMLQuantizationType.Q4_1),
    "llama-wide-Q8_0": TinyGGUF(GGUF_MODELS["llama-wide"], gguf.GGMLQuantizationType.Q8_0),
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def fill(model: torch.nn.Module, seed: int) -> None:
    """Adapters large enough to matter, in both matrices."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.5 * parameter.shape[-1] ** -0.5)


def write_adapter(model: torch.nn.Module, folder: Path, seed: int, **settings: Any) -> Path:
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": LINEARS, **settings})
    adapted = peft.get_peft_model(copy.deepcopy(model), config)  # type: ignore[arg-type]
    fill(adapted, seed)
    adapted.save_pretrained(folder)
    return folder


def with_adapters(model: torch.nn.Module, adapters: Sequence[tuple[Path, float]]) -> peft.PeftModel:
    (first, _), *others = adapters
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), first, "0")  # type: ignore[arg-type]
    for i, (folder, _) in enumerate(others, 1):
        adapted.load_adapter(folder, str(i))
    adapted.base_model.set_adapter([str(i) for i in range(len(adapters))])
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for i, (_, strength) in enumerate(adapters):
                module.set_scale(str(i), strength)
    return adapted.eval()


def feeds(vocab_size: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(4).integers(0, vocab_size, (2, 11))
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.repeat(np.arange(11)[None], 2, axis=0),
    }


def check_runs(bundle: Path, inputs: dict[str, np.ndarray], expected: np.ndarray) -> None:
    """The portable graph in two runtimes and the compiled engine."""
    intaglio.compile(bundle)
    engine = intaglio.load(bundle).engine
    runs = {
        "onnxruntime": run_onnxruntime(bundle / "score.onnx", inputs),
        "tract": run_tract(bundle / "score.onnx", inputs),
        "cpu": engine.load("score").run(inputs),
    }
    for name, found in runs.items():
        difference = compare(name, found["logits"], expected)
        assert difference.relative_l2 <= BOUND, difference


def logits(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(inputs["input_ids"])).logits.numpy()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-yarn"])
def test_a_dense_language_model(name: str, tmp_path: Path) -> None:
    model = TINY[name].build(tmp_path / "model")
    adapters = [
        (write_adapter(model, tmp_path / "a", 1, rank_pattern={r"layers\.1\..*": 2}, alpha_pattern={"q_proj": 9}), 0.8),
        (write_adapter(model, tmp_path / "b", 2, use_rslora=True, target_modules="all-linear"), -0.4),
    ]
    inputs = feeds(97)
    expected = logits(with_adapters(model, adapters), inputs)
    assert compare("base", logits(model, inputs), expected).relative_l2 > 0.1
    intaglio.export(tmp_path / "model", tmp_path / "bundle", lora=adapters)
    check_runs(tmp_path / "bundle", inputs, expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_language_model(name: str, tmp_path: Path) -> None:
    model = QUANTIZED[name].build(tmp_path / "model")
    adapters = [
        (write_adapter(model, tmp_path / "a", 1), 0.8),
        (write_adapter(model, tmp_path / "b", 2, r=3, use_rslora=True, target_modules=["q_proj", "up_proj"]), -0.4),
    ]
    inputs = feeds(97)
    expected = logits(with_adapters(model, adapters), inputs)
    assert compare("base", logits(model, inputs), expected).relative_l2 > 0.1
    intaglio.export(tmp_path / "model" / "model.gguf", tmp_path / "bundle", lora=adapters)
    check_runs(tmp_path / "bundle", inputs, expected)


def test_an_output_head_and_a_narrow_dtype(tmp_path: Path) -> None:
    """Bound: 0.02, what activations of 10 and 7 bits come to. Measured: 2e-3 and 9e-3."""
    model = QUANTIZED["qwen3-Q4_1"].build(tmp_path / "model")
    adapters = [(write_adapter(model, tmp_path / "a", 1, target_modules=[*LINEARS, "lm_head"]), 0.8)]
    inputs = feeds(97)
    expected = logits(with_adapters(model, adapters), inputs)
    without = [(write_adapter(model, tmp_path / "b", 1), 0.8)]
    assert compare("head", logits(with_adapters(model, without), inputs), expected).relative_l2 > 0.1
    for dtype, bound in (("float32", BOUND), ("float16", 0.02), ("bfloat16", 0.02)):
        bundle = tmp_path / dtype
        intaglio.export(tmp_path / "model" / "model.gguf", bundle, lora=adapters, dtype=dtype)
        intaglio.compile(bundle)
        found = intaglio.load(bundle).engine.load("score").run(inputs)["logits"]
        assert compare(dtype, found, expected).relative_l2 <= bound


def test_the_fast_engine(tmp_path: Path) -> None:
    """Activations of 8 bits cost as much with an adapter as without: at most 1.5 times, and 0.05."""
    model = QUANTIZED["llama-wide-Q8_0"].build(tmp_path / "model")
    adapters = [(write_adapter(model, tmp_path / "a", 1), 1.0)]
    inputs, errors = feeds(97), []
    for name, chosen in (("plain", []), ("bundle", adapters)):
        intaglio.export(tmp_path / "model" / "model.gguf", tmp_path / name, lora=chosen)
        report = intaglio.compile(tmp_path / name, accuracy="fast")
        assert report.stages["score"].accuracy == "fast"
        found = intaglio.load(tmp_path / name).engine.load("score").run(inputs)["logits"]
        expected = logits(with_adapters(model, chosen) if chosen else model, inputs)
        errors.append(compare(name, found, expected).relative_l2)
    assert 1e-4 < errors[1] <= min(0.05, 1.5 * errors[0]), errors


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    maker.write_pipeline(folder / "pipeline", seed=5)
    (folder / "packed").mkdir()
    maker.write_transformer(folder / "packed" / "packed.safetensors", "mlx", seed=5)
    return folder


def transformer(pictures: Path) -> diffusers.Flux2Transformer2DModel:
    return diffusers.Flux2Transformer2DModel.from_pretrained(pictures / "pipeline" / "transformer").eval()


def bfl_adapter(model: diffusers.Flux2Transformer2DModel, down: str, up: str) -> dict[str, torch.Tensor]:
    """Random pairs for modules of both kinds of block and outside, in Black Forest Labs' spelling."""
    width, mlp = model.inner_dim, model.transformer_blocks[0].ff.linear_out.weight.shape[1]
    shapes = {
        "double_blocks.0.img_attn.qkv": (3 * width, width),
        "double_blocks.0.txt_attn.qkv": (3 * width, width),
        "double_blocks.0.img_attn.proj": (width, width),
        "double_blocks.0.img_mlp.0": (2 * mlp, width),
        "double_blocks.0.txt_mlp.2": (width, mlp),
        "single_blocks.0.linear1": (3 * width + 2 * mlp, width),
        "single_blocks.1.linear2": (width, width + mlp),
        "img_in": tuple(model.x_embedder.weight.shape),
        "double_stream_modulation_img.lin": (6 * width, width),
        "final_layer.linear": tuple(model.proj_out.weight.shape),
    }
    torch.manual_seed(3)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}.{down}.weight"] = torch.randn(3, columns) * columns**-0.5
        tensors[f"{name}.{up}.weight"] = torch.randn(rows, 3) * 0.4
    return tensors


def check_prediction(pictures: Path, bundle: Path, expected_of: diffusers.Flux2Transformer2DModel) -> None:
    inputs = flux2_models.feeds(dict(expected_of.config), 1, [(4, 3)], 5)
    with torch.no_grad():
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        ids = {name: tensors[name][0] for name in ("img_ids", "txt_ids")}
        expected = expected_of(**{**tensors, **ids}).sample.numpy()
    engine = run_onnxruntime(bundle / "transformer.onnx", inputs)
    difference = compare("noise_pred", engine["noise_pred"], expected)
    assert difference.relative_l2 <= BOUND, difference


def test_diffusers_adapter(pictures: Path, tmp_path: Path) -> None:
    model = transformer(pictures)
    targets = [
        "to_q",
        "to_k",
        "to_out.0",
        "add_v_proj",
        "linear_in",
        "to_qkv_mlp_proj",
        "norm_out.linear",
        "x_embedder",
    ]
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    fill(model, 1)
    model.save_lora_adapter(tmp_path / "a")
    files = [tmp_path / "a" / "pytorch_lora_weights.safetensors", tmp_path / "b" / "pytorch_lora_weights.safetensors"]
    layers = peft.get_peft_model_state_dict(model)
    metadata = model.peft_config["default"].to_dict()
    diffusers.Flux2KleinPipeline.save_lora_weights(tmp_path / "b", layers, transformer_lora_adapter_metadata=metadata)
    assert all(name.startswith("transformer.") for name in load_file(files[1]))
    for file in files:
        bundle = intaglio.export(
            pictures / "pipeline", tmp_path / "bundle", lora=[file], stages=["transformer"], hidden_states=()
        )
        assert bundle.adapters[0].modules == {"transformer": len(layers) // 2}
        check_prediction(pictures, tmp_path / "bundle", model)


def test_fused_names_of_flux2(pictures: Path, tmp_path: Path) -> None:
    """In Black Forest Labs' spelling, with dots and in kohya's manner; diffusers converts the first itself."""
    model = transformer(pictures)
    tensors = bfl_adapter(model, "lora_A", "lora_B")
    dotted = {f"diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    model.load_lora_adapter(_convert_non_diffusers_flux2_lora_to_diffusers(dict(dotted)), prefix="transformer")
    flat = {}
    for name, tensor in bfl_adapter(model, "lora_down", "lora_up").items():
        stem, part = name.removesuffix(".weight").rsplit(".", 1)
        module = f"lora_unet_{stem.replace('.', '_')}"
        flat[f"{module}.{part}.weight"] = tensor
        flat[f"{module}.alpha"] = torch.tensor(3.0)
    hashes = []
    for tensors, name in ((dotted, "dotted"), (flat, "kohya")):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        lora = [tmp_path / f"{name}.safetensors"]
        bundle = intaglio.export(pictures / "pipeline", tmp_path / "bundle", lora=lora, stages=["transformer"])
        assert bundle.adapters[0].modules == {"transformer": 10}
        check_prediction(pictures, tmp_path / "bundle", model)
        hashes.append(bundle.weights.sha256)
    assert hashes[0] == hashes[1]


def test_a_ternary_transformer(pictures: Path, tmp_path: Path) -> None:
    model = transformer(pictures)
    save_file({f"diffusion_model.{n}": t for n, t in bfl_adapter(model, "lora_A", "lora_B").items()}, tmp_path / "a.st")
    lora = [(tmp_path / "a.st", 0.7)]
    bundle = intaglio.export(
        pictures / "pipeline",
        tmp_path / "bundle",
        transformer=pictures / "packed",
        lora=lora,
        stages=["transformer"],
        config={f"transformer.{key}": model.config[key] for key in ("patch_size", "rope_theta", "eps")}
        | {"transformer.axes_dims_rope": list(model.config["axes_dims_rope"])},
    )
    assert any(q.bits == 2 for q in bundle.components["transformer"].quantization)
    state = _convert_non_diffusers_flux2_lora_to_diffusers(dict(load_file(tmp_path / "a.st")))
    model.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    model.set_adapters(["a"], [0.7])
    check_prediction(pictures, tmp_path / "bundle", model)


def test_swapped_rows(pictures: Path, tmp_path: Path) -> None:
    """A file of Black Forest Labs has the last modulation as shift and scale: adding to it before is adding after."""
    (tmp_path / "bfl").mkdir()
    maker.write_transformer(tmp_path / "bfl" / "plain.safetensors", "bfl", seed=5)
    tensors = load_file(tmp_path / "bfl" / "plain.safetensors")
    name = next(key for key in tensors if key.endswith("final_layer.adaLN_modulation.1.weight"))
    rows, columns = tensors[name].shape
    torch.manual_seed(1)
    down, up = torch.randn(2, columns), torch.randn(rows, 2)
    stem = "diffusion_model.final_layer.adaLN_modulation.1"
    save_file({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "a.safetensors")
    save_file({**tensors, name: tensors[name] + up @ down}, tmp_path / "merged.safetensors")
    model = transformer(pictures)
    settings: dict[str, Any] = {
        f"transformer.{key}": model.config[key] for key in ("patch_size", "rope_theta", "eps")
    } | {"transformer.axes_dims_rope": list(model.config["axes_dims_rope"])}
    found = []
    for file, lora in (("bfl/plain", [tmp_path / "a.safetensors"]), ("merged", [])):
        source = tmp_path / f"{file}.safetensors"
        intaglio.export(None, tmp_path / "b", transformer=source, lora=lora, stages=["transformer"], config=settings)
        import onnx_ir as ir

        graph = ir.load(tmp_path / "b" / "transformer.onnx").graph
        found.append(graph.initializers["norm_out.linear.weight"].const_value.numpy())  # type: ignore[union-attr]
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


def test_parts_by_prefix(pictures: Path, tmp_path: Path) -> None:
    model = transformer(pictures)
    rng = np.random.default_rng(0)
    width = model.inner_dim
    encoder = maker.TINY
    tensors = {}
    for name, rows, columns in (
        ("transformer.transformer_blocks.0.attn.to_q", width, width),
        ("text_encoder.model.layers.0.mlp.down_proj", *encoder_shape(pictures)),
    ):
        tensors[f"{name}.lora_A.weight"] = torch.from_numpy(rng.standard_normal((2, columns), np.float32))
        tensors[f"{name}.lora_B.weight"] = torch.from_numpy(rng.standard_normal((rows, 2), np.float32))
    save_file(tensors, tmp_path / "a.safetensors")
    lora = [tmp_path / "a.safetensors"]
    bundle = intaglio.export(pictures / "pipeline", tmp_path / "bundle", lora=lora, hidden_states=encoder.layers)
    assert bundle.adapters[0].modules == {"text_encoder": 1, "transformer": 1}
    with pytest.raises(
        intaglio.IntaglioError, match=r"1 of 2 modules are unknown to the model \(transformer\): text_enc"
    ):
        intaglio.export(pictures / "pipeline", tmp_path / "bundle", lora=lora, stages=["transformer"])


def encoder_shape(pictures: Path) -> tuple[int, int]:
    import json

    config = json.loads((pictures / "pipeline" / "text_encoder" / "config.json").read_text())
    return config["hidden_size"], config["intermediate_size"]
