"""FLUX.2's transformer between MLX's packed files, bonsai-image GGUF files and dense folders: exactly or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import tiny_checkpoint
import torch
from klein import make_checkpoint as maker

import intaglio
from intaglio.errors import CheckpointError, ConfigError, InputError, IntaglioError, WeightsError
from intaglio.exporters.checkpoints import Checkpoint, open_checkpoint
from intaglio.exporters.checkpoints.gguf_header import GgufMetadata
from intaglio.exporters.checkpoints.gguf_writer import GgufTensor, write_gguf
from intaglio.exporters.checkpoints.safetensors_writer import write_file
from intaglio.exporters.checkpoints.tensors import ArrayTensor
from intaglio.exporters.convert_flux2 import flux2_to_gguf, flux2_to_safetensors
from intaglio.kernels.grouped_quant import GroupedQuantRows

SEED = 3
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What no tensor tells of a model that nobody published.
SAID: dict[str, Any] = {"patch_size": 1, "axes_dims_rope": [16] * 4, "rope_theta": 2000, "eps": 1e-6}
SINGLE = "single_transformer_blocks.1.attn.to_out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in all its spellings."""
    path = tmp_path_factory.mktemp("klein")
    maker.write_transformer(path / "packed.safetensors", "mlx", seed=SEED)
    maker.write_transformer(path / "dit.gguf", "gguf", seed=SEED)
    maker.write_transformer(path / "bfl.safetensors", "bfl", seed=SEED, prefix=maker.BFL_PREFIX)
    maker.write_transformer(path / "dense", "diffusers", seed=SEED)
    return path


@pytest.fixture
def type_42() -> Iterator[Any]:
    """Type id 42 as the stock reader would know it."""
    kind = gguf.GGMLQuantizationType
    assert 42 not in kind._value2member_map_, "the package knows the id now, and may mean another layout"
    member = int.__new__(kind, 42)
    member._name_, member._value_ = "TQ2_0_g128", 42
    kind._value2member_map_[42] = kind._member_map_["TQ2_0_g128"] = member
    kind._member_names_.append("TQ2_0_g128")
    gguf.constants.GGML_QUANT_SIZES[member] = (128, 34)
    yield member
    del kind._value2member_map_[42], kind._member_map_["TQ2_0_g128"], gguf.constants.GGML_QUANT_SIZES[member]
    kind._member_names_.remove("TQ2_0_g128")


