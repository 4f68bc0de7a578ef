"""FLUX.2's autoencoder against diffusers: taps, pictures and latents, on tiny models.

Bounds: relative L2 <= 2e-5 and cosine >= 0.999999 for every tap and output in float32 (measured: at most 8.5e-6), and
relative L2 <= 1.5e-2 in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from graph_text import graph_text
from run_graph import run_tract
from safetensors.torch import load_file, save_file
from stage_runner import write_stages
from vae_stages import FULL, SMALL, tiny_vae

from intaglio.engines.references import OnnxruntimeReference
from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.architecture import find_architecture, model_tensors
from intaglio.exporters.architectures.autoencoder_kl_flux2 import ARCHITECTURE, AutoencoderKLFlux2Config
from intaglio.exporters.bundle import evaluate_dim
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.config import ConfigKeys
from intaglio.runtimes.parity import compare

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
BOUND, COSINE = 2e-5, 0.999999
HALF_BOUND = 1.5e-2
BARE = {
    **FULL,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "batch_norm_eps": 0.3,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
    "patch_size": (3, 3),
}
# For pictures of 64 pixels, with latents half as wide as FLUX.2's.
THREE = {
    **FULL,
    "block_out_channels": (8, 16, 24),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 8,
    "sample_size": 64,
}
CONFIGS = {"full": FULL, "small": SMALL, "bare": BARE, "three": THREE}
SIZES = [(1, 1, 1), (1, 2, 2), (2, 3, 5), (1, 6, 4)]


@dataclass
class Case:
    name: str
    folder: Path
    oracle: diffusers.AutoencoderKLFlux2
    loaded: dict[str, OnnxruntimeReference] = field(default_factory=dict)

    def stage(self, name: str) -> OnnxruntimeReference:
        if name not in self.loaded:
            self.loaded[name] = OnnxruntimeReference(self.folder / "stages" / f"{name}.onnx")
        return self.loaded[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "checkpoint" / "diffusion_pytorch_model.safetensors")

    @property
    def patch(self) -> int:
        return self.oracle.config.patch_size[0]

    @property
    def factor(self) -> int:
        return self.patch * 2 ** (len(self.oracle.config.block_out_channels) - 1)

    def latents(self, batch: int, height: int, width: int) -> np.ndarray:
        rng = np.random.default_rng(batch + 10 * height + 100 * width)
        channels = self.oracle.config.latent_channels * self.patch**2
        return rng.normal(size=(batch, channels, height, width)).astype(np.float32)

    def image(self, batch: int, height: int, width: int) -> np.ndarray:
        rng = np.random.default_rng(batch + 10 * height + 100 * width)
        shape = (batch, 3, height * self.factor, width * self.factor)
        return rng.uniform(-1, 1, size=shape).astype(np.float32)


# Made once each, whatever the order of the tests.
_CASES: dict[str, Case] = {}


def made(name: str, paths: pytest.TempPathFactory) -> Case:
    if name not in _CASES:
        folder = paths.mktemp(name)
        oracle = tiny_vae(folder / "checkpoint", **CONFIGS[name])
        write_stages(folder / "checkpoint", folder / "stages", ["vae_decoder", "vae_encoder"], taps=True)
        _CASES[name] = Case(name, folder, oracle)
    return _CASES[name]


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory)


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("small", tmp_path_factory)


def unpack(case: Case, latents: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """What Flux2KleinPipeline does between its transformer and its autoencoder."""
    bn = case.oracle.bn
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + case.oracle.config.batch_norm_eps)
    x = torch.from_numpy(latents) * std + bn.running_mean.view(1, -1, 1, 1)
    batch, channels, height, width = x.shape
    p = case.patch
    pixels = x.reshape(batch, channels // p**2, p, p, height, width).permute(0, 1, 4, 2, 5, 3)
    return x, pixels.reshape(batch, channels // p**2, height * p, width * p)


def pack(case: Case, latents: torch.Tensor) -> torch.Tensor:
    """What Flux2KleinPipeline does with the latents of a reference picture."""
    bn, p = case.oracle.bn, case.patch
    batch, channels, height, width = latents.shape
    x = latents.view(batch, channels, height // p, p, width // p, p).permute(0, 1, 3, 5, 2, 4)
    x = x.reshape(batch, channels * p * p, height // p, width // p)
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + case.oracle.config.batch_norm_eps)
    return (x - bn.running_mean.view(1, -1, 1, 1)) / std


def decode(case: Case, latents: np.ndarray) -> dict[str, np.ndarray]:
    """The oracle's picture and taps."""
    seen: dict[str, torch.Tensor] = {}
    seen["vae_bn_denorm"], seen["vae_unpatchified"] = unpack(case, latents)
    decoder = case.oracle.decoder
    modules = {
        "vae_conv_in": decoder.conv_in,
        "vae_mid": decoder.mid_block,
        **{f"vae_up{i}": block for i, block in enumerate(decoder.up_blocks)},
        "vae_conv_norm_out": decoder.conv_norm_out,
    }
    if case.oracle.post_quant_conv is not None:
        modules["vae_post_quant_conv"] = case.oracle.post_quant_conv

    def hook(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.update({name: output})

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    seen["sample"] = case.oracle.decode(seen["vae_unpatchified"]).sample
    for handle in handles:
        handle.remove()
    return {name: value.numpy() for name, value in seen.items()}


def encode(case: Case, image: np.ndarray) -> np.ndarray:
    return pack(case, case.oracle.encode(torch.from_numpy(image)).latent_dist.mode()).numpy()


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float = BOUND) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        difference = compare(name, found[name], expected[name])
        assert difference.relative_l2 <= bound, difference
        assert difference.cosine >= COSINE or bound > BOUND, difference


