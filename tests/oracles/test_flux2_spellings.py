"""FLUX.2's transformer in the spellings that are published: the same model as diffusers', or refused.

What is quantized is compared with diffusers running the weights that the file holds.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import onnx_ir as ir
import pytest
import torch
from diffusers import Flux2Transformer2DModel
from flux2_models import SETTINGS, TERNARY, check, feeds, run_oracle, tiny_model
from safetensors.torch import save_file
from sparse_checkpoint import write_sparse
from stage_runner import RUNNERS, check_golden, run_lowered, write_stage

from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.architecture import find_architecture, match_weights, model_tensors
from intaglio.exporters.bundle import WEIGHTS_FILE
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.graph import stage_parameters

# --- other spellings ----------------------------------------------------------------------------------------


def bfl_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """diffusers' tensors as Black Forest Labs spell them, written down by hand for two blocks of each kind."""
    left = dict(state)
    result = {
        "img_in.weight": left.pop("x_embedder.weight"),
        "txt_in.weight": left.pop("context_embedder.weight"),
        "time_in.in_layer.weight": left.pop("time_guidance_embed.timestep_embedder.linear_1.weight"),
        "time_in.out_layer.weight": left.pop("time_guidance_embed.timestep_embedder.linear_2.weight"),
        "guidance_in.in_layer.weight": left.pop("time_guidance_embed.guidance_embedder.linear_1.weight"),
        "guidance_in.out_layer.weight": left.pop("time_guidance_embed.guidance_embedder.linear_2.weight"),
        "double_stream_modulation_img.lin.weight": left.pop("double_stream_modulation_img.linear.weight"),
        "double_stream_modulation_txt.lin.weight": left.pop("double_stream_modulation_txt.linear.weight"),
        "single_stream_modulation.lin.weight": left.pop("single_stream_modulation.linear.weight"),
        "final_layer.linear.weight": left.pop("proj_out.weight"),
    }
    scale, shift = left.pop("norm_out.linear.weight").chunk(2)
    result["final_layer.adaLN_modulation.1.weight"] = torch.cat([shift, scale])
    for i in range(2):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        qkv = [left.pop(f"{here}.attn.{name}.weight") for name in ("to_q", "to_k", "to_v")]
        added = [left.pop(f"{here}.attn.{name}.weight") for name in ("add_q_proj", "add_k_proj", "add_v_proj")]
        result |= {
            f"{there}.img_attn.qkv.weight": torch.cat(qkv),
            f"{there}.txt_attn.qkv.weight": torch.cat(added),
            f"{there}.img_attn.norm.query_norm.scale": left.pop(f"{here}.attn.norm_q.weight"),
            f"{there}.img_attn.norm.key_norm.scale": left.pop(f"{here}.attn.norm_k.weight"),
            f"{there}.txt_attn.norm.query_norm.scale": left.pop(f"{here}.attn.norm_added_q.weight"),
            f"{there}.txt_attn.norm.key_norm.scale": left.pop(f"{here}.attn.norm_added_k.weight"),
            f"{there}.img_attn.proj.weight": left.pop(f"{here}.attn.to_out.0.weight"),
            f"{there}.txt_attn.proj.weight": left.pop(f"{here}.attn.to_add_out.weight"),
            f"{there}.img_mlp.0.weight": left.pop(f"{here}.ff.linear_in.weight"),
            f"{there}.img_mlp.2.weight": left.pop(f"{here}.ff.linear_out.weight"),
            f"{there}.txt_mlp.0.weight": left.pop(f"{here}.ff_context.linear_in.weight"),
            f"{there}.txt_mlp.2.weight": left.pop(f"{here}.ff_context.linear_out.weight"),
        }
        here, there = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        result |= {
            f"{there}.linear1.weight": left.pop(f"{here}.attn.to_qkv_mlp_proj.weight"),
            f"{there}.linear2.weight": left.pop(f"{here}.attn.to_out.weight"),
            f"{there}.norm.query_norm.scale": left.pop(f"{here}.attn.norm_q.weight"),
            f"{there}.norm.key_norm.scale": left.pop(f"{here}.attn.norm_k.weight"),
        }
    assert not left
    return result