def stored(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file as it lies there."""
    return {name: np.asarray(tensor.read()) for name, tensor in parts(path).items()}


def parts(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, the three of an MLX matrix one by one."""
    found: dict[str, Any] = {}
    for name, tensor in open_checkpoint(path).tensors.items():
        if hasattr(tensor, "scales"):
            module = name.removesuffix(".weight")
            found |= {name: tensor.weight, f"{module}.scales": tensor.scales, f"{module}.biases": tensor.biases}
        else:
            found[name] = tensor
    return found


def rewrite(source: Path, target: Path, changed: dict[str, np.ndarray | None]) -> Path:
    """A copy of a safetensors file with some tensors replaced, added, or left out."""
    arrays = {**stored(source), **changed}
    write_file(target, {n: ArrayTensor(n, a.shape, "x", a) for n, a in arrays.items() if a is not None})
    return target


def rewrite_gguf(source: Path, target: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A copy of a GGUF file with some metadata (None leaves a key out) and tensors replaced."""
    opened = open_checkpoint(source)
    keys = GgufMetadata({k: v for k, v in {**opened.metadata, **metadata}.items() if v is not None})
    planned = {name: GgufTensor(name, tensor) for name, tensor in opened.tensors.items()} | (tensors or {})
    write_gguf(target, dict(keys), [tensor for tensor in planned.values() if tensor is not None])
    return target


def gguf_bytes(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Each tensor of a GGUF file: type, shape and bytes."""
    found = {}
    for name, tensor in open_checkpoint(path).tensors.items():
        raw = tensor.file.read(tensor.offset, tensor.nbytes)  # type: ignore[attr-defined]
        found[name] = (tensor.storage, tensor.shape, bytes(raw))
    return found


def test_packed_file_to_gguf(folder: Path, tmp_path: Path, type_42: Any) -> None:
    report = intaglio.convert(folder / "packed.safetensors", tmp_path / "dit.gguf", config=SAID)
    assert report.rounded == ()
    assert {(t.source_storage, t.storage) for t in report.tensors} == {("MLX2", "TQ2_0_g128"), ("BF16", "BF16")}
    assert gguf_bytes(tmp_path / "dit.gguf") == gguf_bytes(folder / "dit.gguf")
    assert list(gguf_bytes(tmp_path / "dit.gguf")) == list(gguf_bytes(folder / "dit.gguf"))

    # The stock reader finds the same, block for block.
    reader = gguf.GGUFReader(tmp_path / "dit.gguf")
    raw, seen = stored(folder / "packed.safetensors"), 0
    for tensor in reader.tensors:
        assert tensor.data_offset % 32 == 0
        if tensor.tensor_type != type_42:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
            np.testing.assert_array_equal(tensor.data.reshape(-1).view(np.uint16), raw[tensor.name].view("u2").ravel())
            continue
        seen += 1
        words, scales = raw[f"{tensor.name}.weight"], raw[f"{tensor.name}.scales"]
        assert tensor.shape.tolist() == [words.shape[1] * 16, words.shape[0]]
        codes = words.view(np.uint8).reshape(*scales.shape, 32)
        halves = scales.astype(np.float16)[..., None].view(np.uint8)
        np.testing.assert_array_equal(tensor.data.reshape(*scales.shape, 34), np.concatenate([codes, halves], axis=-1))
    assert seen == 30
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "bonsai-image",
        "general.name": "packed",
        "general.quantization_version": 2,
        "bonsai-image.num_layers": 2,
        "bonsai-image.num_single_layers": 3,
        "bonsai-image.attention.head_count": 4,
        "bonsai-image.attention.head_dim": 64,
        "bonsai-image.joint_attention_dim": 384,
        "bonsai-image.in_channels": 128,
        "bonsai-image.mlp_ratio": 3.0,
        "bonsai-image.rope.theta": 2000.0,
        "bonsai-image.rope.axes_dims": [16, 16, 16, 16],
        "bonsai-image.guidance_embeds": False,
        "intaglio.type_42": "TQ2_0_g128",
    }
    kinds = {key: reader.fields[key].types for key in fields}
    number, real = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    assert kinds["general.quantization_version"] == kinds["bonsai-image.attention.head_dim"] == [number]
    assert kinds["bonsai-image.mlp_ratio"] == kinds["bonsai-image.rope.theta"] == [real]
    assert kinds["bonsai-image.rope.axes_dims"] == [gguf.GGUFValueType.ARRAY, number]
    assert kinds["bonsai-image.guidance_embeds"] == [gguf.GGUFValueType.BOOL]


def test_there_and_back_is_the_same_file(folder: Path, tmp_path: Path) -> None:
    intaglio.convert(folder / "packed.safetensors", tmp_path / "packed.gguf", config=SAID)
    report = intaglio.convert(tmp_path / "packed.gguf", tmp_path / "back.safetensors")
    assert {(t.source_storage, t.storage) for t in report.tensors} == {("TQ2_0_g128", "MLX2"), ("BF16", "BF16")}
    assert (tmp_path / "back.safetensors").read_bytes() == (folder / "packed.safetensors").read_bytes()
    # And so is the other way round, from a file that others wrote.
    intaglio.convert(folder / "dit.gguf", tmp_path / "a")
    intaglio.convert(tmp_path / "a", tmp_path / "again.gguf")
    assert gguf_bytes(tmp_path / "again.gguf") == gguf_bytes(tmp_path / "packed.gguf")


def test_gguf_to_a_folder_that_mlx_reads(folder: Path, tmp_path: Path) -> None:
    intaglio.convert(folder / "dit.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization") == {"bits": 2, "group_size": 128, "mode": "affine"}
    published = json.loads((folder / "dense" / "config.json").read_text())
    del published["_diffusers_version"]
    assert config == published
    arrays = mx.load(str(tmp_path / "out" / "diffusion_pytorch_model.safetensors"))
    dense = stored(folder / "dense" / "diffusion_pytorch_model.safetensors")
    for name, expected in dense.items():
        module = name.removesuffix(".weight")
        found = arrays[name]
        if f"{module}.scales" in arrays:
            triplet = (found, arrays[f"{module}.scales"], arrays[f"{module}.biases"])
            found = mx.dequantize(*triplet, group_size=128, bits=2)
        np.testing.assert_array_equal(np.array(found.astype(mx.float32)), expected.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("source", ["dit.gguf", "packed.safetensors"])
def test_unpacked_into_a_folder_that_diffusers_reads(folder: Path, tmp_path: Path, source: str) -> None:
    path = folder / source
    if source == "packed.safetensors":
        # With the configuration of the dense model beside it.
        path = tmp_path / "packed" / "diffusion_pytorch_model.safetensors"
        path.parent.mkdir()
        shutil.copyfile(folder / source, path)
        shutil.copyfile(folder / "dense" / "config.json", path.parent / "config.json")
    report = intaglio.convert(path, tmp_path / "out", storage="F32")
    assert {tensor.storage for tensor in report.tensors} == {"F32"}
    model = diffusers.Flux2Transformer2DModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = diffusers.Flux2Transformer2DModel.from_pretrained(folder / "dense", dtype=torch.float32)
    assert model.config.num_layers == 2
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_dense_folder_is_packed(folder: Path, tmp_path: Path) -> None:
    report = intaglio.convert(folder / "dense", tmp_path / "a.safetensors", pack_ternary=True)
    assert report.notes == ()
    assert {(t.source_storage, t.storage) for t in report.tensors} == {("BF16", "MLX2"), ("BF16", "BF16")}
    found, expected = stored(tmp_path / "a.safetensors"), stored(folder / "packed.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), array.view(np.uint8), err_msg=name)
    intaglio.convert(folder / "dense", tmp_path / "a.gguf", pack_ternary=True)
    assert gguf_bytes(tmp_path / "a.gguf") == gguf_bytes(folder / "dit.gguf")
    intaglio.convert(folder / "dense", tmp_path / "b", pack_ternary=True)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization"] == {"bits": 2, "group_size": 128, "mode": "affine"}
    assert "quantization_config" not in config
    assert open_checkpoint(tmp_path / "b").tensors[f"{SINGLE}.weight"].storage == "MLX2"


def test_a_single_file_of_another_spelling_is_packed(folder: Path, tmp_path: Path) -> None:
    intaglio.convert(folder / "bfl.safetensors", tmp_path / "a.safetensors", pack_ternary=True)
    found, expected = stored(tmp_path / "a.safetensors"), stored(folder / "packed.safetensors")
    block = "transformer_blocks.0.attn"
    for part in ("weight", "scales", "biases"):
        fused = np.concatenate([expected[f"{block}.to_{which}.{part}"] for which in "qkv"])
        np.testing.assert_array_equal(found[f"{maker.BFL_PREFIX}double_blocks.0.img_attn.qkv.{part}"], fused)


def test_other_spellings_become_the_same_gguf(folder: Path, tmp_path: Path) -> None:
    intaglio.convert(folder / "bfl.safetensors", tmp_path / "a.gguf", pack_ternary=True, config=SAID)
    assert gguf_bytes(tmp_path / "a.gguf") == gguf_bytes(folder / "dit.gguf")
    intaglio.convert(folder / "bfl.safetensors", tmp_path / "packed.safetensors", pack_ternary=True)
    report = intaglio.convert(tmp_path / "packed.safetensors", tmp_path / "b.gguf", config=SAID)
    assert gguf_bytes(tmp_path / "b.gguf") == gguf_bytes(folder / "dit.gguf")
    (fused,) = (t for t in report.tensors if t.name == "transformer_blocks.1.attn.add_k_proj")
    assert fused.source == f"{maker.BFL_PREFIX}double_blocks.1.txt_attn.qkv.weight"


def test_dense_matrices_have_no_place_in_gguf(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"single_transformer_blocks\.0\.attn\.to_out\.weight: is BF16, .* holds "):
        intaglio.convert(folder / "dense", tmp_path / "a.gguf")
    shutil.copytree(folder / "dense", tmp_path / "dense")
    weights = tmp_path / "dense" / "diffusion_pytorch_model.safetensors"
    weight = stored(weights)[f"{SINGLE}.weight"].copy()
    weight[77, 400] *= 2
    weight[77, 400] += BFLOAT16.type(0.001)
    rewrite(weights, weights, {f"{SINGLE}.weight": weight})
    for target in ("a.gguf", "b.safetensors", "c"):
        with pytest.raises(CheckpointError, match=rf"{SINGLE}\.weight: row 77, group 3 holds .*; expected minus"):
            intaglio.convert(tmp_path / "dense", tmp_path / target, pack_ternary=True)
        assert not (tmp_path / target).exists()


def test_only_matrices_of_blocks_are_packed(folder: Path, tmp_path: Path) -> None:
    """A matrix outside stays dense though its values happen to be ternary; a file without dense ones is refused."""
    weights = folder / "dense" / "diffusion_pytorch_model.safetensors"
    names = ("proj_out.weight", "time_guidance_embed.timestep_embedder.linear_1.weight")
    ternaries = {name: np.ones_like(stored(weights)[name]) for name in names}
    shutil.copytree(folder / "dense", tmp_path / "dense")
    rewrite(weights, tmp_path / "dense" / weights.name, ternaries)
    prefix = f"{maker.BFL_PREFIX}final_layer"
    ternaries = {f"{prefix}.adaLN_modulation.1.weight": np.ones((512, 256), BFLOAT16)}
    rewrite(folder / "bfl.safetensors", tmp_path / "bfl.safetensors", ternaries)
    for source, outside in (("dense", names), ("bfl.safetensors", tuple(ternaries))):
        report = intaglio.convert(tmp_path / source, tmp_path / f"{source}.packed", pack_ternary=True)
        found = {tensor.name: tensor.storage for tensor in report.tensors}
        assert {found[name] for name in outside} == {"BF16"}
        assert sum(storage == "MLX2" for storage in found.values()) == (30 if source == "dense" else 22)
    for packed in ("packed.safetensors", "dit.gguf"):
        for target in ("x.gguf", "x"):
            with pytest.raises(InputError, match=rf"{packed} has no dense matrices in its blocks; leave the option"):
                intaglio.convert(folder / packed, tmp_path / target, pack_ternary=True)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("part", "at", "value", "says"),
    [
        ("weight", (5, 13), 3 << 6, r"row 5, group 1 holds 2 times its scale, and TQ2_0_g128 holds -1 to 1"),
        ("biases", (7, 2), 0.25, r"row 7, group 2 has the scale 0\.\d+ and the bias 0\.25, expected minus the scale"),
        ("scales", (9, 1), 3e-8, r"row 9, group 1 has the scale .*e-08, which is no finite float16"),
        ("scales", (9, 0), 70000.0, r"row 9, group 0 has the scale 70144\.0, which is no finite float16"),
        ("scales", (2, 3), np.nan, r"row 2, group 3 has the scale nan"),
    ],
)
def test_refused_towards_gguf(
    folder: Path, tmp_path: Path, part: str, at: tuple[int, int], value: Any, says: str, dry_run: bool
) -> None:
    arrays = stored(folder / "packed.safetensors")
    changed = {name: arrays[f"{SINGLE}.{name}"].copy() for name in ("weight", "scales", "biases")}
    changed[part][at] = value
    if part == "scales":
        changed["biases"][at] = -changed["scales"][at]
    rewrite(folder / "packed.safetensors", tmp_path / "a.safetensors", {f"{SINGLE}.{n}": a for n, a in changed.items()})
    with pytest.raises(CheckpointError, match=rf"{SINGLE}.*: {says}|{SINGLE}: cannot be written as TQ2_0_g128: {says}"):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", config=SAID, dry_run=dry_run)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("target", ["back", "back.safetensors"])
def test_refused_towards_mlx(folder: Path, tmp_path: Path, target: str, dry_run: bool) -> None:
    tensor = open_checkpoint(folder / "dit.gguf").tensors[SINGLE]
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    scales = rows.scales.copy()
    # Ten binary digits: a float16, and no bfloat16.
    scales[200, 3] = 1 + 2**-9
    spoiled = ArrayTensor(
        SINGLE, tensor.shape, "x", GroupedQuantRows(rows.codes, scales, rows.offsets), tensor.layout
    )  # fmt: skip
    rewrite_gguf(folder / "dit.gguf", tmp_path / "a.gguf", {}, {SINGLE: GgufTensor(SINGLE, spoiled, "TQ2_0_g128")})
    with pytest.raises(
        CheckpointError, match=rf"{SINGLE}: row 200, group 3 has the scale 1\.00195.* bfloat16 does not"
    ):
        intaglio.convert(tmp_path / "a.gguf", tmp_path / target, dry_run=dry_run)
    assert not (tmp_path / target).exists()


def test_sizes_come_from_the_tensors(tmp_path: Path) -> None:
    config = {
        **maker.TINY.transformer, "num_layers": 1, "num_single_layers": 11, "attention_head_dim": 32,
        "num_attention_heads": 8, "joint_attention_dim": 96, "in_channels": 64, "mlp_ratio": 2.5,
    }  # fmt: skip
    sizes = replace(maker.TINY, transformer=config)
    maker.write_transformer(tmp_path / "a.safetensors", "mlx", sizes)
    with pytest.raises(
        ConfigError, match=r"without a config\.json\): has no axes_dims_rope.* pass --config axes_dims_r"
    ):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf")
    report = intaglio.convert(
        tmp_path / "a.safetensors", tmp_path / "a.gguf", config={**SAID, "axes_dims_rope": [8] * 4}
    )
    assert not any("taken from the published model" in note for note in report.notes)
    opened = open_checkpoint(tmp_path / "a.gguf")
    found = {key.removeprefix("bonsai-image."): value for key, value in opened.metadata.items()}
    for key, expected in (
        ("num_layers", 1), ("num_single_layers", 11), ("attention.head_count", 8), ("attention.head_dim", 32),
        ("joint_attention_dim", 96), ("in_channels", 64), ("mlp_ratio", 2.5),
    ):  # fmt: skip
        assert found[key] == expected, key
    assert found["rope.axes_dims"].tolist() == [8, 8, 8, 8]
    names = list(opened.tensors)
    assert names[2:5:2] == [f"single_transformer_blocks.{i}.attn.to_out" for i in (1, 10)]
    intaglio.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"proj_out.weight": None}, r"no out_channels|missing:\n  proj_out\.weight"),
        ({"lora_down.weight": np.zeros(3, np.float32)}, r"1 tensors are unknown .* would lose them\):\n  lora_down"),
        ({"transformer_blocks.1.attn.norm_q.weight": np.zeros(32, BFLOAT16)}, r"norm_q\.weight is \[32\], expected"),
        ({"proj_out.weight": np.zeros((64, 256), BFLOAT16)}, r"out_channels is 64, and a GGUF file .* means 128"),
        (
            {"transformer_blocks.3.ff.linear_in.weight": np.zeros((2, 2), BFLOAT16)},
            r"missing:\n  transformer_blocks\.2",
        ),
        ({"context_embedder.weight": np.zeros(384, BFLOAT16)}, "has no joint_attention_dim"),
        ({"norm_out.linear.weight": np.zeros((512, 256), np.float32)}, r"norm_out\.linear\.weight: is F32, .*--type B"),
    ],
)
def test_tensors_of_another_model_are_refused(
    folder: Path, tmp_path: Path, changed: dict[str, np.ndarray | None], says: str
) -> None:
    rewrite(folder / "packed.safetensors", tmp_path / "a.safetensors", changed)
    with pytest.raises((WeightsError, ConfigError), match=says):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", config=SAID)