@pytest.mark.parametrize("size", SIZES)
def test_decoder_taps_and_picture(case: Case, size: tuple[int, int, int]) -> None:
    latents = case.latents(*size)
    found = case.stage("vae_decoder").run({"latents": latents})
    expected = decode(case, latents)
    assert len(found) == {"bare": 8, "three": 10}.get(case.name, 11)
    check(found, expected)


@pytest.mark.parametrize("size", SIZES)
def test_encoder(case: Case, size: tuple[int, int, int]) -> None:
    image = case.image(*size)
    check(case.stage("vae_encoder").run({"image": image}), {"latents": encode(case, image)})


def test_graphs_are_valid_onnx(case: Case) -> None:
    for file in sorted((case.folder / "stages").glob("*.onnx")):
        onnx.checker.check_model(str(file), full_check=True)


def test_tract_agrees(case: Case) -> None:
    latents, image = case.latents(1, 3, 2), case.image(1, 3, 2)
    check(run_tract(case.folder / "stages" / "vae_decoder.onnx", {"latents": latents}), decode(case, latents))
    # tract has SpaceToDepth for sizes that it knows.
    model = ir.load(case.folder / "stages" / "vae_encoder.onnx")
    for value in (value for node in model.graph for value in node.outputs):
        value.shape = None
    model.graph.inputs[0].shape = ir.Shape(image.shape)
    file = case.folder / "stages" / "vae_encoder_sized.onnx"
    file.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    check(run_tract(file, {"image": image}), {"latents": encode(case, image)})
    file.unlink()


def test_float16(small: Case) -> None:
    folder = small.folder / "half"
    write_stages(small.folder / "checkpoint", folder, ["vae_decoder", "vae_encoder"], dtype="float16", taps=True)
    latents, image = small.latents(1, 3, 4), small.image(1, 3, 4)
    found = OnnxruntimeReference(folder / "vae_decoder.onnx").run({"latents": latents.astype(np.float16)})
    assert {value.dtype for value in found.values()} == {np.dtype(np.float16)}
    check(found, decode(small, latents), HALF_BOUND)
    packed = OnnxruntimeReference(folder / "vae_encoder.onnx").run({"image": image.astype(np.float16)})
    check(packed, {"latents": encode(small, image)}, HALF_BOUND)
    graph = ir.load(folder / "vae_decoder.onnx").graph
    islands = [node for node in graph if node.op_type == "Softmax"]
    assert all(node.inputs[0].dtype == ir.DataType.FLOAT for node in islands)
    norms = [node for node in graph if node.op_type == "GroupNormalization"]
    assert {node.attributes["stash_type"].as_int() for node in norms} == {ir.DataType.FLOAT}


@pytest.mark.parametrize(
    "stage", ["vae_decoder", "vae_encoder", "vae_tiles_up3_resnet0_conv2", "vae_tiles_up2_upsample"]
)
def test_graph_text_is_the_golden_one(tmp_path: Path, stage: str, request: pytest.FixtureRequest) -> None:
    """After an intended change, read the diff, then rewrite the files with ``pytest --write-goldens``."""
    tiny_vae(tmp_path / "checkpoint", **SMALL)
    write_stages(tmp_path / "checkpoint", tmp_path, [stage])
    file = GOLDENS / f"vae-small.{stage}.txt"
    text = graph_text(ir.load(tmp_path / f"{stage}.onnx"))
    if request.config.getoption("--write-goldens"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


def test_dims(case: Case) -> None:
    config = ARCHITECTURE.read_config(find_architecture(open_checkpoint(case.folder / "checkpoint"))[1])
    dims = ARCHITECTURE.dims(config)
    assert dims["height"].multiple_of == dims["width"].multiple_of == dims["height"].min == case.factor
    usual = {"bare": 510, "three": 64}.get(case.name, 512)  # the largest that a latent divides
    assert dims["height"].opt == dims["width"].opt == usual
    sizes = {"height": 5 * case.factor, "width": 3 * case.factor}
    for name in ("latent_height", "latent_width", "decoder_height", "decoder_width", "attention_tokens"):
        size = evaluate_dim(dims[name].expression or "", sizes)
        assert size is not None
        sizes[name] = size
    assert (sizes["latent_height"], sizes["latent_width"]) == (5, 3)
    assert sizes["attention_tokens"] == 15 * case.patch**2
    for stage in ARCHITECTURE.stages(config, (), ir.DataType.FLOAT).values():
        assert {n for i in stage.inputs for n in i.shape if isinstance(n, str)} <= dims.keys()


# The published files, by their shapes alone.

FULL_SIZE: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "norm_num_groups": 32, "latent_channels": 32}


