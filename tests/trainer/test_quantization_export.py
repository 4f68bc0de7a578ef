"""From torch's forward pass to the engine: the same codes and scales at every stop, and the same activations.

On a language model of transformers with all formats in it, and on diffusers' FLUX.2 transformer. Bounds: weights equal;
every tap and output of the exact engine within a relative L2 of 1e-5. Measured: at most 2e-6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from flux2_models import TERNARY as TINY_TERNARY
from flux2_models import check, feeds, run_oracle, tiny_model
from klein import make_checkpoint as maker
from safetensors.numpy import load_file
from torch import nn

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.gguf_blocks import StoredTensor
from intaglio.exporters.checkpoints.gguf_pack import repack_rows
from intaglio.exporters.convert import convert
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize
from intaglio.kernels.quantize import Quantization, quantize
from intaglio.runtimes.parity import compare
from intaglio.trainer.quantization import QuantizationRule, QuantizedLinear, quantize_linears, quantized_weight
from intaglio.trainer.saving import save_quantized

BOUND = 1e-5
TERNARY = Quantization("ternary", 128)
RULES = [
    QuantizationRule("lm_head", Quantization("affine4", 32)),
    QuantizationRule("*.down_proj", Quantization("int8")),
    QuantizationRule("*.q_proj", Quantization("affine4", 64)),
    QuantizationRule("model.layers.1.self_attn.v_proj", None),
    QuantizationRule("model.layers.*", TERNARY),
]
# GGUF files of this model have no other width of the timestep's embedding.
FLUX2 = {**TINY_TERNARY, "timestep_guidance_channels": 256}
BLOCKS = [QuantizationRule(f"{kind}.*", TERNARY) for kind in ("transformer_blocks", "single_transformer_blocks")]


@dataclass
class Saved:
    """A model, its quantized layers, the folder it was saved in, and what reads itself from there."""

    model: Any
    layers: dict[str, Quantization]
    folder: Path

    def layer(self, name: str) -> QuantizedLinear:
        module = self.model.get_submodule(name)
        assert isinstance(module, QuantizedLinear)
        return module


def language_model() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(20)
    model = transformers.Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.normal_(1.0, 0.3)
    return model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """After a few steps of training, so that weights are no longer what they were made as."""
    model, folder = language_model(), tmp_path_factory.mktemp("qwen3")
    layers = quantize_linears(model, RULES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        ids = torch.randint(0, 97, (4, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_quantized(model.eval(), folder)
    return Saved(model, layers, folder)


@pytest.fixture(scope="module")
def flux2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model, folder = tiny_model(FLUX2), tmp_path_factory.mktemp("flux2") / "transformer"
    layers = quantize_linears(model, BLOCKS)
    save_quantized(model, folder)
    return Saved(model, layers, folder)


@pytest.fixture(params=["qwen3", "flux2"])
def saved(request: pytest.FixtureRequest) -> Saved:
    value = request.getfixturevalue(request.param)
    assert isinstance(value, Saved)
    return value


def test_every_layer_in_the_file_has_the_codes_and_scales_of_the_forward_pass(saved: Saved) -> None:
    """Read with the safetensors package, and the bytes compared with those of the quantizer."""
    files = sorted(saved.folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        "model.safetensors" if saved.folder.name != "transformer" else "diffusion_pytorch_model.safetensors"
    ]
    stored = load_file(files[0])
    quantized = {name: saved.layer(name) for name in saved.layers}
    assert len(quantized) == (14 if saved.folder.name != "transformer" else 16)
    for name, layer in quantized.items():
        rows = quantize(layer.weight.detach().numpy(), layer.quantization)
        codes, scales, biases = (stored.pop(f"{name}.{part}") for part in ("weight", "scales", "biases"))
        assert codes.dtype == np.uint32
        assert np.array_equal(codes.view(np.uint8), rows.codes), name
        size = layer.quantization.group_size or 128
        assert scales.shape == biases.shape == (layer.out_features, layer.in_features // size)
        # int8 has one scale a row, repeated.
        assert np.array_equal(scales, np.broadcast_to(rows.scales, scales.shape)), name
        zero = {"ternary": 1, "int8": 128}.get(layer.quantization.format, 0)
        expected = rows.offsets if layer.quantization.has_offsets else -zero * scales.astype(np.float32)
        assert np.array_equal(biases, expected), name
    dense = {name: p for name, p in saved.model.named_parameters() if name.removesuffix(".weight") not in quantized}
    assert stored.keys() == dense.keys()
    for name, parameter in dense.items():
        assert np.array_equal(stored[name], parameter.detach().numpy()), name


def test_mlx_unpacks_to_the_weights_of_the_forward_pass(saved: Saved) -> None:
    """In float32; the package's own bfloat16 rounds 4-bit values once more, and ternary ones not at all."""
    config = json.loads((saved.folder / "config.json").read_text())["quantization"]
    arrays = mx.load(str(next(saved.folder.glob("*.safetensors"))))
    for name in saved.layers:
        setting = {key: config.get(name, config)[key] for key in ("bits", "group_size")}
        parts = [arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
        assert parts[1].dtype == mx.bfloat16
        layer = saved.layer(name)
        used = quantized_weight(layer.weight.detach(), layer.quantization).numpy()
        wide = mx.dequantize(parts[0], *(part.astype(mx.float32) for part in parts[1:]), **setting)
        assert np.array_equal(np.array(wide), used), name
        if layer.quantization.format == "ternary":
            assert np.array_equal(np.array(mx.dequantize(*parts, **setting).astype(mx.float32)), used), name


def test_settings_are_as_mlx_lm_writes_them(qwen3: Saved, flux2: Saved) -> None:
    config = json.loads((qwen3.folder / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    settings = config["quantization"]
    assert (settings.pop("group_size"), settings.pop("bits")) == (128, 2)
    layers = [f"model.layers.{i}" for i in range(2)]
    assert settings == {
        "lm_head": {"group_size": 32, "bits": 4},
        **{f"{layer}.self_attn.q_proj": {"group_size": 64, "bits": 4} for layer in layers},
        **{f"{layer}.mlp.down_proj": {"group_size": 128, "bits": 8} for layer in layers},
    }
    assert (qwen3.folder / "generation_config.json").is_file()
    config = json.loads((flux2.folder / "config.json").read_text())
    assert config["_class_name"] == "Flux2Transformer2DModel"
    assert config["quantization"] == {"group_size": 128, "bits": 2}


def test_readers_give_the_weights_of_the_forward_pass(saved: Saved) -> None:
    checkpoint = open_checkpoint(saved.folder)
    assert not checkpoint.notes
    for name in saved.layers:
        tensor, layer = checkpoint.tensors[f"{name}.weight"], saved.layer(name)
        assert tensor.layout is not None
        rows = tensor.read()
        assert isinstance(rows, GroupedQuantRows)
        used = quantized_weight(layer.weight.detach(), layer.quantization).numpy()
        assert np.array_equal(dequantize(rows, tensor.layout.format), used), name


def bundle_weights(bundle: Path, stage: str) -> dict[str, tuple[GroupedQuantRows, GroupedQuantFormat]]:
    """Quantized weights of a stage under the names of the checkpoint."""
    graph = ir.load(bundle / f"{stage}.onnx").graph
    found = {}
    for node in graph:
        if node.op_type == "GroupedQuantMatMul":
            parts = []
            for value in node.inputs[1:]:
                assert value is not None
                assert value.const_value is not None
                parts.append(value.const_value.numpy())
            layout = GroupedQuantFormat(*(node.attributes[a].as_int() for a in ("bits", "group_size", "zero_point")))
            found[str(node.inputs[1].name).removesuffix(".weight.codes")] = (GroupedQuantRows(*parts), layout)  # type: ignore[union-attr]
    return found


def check_bundle(saved: Saved, bundle: Path, stage: str) -> None:
    found = bundle_weights(bundle, stage)
    assert found.keys() == saved.layers.keys()
    for name, (rows, layout) in found.items():
        layer = saved.layer(name)
        expected = quantize(layer.weight.detach().numpy(), layer.quantization)
        assert np.array_equal(rows.codes, expected.codes), name
        assert np.array_equal(rows.scales, np.broadcast_to(expected.scales, rows.scales.shape)), name
        assert layout.zero_point == (1 if layer.quantization.format == "ternary" else 0)
        used = quantized_weight(layer.weight.detach(), layer.quantization).numpy()
        assert np.array_equal(dequantize(rows, layout), used), name


def test_the_language_model_s_engine_computes_what_training_does(qwen3: Saved, tmp_path: Path) -> None:
    intaglio.export(qwen3.folder, tmp_path / "bundle", stages=["score"], taps=True)
    check_bundle(qwen3, tmp_path / "bundle", "score")
    intaglio.compile(tmp_path / "bundle")
    ids = np.random.default_rng(3).integers(0, 97, (2, 13))
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(13), ids.shape).copy(),
    }
    found = open_engine(tmp_path / "bundle").load("score").run(feeds)
    modules, seen, hooks = dict(qwen3.model.named_modules()), dict[str, np.ndarray](), []
    for name in (name for name in found if name in modules):

        def keep(_module: nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach().numpy()

        hooks.append(modules[name].register_forward_hook(keep))
    # With gradients, as in training.
    logits = qwen3.model(input_ids=torch.from_numpy(ids)).logits
    for hook in hooks:
        hook.remove()
    seen["logits"] = logits.detach().numpy()
    assert len(seen) == 2 * 10 + 3
    worst = max(compare(name, found[name], value).relative_l2 for name, value in seen.items())
    assert worst <= BOUND


@pytest.mark.parametrize("source", ["file", "folder"])
def test_the_transformer_s_engine_computes_what_training_does(flux2: Saved, tmp_path: Path, source: str) -> None:
    file = flux2.folder / "diffusion_pytorch_model.safetensors"
    transformer = file if source == "file" else flux2.folder
    intaglio.export(None, tmp_path / "bundle", transformer=transformer, stages=["transformer"], taps=True)
    check_bundle(flux2, tmp_path / "bundle", "transformer")
    intaglio.compile(tmp_path / "bundle")
    inputs = feeds(FLUX2, 1, [(4, 6)], 5)
    found = open_engine(tmp_path / "bundle").load("transformer").run(inputs)
    check(found, run_oracle(flux2.model, inputs), BOUND)


def test_a_diffusers_directory_with_packed_parts_becomes_a_bundle(tmp_path: Path) -> None:
    """Transformer, text encoder and VAE, each saved packed into its folder of the pipeline."""
    vae = {**maker.TINY.vae, "block_out_channels": [16, 32, 64, 64]}
    source = maker.write_pipeline(tmp_path / "pipeline", replace(maker.TINY, vae=vae), seed=5)
    parts: dict[str, Any] = {
        "vae": AutoencoderKLFlux2.from_pretrained(source / "vae"),
        "transformer": Flux2Transformer2DModel.from_pretrained(source / "transformer"),
        "text_encoder": transformers.Qwen3ForCausalLM.from_pretrained(source / "text_encoder"),
    }
    rules = {
        "vae": [QuantizationRule("*.attentions.0.*", Quantization("affine4", 32))],
        "transformer": BLOCKS,
        "text_encoder": [
            QuantizationRule("*.mlp.*", Quantization("affine4", 64)),
            QuantizationRule("model.layers.*", TERNARY),
        ],
    }
    models = {}
    for role, model in parts.items():
        layers = quantize_linears(model, rules[role])
        for file in (source / role).iterdir():
            file.unlink()
        save_quantized(model, source / role, torch.bfloat16)
        models[role] = Saved(model, layers, source / role)
    bundle = intaglio.export(source, tmp_path / "bundle", hidden_states=maker.TINY.layers)
    check_bundle(models["transformer"], tmp_path / "bundle", "transformer")
    # Layers above the last hidden state are not needed, and of the VAE's two halves one lies in each stage.
    for role, stage, some in (
        ("text_encoder", "text_encoder", 7),
        ("vae", "vae_encoder", 4),
        ("vae", "vae_decoder", 4),
    ):
        found = bundle_weights(tmp_path / "bundle", stage)
        assert some <= len(found) <= len(models[role].layers)
        for name, (rows, layout) in found.items():
            layer = models[role].layer(name)
            used = quantized_weight(layer.weight.detach(), layer.quantization).numpy()
            assert np.array_equal(dequantize(rows, layout), used), name
    kinds = {q.storage for role in models for q in bundle.components[role].quantization}
    # float32 are the statistics of the VAE's latents.
    assert kinds == {"MLX2", "MLX4", "BF16", "F32"}


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("model.layers.0.mlp.down_proj", "Q8_0"),
        ("model.layers.0.mlp.up_proj", "Q8_0"),
        ("model.layers.0.mlp.up_proj", "Q4_0"),
        ("model.layers.0.self_attn.q_proj", "Q4_1"),
        ("lm_head", "Q4_1"),
    ],
)
def test_gguf_holds_them_exactly_too(qwen3: Saved, name: str, storage: str) -> None:
    """Float16 holds every scale and offset: gguf's own package unpacks to the weights of the forward pass."""
    tensor, layer = open_checkpoint(qwen3.folder).tensors[f"{name}.weight"], qwen3.layer(name)
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    assert tensor.layout is not None
    blocks = repack_rows(storage, rows, tensor.layout, name)
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[storage])
    assert np.array_equal(found, quantized_weight(layer.weight.detach(), layer.quantization).numpy())