def test_other_quantizations_are_refused(folder: Path, tmp_path: Path) -> None:
    name, rng = f"{SINGLE}.weight", np.random.default_rng(0)
    codes, scales, biases = mx.quantize(mx.array(rng.normal(size=(256, 1024)).astype(np.float32)), 64, 4)
    four = {name: codes, f"{SINGLE}.scales": scales, f"{SINGLE}.biases": biases}
    rewrite(folder / "packed.safetensors", tmp_path / "a.safetensors", {n: np.array(a) for n, a in four.items()})
    with pytest.raises(
        WeightsError, match=r"to_out\.weight: is MLX4 in groups of 64, expected 2 bits in groups of 128"
    ):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", config=SAID)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"bonsai-image.num_layers": None}, r"has no bonsai-image\.num_layers"),
        ({"bonsai-image.rope.theta": None}, r"has no bonsai-image\.rope\.theta"),
        ({"bonsai-image.attention.head_count": 2}, "head_count is 2, but the tensors are those of 4"),
        ({"bonsai-image.guidance_embeds": True}, "guidance_embeds is True, but the tensors are those of False"),
        ({"bonsai-image.rope.axes_dims": np.array([16, 16, 16], np.uint32)}, r"axes_dims is \[16, 16, 16\]"),
        ({"bonsai-image.rope.theta": -1.0}, r"rope\.theta is -1"),
    ],
)
def test_metadata_that_contradicts_the_tensors(
    folder: Path, tmp_path: Path, metadata: dict[str, Any], says: str
) -> None:
    rewrite_gguf(folder / "dit.gguf", tmp_path / "a.gguf", metadata)
    with pytest.raises(ConfigError, match=says):
        intaglio.convert(tmp_path / "a.gguf", tmp_path / "out")