def meta_tensors(**config: Any) -> dict[str, torch.Tensor]:
    """Names and shapes of a model of any size, with zeros that take no memory until they are written."""
    with torch.device("meta"):
        model = diffusers.AutoencoderKLFlux2(**config)
    return {name: torch.zeros(value.shape, dtype=torch.float16) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("decoder", [(128, 256, 512, 512), (96, 192, 384, 384)])
@pytest.mark.parametrize("alone", [False, True])
def test_published_files_need_no_configuration(tmp_path: Path, decoder: tuple[int, ...], alone: bool) -> None:
    tensors = meta_tensors(**FULL_SIZE, decoder_block_out_channels=decoder)
    if alone:
        tensors = {k: v for k, v in tensors.items() if not k.startswith(("encoder.", "quant_conv."))}
    save_file(tensors, tmp_path / "vae.safetensors")
    architecture, keys = find_architecture(open_checkpoint(tmp_path / "vae.safetensors"))
    assert architecture is ARCHITECTURE
    assert ARCHITECTURE.read_config(keys) == AutoencoderKLFlux2Config(
        in_channels=3,
        out_channels=3,
        latent_channels=32,
        block_out_channels=(128, 256, 512, 512),
        decoder_block_out_channels=decoder,
        layers_per_block=2,
        norm_num_groups=32,
        use_quant_conv=not alone,
        use_post_quant_conv=True,
        mid_block_add_attention=True,
        patch_size=2,
        batch_norm_eps=1e-4,
    )


def test_other_geometries_ask_for_what_no_tensor_shows(case: Case, tmp_path: Path) -> None:
    save_file(case.tensors(), tmp_path / "vae.safetensors")
    _, keys = find_architecture(open_checkpoint(tmp_path / "vae.safetensors"))
    with pytest.raises(ConfigError, match=r"norm_num_groups.*--config norm_num_groups=VALUE"):
        ARCHITECTURE.read_config(keys)
    told = {"norm_num_groups": case.oracle.config.norm_num_groups}
    with pytest.raises(ConfigError, match=r"batch_norm_eps.*--config batch_norm_eps=VALUE"):
        ARCHITECTURE.read_config(keys.overridden(told))
    told["batch_norm_eps"] = case.oracle.config.batch_norm_eps
    published = find_architecture(open_checkpoint(case.folder / "checkpoint"))[1]
    config = ARCHITECTURE.read_config(keys.overridden(told))
    assert config.sample_size is None  # which changes no number, and may be told
    told["sample_size"] = case.oracle.config.sample_size
    assert ARCHITECTURE.read_config(keys.overridden(told)) == ARCHITECTURE.read_config(published)


def test_other_autoencoders_are_not_recognized(small: Case) -> None:
    opened = open_checkpoint(small.folder / "checkpoint")
    assert ARCHITECTURE.recognize(opened) is not None
    for part in ("bn.", "decoder."):
        rest = {name: tensor for name, tensor in opened.tensors.items() if not name.startswith(part)}
        assert ARCHITECTURE.recognize(replace(opened, tensors=rest)) is None


def test_a_decoder_alone_decodes(small: Case, tmp_path: Path) -> None:
    decoder = {k: v for k, v in small.tensors().items() if not k.startswith(("encoder.", "quant_conv."))}
    (tmp_path / "checkpoint").mkdir()
    save_file(decoder, tmp_path / "checkpoint" / "diffusion_pytorch_model.safetensors")
    config = (small.folder / "checkpoint" / "config.json").read_text()
    (tmp_path / "checkpoint" / "config.json").write_text(config)
    write_stages(tmp_path / "checkpoint", tmp_path / "stages", ["vae_decoder"])
    latents = small.latents(1, 2, 3)
    found = OnnxruntimeReference(tmp_path / "stages" / "vae_decoder.onnx").run({"latents": latents})
    check(found, {"sample": decode(small, latents)["sample"]})
    with pytest.raises(WeightsError, match=r"tensors are missing(.|\n)*encoder\.conv_in\.weight"):
        write_stages(tmp_path / "checkpoint", tmp_path / "stages", ["vae_encoder"])


# Other spellings of the same tensors.

OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def old_diffusers(name: str, tensor: torch.Tensor, blocks: int) -> tuple[str, torch.Tensor]:
    for new, old in OLD_ATTENTION.items():
        name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
    return name, tensor


def without_index(name: str, tensor: torch.Tensor, blocks: int) -> tuple[str, torch.Tensor]:
    return name.replace("to_out.0.", "to_out."), tensor


def latent_diffusion(name: str, tensor: torch.Tensor, blocks: int) -> tuple[str, torch.Tensor]:
    """Black Forest Labs' names, the other way round than diffusers' conversion script goes."""
    parts = name.split(".")
    if parts[0] in ("quant_conv", "post_quant_conv"):
        return f"{'encoder' if parts[0] == 'quant_conv' else 'decoder'}.{name}", tensor
    if parts[1:2] in (["down_blocks"], ["up_blocks"]):
        block = int(parts[2]) if parts[1] == "down_blocks" else blocks - 1 - int(parts[2])
        side = parts[1].removesuffix("_blocks")
        if parts[3] == "resnets":
            rest = ["block", parts[4], *parts[5:]]
        else:
            rest = [f"{side}sample", *parts[5:]]
        name = ".".join([parts[0], side, str(block), *rest])
    name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    if "mid_block.attentions.0" in name:
        name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
        for new, old in {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}.items():
            name = name.replace(f"attn_1.{new}.", f"attn_1.{old}.")
        tensor = tensor[:, :, None, None].contiguous() if tensor.ndim == 2 else tensor
    return name, tensor


@pytest.mark.parametrize("spelling", [old_diffusers, without_index, latent_diffusion])
def test_other_spellings_are_the_same_tensors(small: Case, tmp_path: Path, spelling: Callable[..., Any]) -> None:
    tensors = small.tensors()
    respelled = dict(spelling(name, tensor, 4) for name, tensor in tensors.items())
    assert respelled.keys() != tensors.keys()
    save_file(respelled, tmp_path / "ae.safetensors")
    config = (small.folder / "checkpoint" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    opened = open_checkpoint(tmp_path)
    found = model_tensors(opened, ARCHITECTURE, ARCHITECTURE.read_config(find_architecture(opened)[1]))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert np.array_equal(np.asarray(found[name].read()), tensor.numpy()), name


def test_two_spellings_at_once_are_refused(small: Case, tmp_path: Path) -> None:
    tensors = small.tensors()
    tensors["decoder.norm_out.weight"] = tensors["decoder.conv_norm_out.weight"].clone()
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(WeightsError, match=r"decoder\.norm_out\.weight.*decoder\.conv_norm_out\.weight as well"):
        ARCHITECTURE.recognize(open_checkpoint(tmp_path / "vae.safetensors"))


# Configurations.

PUBLISHED: dict[str, Any] = {
    "act_fn": "silu",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
    "patch_size": [2, 2],
    "batch_norm_eps": 1e-4,
}


def test_configuration_of_the_full_model() -> None:
    config = AutoencoderKLFlux2Config.from_keys(ConfigKeys(PUBLISHED, "config.json"))
    assert config.decoder_block_out_channels == config.block_out_channels == (128, 256, 512, 512)
    assert (config.factor, config.packed_channels) == (16, 128)
    assert math.prod((config.patch_size, config.patch_size)) == 4


OPTIONAL = {"down_block_types", "up_block_types"}


@pytest.mark.parametrize("key", sorted(PUBLISHED.keys() - OPTIONAL))
def test_a_missing_key_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no {key}.*--config {key}=VALUE"):
        AutoencoderKLFlux2Config.from_keys(ConfigKeys({**PUBLISHED, key: None}, "config.json"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("act_fn", "gelu", "built is only 'silu'"),
        ("block_out_channels", [128, 250, 512, 512], "250, which norm_num_groups, 32, does not divide"),
        ("block_out_channels", 128, "expected a list"),
        ("block_out_channels", [], "has 0 widths"),
        ("decoder_block_out_channels", [96, 192], "has 2 widths, block_out_channels has 4"),
        ("down_block_types", ["DownEncoderBlock2D"] * 3, "built is only 4 times 'DownEncoderBlock2D'"),
        ("up_block_types", ["AttnUpDecoderBlock2D"] * 4, "built is only 4 times 'UpDecoderBlock2D'"),
        ("layers_per_block", 10**6, "at most 32"),
        ("patch_size", [2, 1], "square"),
        ("patch_size", [2], "square"),
    ],
)
def test_what_is_not_built_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoencoderKLFlux2Config.from_keys(ConfigKeys({**PUBLISHED, key: value}, "config.json"))