def test_ternary_gguf_files_hold_the_same_codes_and_scales(flux2: Saved, tmp_path: Path) -> None:
    """Type 42 in blocks of 34 bytes, by its definition: 32 bytes of codes, and a float16."""
    convert(flux2.folder, tmp_path / "transformer.gguf", storage="BF16")
    tensors = open_checkpoint(tmp_path / "transformer.gguf").tensors
    for name in flux2.layers:
        tensor, layer = tensors[name], flux2.layer(name)
        assert isinstance(tensor, StoredTensor)
        raw = np.frombuffer(tensor.file.read(tensor.offset, tensor.nbytes), np.uint8)
        blocks, rows = raw.reshape(layer.out_features, -1, 34), quantize(layer.weight.numpy(), TERNARY)
        assert np.array_equal(blocks[..., :32].reshape(rows.codes.shape), rows.codes)
        scales = blocks[..., 32:].copy().view("<f2")[..., 0]
        assert np.array_equal(scales.astype(np.float32), rows.scales.astype(np.float32))


def test_what_is_dense_gets_the_type_that_is_asked_for(tmp_path: Path) -> None:
    model = language_model()
    quantize_linears(model, RULES)
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    save_quantized(model, tmp_path / "bf16", torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path / "bf16")
    assert checkpoint.config["dtype"] == "bfloat16"
    assert {t.storage for t in checkpoint.tensors.values() if t.layout is None} == {"BF16"}
    expected = model.model.embed_tokens.weight.detach().bfloat16().float().numpy()
    found = checkpoint.tensors["model.embed_tokens.weight"].read()
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found.astype(np.float32), expected)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: has a value that float16 does not hold"):
        save_quantized(model, tmp_path / "f16", torch.float16)


def test_a_weight_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    model = language_model()
    quantize_linears(model, RULES)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 6] = torch.nan
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: holds nan in row 5"):
        save_quantized(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_saving_draws_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And leaves transformers' own setting as it was."""
    logging = transformers.utils.logging
    before, model = logging.is_progress_bar_enabled(), language_model()
    try:
        for enabled in (False, True):
            (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
            capfd.readouterr()
            save_quantized(model, tmp_path / str(enabled))
            assert capfd.readouterr() == ("", "")
            assert logging.is_progress_bar_enabled() == enabled
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def test_a_dense_model_is_saved_as_its_library_does(tmp_path: Path) -> None:
    model = language_model()
    save_quantized(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").num_parameters() > 0