def test_what_only_a_configuration_can_say(folder: Path, tmp_path: Path) -> None:
    odd = {"bonsai-image.rope.theta": 500.0, "bonsai-image.rope.axes_dims": np.array([8, 24, 24, 8], np.uint32)}
    rewrite_gguf(folder / "dit.gguf", tmp_path / "a.gguf", odd)
    report = intaglio.convert(tmp_path / "a.gguf", tmp_path / "a.safetensors")
    assert report.notes[1:] == (
        "without a config.json whoever reads the file must say --config patch_size=1 "
        "--config axes_dims_rope=[8,24,24,8] --config rope_theta=500.0 --config eps=1e-06",
    )
    report = intaglio.convert(tmp_path / "a.gguf", tmp_path / "out")
    assert report.notes[1:] == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["axes_dims_rope"]) == (500.0, [8, 24, 24, 8])
    intaglio.convert(tmp_path / "out", tmp_path / "back.gguf")
    metadata = open_checkpoint(tmp_path / "back.gguf").metadata
    assert metadata["bonsai-image.rope.theta"] == 500
    assert metadata["bonsai-image.rope.axes_dims"].tolist() == [8, 24, 24, 8]
    for key, value, says in (
        ("eps", 1e-5, "eps is 1e-05, and a GGUF file"),
        ("patch_size", 2, "shape that disagrees with the config"),
        ("mlp_ratio", 3 + 2**-30, "which the float32 of a GGUF file does not hold"),
        ("num_layers", 3, "tensors are missing"),
    ):
        (tmp_path / "out" / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises((ConfigError, WeightsError), match=says):
            intaglio.convert(tmp_path / "out", tmp_path / "b.gguf")
    (tmp_path / "out" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "eps"}))
    with pytest.raises(ConfigError, match="has no eps"):
        intaglio.convert(tmp_path / "out", tmp_path / "b.gguf")