def mflux_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What mflux names otherwise than diffusers."""

    def renamed(name: str) -> str:
        if name.startswith("transformer_blocks"):
            return name.replace("attn.to_out.0.", "attn.to_out.")
        return name.replace("time_guidance_embed.timestep_embedder.", "time_guidance_embed.")

    assert any(renamed(name) != name for name in state)
    return {renamed(name): tensor for name, tensor in state.items()}


SPELLED = {**SETTINGS, "guidance_embeds": True, "num_single_layers": 2}
# What the shapes of a model that nobody published do not tell.
UNTOLD: dict[str, Any] = {"patch_size": 1, "axes_dims_rope": [16] * 4, "rope_theta": 2000, "eps": 1e-6}


@pytest.mark.parametrize("spelling", ["bfl", "bfl-prefixed", "mflux", "diffusers"])
def test_single_files_in_other_spellings_are_the_same_model(tmp_path: Path, spelling: str) -> None:
    oracle = tiny_model(SPELLED)
    state = dict(oracle.state_dict())
    if spelling.startswith("bfl"):
        state = bfl_names(state)
    elif spelling == "mflux":
        state = mflux_names(state)
    if spelling == "bfl-prefixed":
        state = {f"model.diffusion_model.{name}": tensor for name, tensor in state.items()}
    file = tmp_path / "single.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    with pytest.raises(ConfigError, match=r"single\.safetensors.*axes_dims_rope.*--config"):
        write_stage(file, "transformer", tmp_path)
    graph = write_stage(file, "transformer", tmp_path / "single", config=UNTOLD)
    oracle.save_pretrained(tmp_path / "folder")
    same = write_stage(tmp_path / "folder", "transformer", tmp_path / "same")
    assert graph.read_bytes() == same.read_bytes()
    assert graph.with_name(WEIGHTS_FILE).read_bytes() == same.with_name(WEIGHTS_FILE).read_bytes()


def test_spellings_that_collide_or_do_not_come_apart_are_refused(tmp_path: Path) -> None:
    state = bfl_names(dict(tiny_model(SPELLED).state_dict()))
    file = tmp_path / "single.safetensors"
    save_file({**state, "x_embedder.weight": state["img_in.weight"].clone()}, file)
    with pytest.raises(WeightsError, match=r"x_embedder\.weight as well"):
        write_stage(file, "transformer", tmp_path, config=UNTOLD)
    state["double_blocks.1.txt_attn.qkv.weight"] = state["double_blocks.1.txt_attn.qkv.weight"][1:].clone()
    save_file(state, file)
    with pytest.raises(WeightsError, match=r"double_blocks\.1\.txt_attn\.qkv\.weight: is \[383, 128\].*3 equal parts"):
        write_stage(file, "transformer", tmp_path, config=UNTOLD)


# --- ternary weights ----------------------------------------------------------------------------------------


def ternary_model() -> tuple[Flux2Transformer2DModel, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A model whose block matrices are ternary in groups of 128 along the input, and their values and scales."""
    oracle = tiny_model(TERNARY)
    generator = np.random.default_rng(5)
    packed = {}
    for name, parameter in oracle.named_parameters():
        if "transformer_blocks." not in name or parameter.ndim < 2:
            parameter.copy_(parameter.bfloat16().float())
            continue
        rows, columns = parameter.shape
        values = generator.integers(-1, 2, (rows, columns)).astype(np.int8)
        scales = generator.uniform(0.5, 1.5, (rows, columns // 128)).astype(np.float32) * columns**-0.5
        scales = scales.astype(ml_dtypes.bfloat16)
        weight = values.reshape(rows, -1, 128) * scales.astype(np.float32)[:, :, None]
        parameter.copy_(torch.from_numpy(weight.reshape(rows, columns)))
        packed[name] = values, scales
    return oracle, packed


def two_bits(values: np.ndarray) -> np.ndarray:
    """Ternary values as the codes 0, 1, 2, four to a byte, the first in the lowest bits."""
    codes = (values + 1).astype(np.uint8).reshape(len(values), -1, 4)
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def save_mlx(
    file: Path, oracle: Flux2Transformer2DModel, packed: dict[str, tuple[np.ndarray, np.ndarray]], *, bfl: bool = False
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in oracle.named_parameters():
        if name not in packed:
            tensors[name] = parameter.bfloat16()
            continue
        values, scales = packed[name]
        module = name.removesuffix(".weight")
        tensors[name] = torch.from_numpy(two_bits(values).view(np.uint32))
        tensors[f"{module}.scales"] = torch.from_numpy(scales.astype(np.float32)).bfloat16()
        tensors[f"{module}.biases"] = -tensors[f"{module}.scales"]
    if bfl:
        for part in ("weight", "scales", "biases"):
            for stream, names in (
                ("img", ("to_q", "to_k", "to_v")),
                ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")),
            ):
                parts = [tensors.pop(f"transformer_blocks.0.attn.{name}.{part}") for name in names]
                tensors[f"double_blocks.0.{stream}_attn.qkv.{part}"] = torch.cat(parts)
    save_file(tensors, file)


@pytest.mark.parametrize("spelling", ["diffusers", "bfl"])
def test_mlx_ternary_weights(tmp_path: Path, spelling: str, write_goldens: bool) -> None:
    """An MLX-packed file without a config.json: its shapes alone do not tell 2 bits in groups of 128 from others."""
    oracle, packed = ternary_model()
    file = tmp_path / "packed.safetensors"
    save_mlx(file, oracle, packed, bfl=spelling == "bfl")
    graph = write_stage(file, "transformer", tmp_path / "stage", config=UNTOLD)
    model = ir.load(graph)
    quantized = [node for node in model.graph if node.op_type == "GroupedQuantMatMul"]
    assert len(quantized) == 12 * TERNARY["num_layers"] + 2 * TERNARY["num_single_layers"]
    inputs = feeds(TERNARY, 2, [(4, 5), (3, 2)], 9)
    expected = run_oracle(oracle, inputs)
    for runner in ("onnxruntime", "lowered"):
        check(RUNNERS[runner](graph, inputs), expected)
    if spelling == "diffusers":
        assert np.array_equal(dequantized(file), oracle.transformer_blocks[0].ff.linear_in.weight.numpy())
        check_golden(graph, "flux2-ternary.transformer", write=write_goldens)


def dequantized(file: Path) -> np.ndarray:
    """A matrix of the file as mlx reads it, which shows that it is packed as mlx packs."""
    arrays = mx.load(str(file))
    module = "transformer_blocks.0.ff.linear_in"
    scales, biases = (arrays[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(arrays[f"{module}.weight"], scales, biases, group_size=128, bits=2))


GGUF_KEYS: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 2,
    "attention.head_count": 4,
    "attention.head_dim": 64,
    "joint_attention_dim": 128,
    "in_channels": 16,
    "mlp_ratio": 3.0,
    "rope.theta": 2000.0,
    "rope.axes_dims": [16, 16, 16, 16],
    "guidance_embeds": False,
}


def save_gguf(
    file: Path,
    oracle: Flux2Transformer2DModel,
    packed: dict[str, tuple[np.ndarray, np.ndarray]],
    keys: dict[str, Any],
) -> None:
    """As oxibonsai's converter writes it, with the blocks of TQ2_0_g128 put together by hand."""
    writer = gguf.GGUFWriter(file, "bonsai-image")
    writer.add_string("general.quantization_version", "TQ2_0_G128")
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"bonsai-image.{key}", value)
    for name, parameter in oracle.named_parameters():
        if name not in packed:
            halves = parameter.bfloat16().view(torch.uint16).numpy().view(np.uint8)
            writer.add_tensor(name, halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
            continue
        values, scales = packed[name]
        codes = two_bits(values).reshape(*scales.shape, 32)
        halves = scales.astype(np.float16)[..., None].view(np.uint8)
        blocks = np.concatenate([codes, halves], axis=-1).reshape(len(values), -1)
        writer.add_tensor(name.removesuffix(".weight"), blocks, raw_dtype=ternary_type())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ternary_type() -> gguf.GGMLQuantizationType:
    """A member for the type id 42, which the gguf package does not have; taken out again by the test."""
    member = int.__new__(gguf.GGMLQuantizationType, 42)
    member._name_, member._value_ = "TQ2_0_G128", 42
    return member


@pytest.fixture
def type_42(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf.constants.GGML_QUANT_SIZES, ternary_type(), (128, 34))


@pytest.mark.usefixtures("type_42")
def test_gguf_of_bonsai_image(tmp_path: Path) -> None:
    oracle, packed = ternary_model()
    for name, (values, scales) in packed.items():
        # Scales that float16 holds, as the file does.
        halves = scales.astype(np.float16).astype(np.float32)
        weight = values.reshape(*scales.shape, 128) * halves[:, :, None]
        oracle.get_parameter(name).copy_(torch.from_numpy(weight.reshape(values.shape)))
    save_gguf(tmp_path / "model.gguf", oracle, packed, GGUF_KEYS)
    graph = write_stage(tmp_path / "model.gguf", "transformer", tmp_path / "stage")
    inputs = feeds(TERNARY, 1, [(4, 5)], 9)
    check(run_lowered(graph, inputs), run_oracle(oracle, inputs))


@pytest.mark.usefixtures("type_42")
@pytest.mark.parametrize("key", GGUF_KEYS)
def test_gguf_keys_are_required_and_checked(tmp_path: Path, key: str) -> None:
    oracle, packed = ternary_model()
    file = tmp_path / "model.gguf"
    save_gguf(file, oracle, packed, {k: v for k, v in GGUF_KEYS.items() if k != key})
    with pytest.raises(ConfigError, match=rf"has no bonsai-image\.{key}"):
        find_architecture(open_checkpoint(file))
    wrong = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.5, list: lambda v: [*v[:3], 18]}
    save_gguf(file, oracle, packed, {**GGUF_KEYS, key: wrong[type(GGUF_KEYS[key])](GGUF_KEYS[key])})
    if key == "rope.theta":
        return  # nothing in the file contradicts it
    with pytest.raises(ConfigError, match=rf"bonsai-image\.{key} is "):
        write_stage(file, "transformer", tmp_path / "stage")


# --- files without a configuration -------------------------------------------------------------------------

KLEIN_4B = {
    **SETTINGS,
    "in_channels": 128,
    "out_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "axes_dims_rope": (32, 32, 32, 32),
}
KLEIN_9B = {
    **KLEIN_4B,
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
}
DEV = {
    **KLEIN_9B,
    "num_single_layers": 48,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "guidance_embeds": True,
}


def sparse_file(file: Path, config: dict[str, Any], *, packed: bool) -> None:
    """The tensors of a model of full size: a true header over a hole. ``packed`` as MLX packs block matrices."""
    with torch.device("meta"):
        model = Flux2Transformer2DModel(**config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    matrices = [name for name, shape in shapes.items() if "transformer_blocks." in name and len(shape) == 2]
    write_sparse(file, shapes, packed=matrices if packed else (), bits=2, group_size=128)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", [KLEIN_4B, KLEIN_9B, DEV], ids=["klein-4B", "klein-9B", "dev"])
def test_published_models_are_recognised_without_a_config(tmp_path: Path, config: dict[str, Any], packed: bool) -> None:
    sparse_file(tmp_path / "model.safetensors", config, packed=packed)
    architecture, keys = find_architecture(open_checkpoint(tmp_path / "model.safetensors"))
    assert architecture.name == "flux2"
    assert dataclasses.asdict(architecture.read_config(keys)) == config


def test_klein_4b_packed_is_whole(tmp_path: Path) -> None:
    """100 ternary and 69 plain tensors, of the shapes and in the packing that the graph declares."""
    sparse_file(tmp_path / "model.safetensors", KLEIN_4B, packed=True)
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    architecture, keys = find_architecture(checkpoint)
    config = architecture.read_config(keys)
    model, tensors = architecture.build(config), model_tensors(checkpoint, architecture, config)
    stage = architecture.stages(config, (), ir.DataType.FLOAT)["transformer"]
    weights, unused = match_weights(model, stage_parameters(model, stage), tensors, lambda name: False, "model")
    assert not unused
    layouts = [tensor.layout for tensor in weights.values() if tensor.layout]
    assert (len(weights), len(layouts)) == (169, 100)
    assert {(layout.format.bits, layout.format.group_size) for layout in layouts} == {(2, 128)}
    assert sum(int(np.prod(tensor.shape)) for tensor in weights.values()) == 3_875_544_576