def published(path: Path, metadata: dict[str, Any] | None = None) -> Checkpoint:
    """klein 4B, of which no value is read."""
    tensors = maker.transformer_tensors(maker.SIZES["4B"].transformer)
    return Checkpoint(path, "gguf" if metadata else "safetensors", tensors, (), metadata=metadata or {})


def test_what_no_file_says_is_that_of_the_published_model_and_said(tmp_path: Path) -> None:
    target = flux2_to_gguf(published(tmp_path / "a.safetensors"), None, {})
    assert target.settings is not None
    assert target.settings["bonsai-image.rope.theta"] == 2000
    assert target.settings["bonsai-image.rope.axes_dims"].tolist() == [32] * 4
    said = "patch_size=1, axes_dims_rope=(32, 32, 32, 32), rope_theta=2000.0, eps=1e-06"
    (note,) = target.notes
    assert note == f"no config.json says {said}: taken from the published model of these widths. --config sets another"
    target = flux2_to_gguf(published(tmp_path / "a.safetensors"), None, {"rope_theta": 500})
    assert target.settings is not None
    assert target.settings["bonsai-image.rope.theta"] == 500
    assert "rope_theta" not in target.notes[0]
    with pytest.raises(ConfigError, match=r"--config rope: flux2 does not read it"):
        flux2_to_gguf(published(tmp_path / "a.safetensors"), None, {"rope": 500})


def test_a_file_alone_does_not_pass_for_the_published_model(tmp_path: Path) -> None:
    settings = flux2_to_gguf(published(tmp_path / "a.safetensors"), None, {}).settings
    target = flux2_to_safetensors(published(tmp_path / "a.gguf", settings), None, {}, with_config=False)
    assert (len(target.tensors), target.settings, target.notes) == (169, None, [])
    other = {**(settings or {}), "bonsai-image.rope.theta": 500.0}
    with pytest.raises(ConfigError, match=r"rope_theta is 500\.0, and .* config\.json means 2000; name a folder"):
        flux2_to_safetensors(published(tmp_path / "a.gguf", other), None, {}, with_config=False)
    target = flux2_to_safetensors(published(tmp_path / "a.gguf", other), None, {}, with_config=True)
    assert target.settings is not None
    assert target.settings["rope_theta"] == 500


def test_configuration_keys_where_they_mean_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--config eps: within a format the configuration is copied"):
        intaglio.convert(folder / "dense", tmp_path / "a", config={"eps": 1e-5})
    shutil.copyfile(folder / "packed.safetensors", tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny_checkpoint.CONFIG))
    with pytest.raises(
        ConfigError, match=r"a\.safetensors: has the tensors of a FLUX\.2 .* its config\.json is of llama"
    ):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", config=SAID)


def test_plain_tensors_keep_their_type_or_are_rounded_when_asked(folder: Path, tmp_path: Path) -> None:
    weights = stored(folder / "packed.safetensors")
    changed = {
        "proj_out.weight": weights["proj_out.weight"].astype(np.float16),
        "x_embedder.weight": weights["x_embedder.weight"].astype(np.float32) * np.float32(1.0001),
    }
    rewrite(folder / "packed.safetensors", tmp_path / "a.safetensors", changed)
    with pytest.raises(WeightsError, match=r"x_embedder\.weight: is F32"):
        intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", config=SAID)
    report = intaglio.convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", storage="BF16", config=SAID)
    assert {t.source for t in report.rounded} == {"proj_out.weight", "x_embedder.weight"}
    rewrite(folder / "packed.safetensors", tmp_path / "b.safetensors", {n: changed[n] for n in ("proj_out.weight",)})
    report = intaglio.convert(tmp_path / "b.safetensors", tmp_path / "b.gguf", config=SAID)
    assert {t.name for t in report.tensors if t.storage == "F16"} == {"proj_out.weight"}
    with pytest.raises(InputError, match="--type Q8_0: a GGUF file of bonsai-image holds TQ2_0_g128"):
        intaglio.convert(folder / "packed.safetensors", tmp_path / "c.gguf", storage="Q8_0", config=SAID)


def test_quantized_tensors_may_be_named_weight(folder: Path, tmp_path: Path) -> None:
    tensor = open_checkpoint(folder / "dit.gguf").tensors[SINGLE]
    renamed = {SINGLE: None, f"{SINGLE}.weight": GgufTensor(f"{SINGLE}.weight", tensor)}
    rewrite_gguf(folder / "dit.gguf", tmp_path / "a.gguf", {}, renamed)
    intaglio.convert(tmp_path / "a.gguf", tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (folder / "packed.safetensors").read_bytes()


def test_targets(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"old")
    with pytest.raises(InputError, match="exists; --overwrite"):
        intaglio.convert(folder / "dit.gguf", tmp_path / "a.safetensors")
    intaglio.convert(folder / "dit.gguf", tmp_path / "a.safetensors", overwrite=True)
    (tmp_path / "b.safetensors").mkdir()
    with pytest.raises(InputError, match="is a folder, so it is not replaced"):
        intaglio.convert(folder / "dit.gguf", tmp_path / "b.safetensors")
    # A language model's configuration and tokenizer would be lost.
    tiny_checkpoint.write(tmp_path / "lm")
    with pytest.raises(InputError, match=r"name NAME\.gguf or a folder"):
        intaglio.convert(tmp_path / "lm", tmp_path / "c.safetensors")


def test_language_models_are_packed_too(tmp_path: Path) -> None:
    shapes = {name: array.shape for name, array in tiny_checkpoint.tensors().items()}
    wide = {name: tuple({32: 128, 48: 256, 16: 64}.get(n, n) for n in shape) for name, shape in shapes.items()}
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in wide.items():
        scale = BFLOAT16.type(0.07).astype(np.float32)
        steps = rng.integers(-1, 2, shape) if "proj" in name else rng.normal(size=shape)
        weights[name] = (steps * scale).astype(np.float32)
    config = {"hidden_size": 128, "intermediate_size": 256}
    source = tiny_checkpoint.write(tmp_path / "a", config=config, weights=weights)
    report = intaglio.convert(source, tmp_path / "b", pack_ternary=True)
    assert sum(t.storage == "MLX2" for t in report.tensors) == 14
    assert report.notes == ()
    content = json.loads((tmp_path / "b" / "config.json").read_text())
    assert content["quantization"] == content["quantization_config"]
    arrays = mx.load(str(tmp_path / "b" / "model.safetensors"))
    name = "model.layers.1.mlp.down_proj"
    triplet = (arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    found = np.array(mx.dequantize(*triplet, group_size=128, bits=2).astype(mx.float32))
    np.testing.assert_array_equal(found, weights[f"{name}.weight"])
    report = intaglio.convert(source, tmp_path / "b.gguf", pack_ternary=True)
    assert sum(t.storage == "TQ2_0_g128" for t in report.tensors) == 14
    intaglio.convert(source, tmp_path / "dense.gguf")
    intaglio.convert(tmp_path / "dense.gguf", tmp_path / "packed.gguf", pack_ternary=True)
    assert gguf_bytes(tmp_path / "packed.gguf") == gguf_bytes(tmp_path / "b.gguf")


def test_packing_where_there_is_nothing_to_pack(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "a")
    with pytest.raises(
        IntaglioError, match=r"layers\.0\..*_proj\.weight: rows of (32|48) values are no multiple of 128"
    ):
        intaglio.convert(source, tmp_path / "b", pack_ternary=True)
    with pytest.raises(InputError, match="--pack-ternary and --type F16 ask for two things"):
        intaglio.convert(source, tmp_path / "b", pack_ternary=True, storage="F16")
