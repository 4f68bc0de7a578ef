"""Parity of a tiny FLUX.2-klein: the engine beside other runtimes, and beside diffusers' and transformers' tensors.

Bounds: relative L2 <= 1e-5 and cosine >= 0.9999999 for every tap, output and step between runtimes (measured: at most
2e-6); relative L2 <= 5e-5 beside diffusers (measured: 1.1e-5, since an angle of 1000 rounds by 3e-5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from klein_bundle import export_klein, write_klein
from transformers import Qwen3ForCausalLM

import intaglio
from intaglio.errors import EngineError
from intaglio.runtimes.golden_writing import write_golden

BOUND, DIFFUSERS_BOUND, COSINE = 1e-5, 5e-5, 0.9999999
ROWS, COLUMNS, TOKENS = 3, 2, 9
MODULATIONS = [f"{part}_{place}" for place in ("msa", "mlp") for part in ("shift", "scale", "gate")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_klein(tmp_path_factory.mktemp("klein"))


BANDS = (
    "vae_tiles_attention_in", "vae_tiles_attention", "vae_tiles_attention_out", "vae_tiles_up1_upsample",
    "vae_tiles_up2_resnet0_conv2", "vae_tiles_out",
)  # fmt: skip


@pytest.fixture(scope="module")
def bands(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bands")
    (folder / "checkpoint").symlink_to(bundle.parent / "checkpoint")
    return export_klein(folder, stages=BANDS)


@pytest.mark.parametrize("against", ["onnxruntime", "tract"])
@pytest.mark.parametrize(("batch", "height", "width"), [(None, None, None), (1, 16, 48)])
def test_every_stage_and_tap(
    bundle: Path, against: str, batch: int | None, height: int | None, width: int | None
) -> None:
    report = intaglio.parity(
        bundle, against=against, batch=batch, height=height, width=width, seed=2, bound=BOUND, min_cosine=COSINE
    )
    assert report.first_divergent is None
    stages = {stage: sum(d.stage == stage for d in report.differences) for stage in report.stages}
    assert stages == {"text_encoder": 5, "transformer": 28, "vae_decoder": 11, "vae_encoder": 1}
    assert any(d.relative_l2 > 0 for d in report.differences), "both sides were the same"


@pytest.mark.parametrize("against", ["onnxruntime", "tract"])
def test_the_decoder_in_bands(bands: Path, against: str) -> None:
    report = intaglio.parity(bands, against=against, bound=BOUND, min_cosine=COSINE)
    assert report.first_divergent is None and report.stages == BANDS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(bundle: Path, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").symlink_to(bundle.parent / "checkpoint")
    path = export_klein(tmp_path, dtype=dtype)
    report = intaglio.parity(path)
    assert report.first_divergent is None and len(report.stages) == 4
    # Measured in float16: at most 6.5e-4.
    assert report.bound == {"float16": 1e-2, "bfloat16": 1e-4}[dtype]
    write_golden(path, tmp_path / "golden", tokens=5, height=16, width=32)
    report = intaglio.parity(path, against=f"golden:{tmp_path / 'golden'}", bound={"float16": 1e-2}.get(dtype, 1e-5))
    assert report.first_divergent is None and len(report.differences) == 54
    if dtype == "float16":  # measured: at most 1.3e-2, at the end of the decoder
        report = intaglio.parity(path, against="tract", keep_going=True)
        assert report.first_divergent is None and report.bound == 3e-2
    else:
        with pytest.raises(EngineError, match="has bfloat16 weights, a type that tract does not read"):
            intaglio.parity(path, against="tract")


@contextmanager
def kept(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, Any]]:
    """What the modules give while they run."""
    seen: dict[str, Any] = {}

    def keep(name: str, module: torch.nn.Module) -> Any:
        return module.register_forward_hook(lambda m, i, output: seen.__setitem__(name, output))

    hooks = [keep(name, module) for name, module in modules.items()]
    try:
        with torch.no_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def transformer_tensors(model: Flux2Transformer2DModel, noise: torch.Tensor, cond: torch.Tensor) -> dict[str, Any]:
    """One forward pass and four Euler steps of diffusers' scheduler."""
    img_ids = torch.cartesian_prod(torch.tensor([0]), torch.arange(ROWS), torch.arange(COLUMNS), torch.tensor([0]))
    txt_ids = torch.cartesian_prod(*[torch.tensor([0])] * 3, torch.arange(TOKENS))
    ids = {"img_ids": img_ids[None], "txt_ids": txt_ids[None]}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.25, 4), mu=1.9)
    tensors: dict[str, Any] = {"tf_in_hidden_states": noise[0], "sigmas": scheduler.sigmas, "cond": cond[0]}
    tensors |= {"timesteps": scheduler.timesteps, "timestep_step0": scheduler.timesteps[0], **ids}

    def velocity(latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return model(latents, cond, timestep[None] / 1000, ids["img_ids"], ids["txt_ids"]).sample

    modules = {"x_emb_out": model.x_embedder, "ctx_emb_out": model.context_embedder, "rope": model.pos_embed}
    modules |= {"": model.double_stream_modulation_img, "c_": model.double_stream_modulation_txt}
    modules |= {"single_mod_": model.single_stream_modulation}
    modules |= {f"double_block{i}": block for i, block in enumerate(model.transformer_blocks)}
    modules |= {f"single_block{i}_h": block for i, block in enumerate(model.single_transformer_blocks)}
    with kept(modules) as seen:
        tensors["noise_step0"] = velocity(noise, scheduler.timesteps[0])
    for prefix, names in (("", MODULATIONS), ("c_", MODULATIONS), ("single_mod_", ["shift", "scale", "gate"])):
        chunks = seen.pop(prefix)[0].chunk(len(names))
        tensors |= {f"{prefix}{name}": chunk for name, chunk in zip(names, chunks, strict=True)}
    for i in range(len(model.transformer_blocks)):
        tensors[f"double_block{i}_enc"], tensors[f"double_block{i}_h"] = seen.pop(f"double_block{i}")
    tensors["single_in_hidden_states"] = torch.cat([tensors["double_block1_enc"], tensors["double_block1_h"]], dim=1)
    with torch.no_grad():
        text, image = model.pos_embed(txt_ids), model.pos_embed(img_ids)
        del seen["rope"]
        for i, name in enumerate(("rope_cos", "rope_sin")):  # each angle stands there twice
            tensors[name] = torch.cat([text[i], image[i]])[:, ::2]
        latents = noise
        for i, timestep in enumerate(scheduler.timesteps):
            tensors[f"noise_step{i}"] = velocity(latents, timestep)
            latents = scheduler.step(tensors[f"noise_step{i}"], timestep, latents, return_dict=False)[0]
            tensors[f"latent_after_step{i}"] = latents
    return {**tensors, **seen}


def decoder_tensors(model: AutoencoderKLFlux2, packed: torch.Tensor) -> dict[str, Any]:
    """The decoder, from latents as the transformer leaves them."""
    std = torch.sqrt(model.bn.running_var.view(1, -1, 1, 1) + model.config.batch_norm_eps)
    normal = packed * std + model.bn.running_mean.view(1, -1, 1, 1)
    pixels = normal.reshape(1, 32, 2, 2, ROWS, COLUMNS).permute(0, 1, 4, 2, 5, 3).reshape(1, 32, 2 * ROWS, 2 * COLUMNS)
    decoder = model.decoder
    modules = {"vae_post_quant_conv": model.post_quant_conv, "vae_conv_in": decoder.conv_in}
    modules |= {"vae_mid": decoder.mid_block, "vae_conv_norm_out": decoder.conv_norm_out}
    modules |= {f"vae_up{i}": block for i, block in enumerate(decoder.up_blocks)}
    with kept(modules) as seen:
        decoded = model.decode(pixels).sample
    return {
        "vae_in_packed": packed,
        "vae_bn_denorm": normal,
        "vae_unpatchified": pixels,
        "vae_decoded": decoded,
        **seen,
    }


@pytest.fixture(scope="module")
def published(bundle: Path) -> Path:
    """A golden folder of what diffusers and transformers compute, without a batch axis here and there."""
    checkpoint, folder = bundle.parent / "checkpoint", bundle.parent / "published"
    generator = torch.Generator().manual_seed(3)
    text_encoder = Qwen3ForCausalLM.from_pretrained(checkpoint / "text_encoder", dtype=torch.float32).eval()
    ids = torch.randint(0, 261, (1, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < 6).long()[None]
    with torch.no_grad():
        states = text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    cond = torch.cat(states[1:4], dim=-1)
    tensors: dict[str, Any] = {"input_ids": ids[0].int(), "attention_mask": mask[0].int(), "te_cond_384": cond[0]}
    tensors |= {f"te_hidden_{i}": states[i] for i in range(4)}
    noise = torch.randn((1, ROWS * COLUMNS, 128), generator=generator)
    transformer = Flux2Transformer2DModel.from_pretrained(checkpoint / "transformer", torch_dtype=torch.float32)
    tensors |= transformer_tensors(transformer.eval(), noise, cond)
    vae = AutoencoderKLFlux2.from_pretrained(checkpoint / "vae", torch_dtype=torch.float32).eval()
    latents = tensors["latent_after_step3"]
    with torch.no_grad():
        tensors |= decoder_tensors(vae, latents.reshape(1, ROWS, COLUMNS, 128).permute(0, 3, 1, 2))
    folder.mkdir()
    for name, tensor in tensors.items():
        array = tensor.numpy()
        np.save(folder / f"{name}.npy", array.astype("<f4") if array.dtype.kind == "f" else array)
    return folder


def test_what_diffusers_computes(bundle: Path, published: Path) -> None:
    report = intaglio.parity(bundle, against=f"golden:{published}", bound=DIFFUSERS_BOUND, min_cosine=COSINE)
    assert report.first_divergent is None
    assert report.stages == ("text_encoder", "transformer", "vae_decoder")
    assert len(report.differences) == 6 + 28 + 8 + 11
    assert (report.not_compared, report.unmatched) == ((), ())
    assert report.notes == ("vae_encoder was not run: vae_in_image.npy not there",)


def test_published_bounds(bundle: Path, published: Path) -> None:
    """What passes them in bfloat16, which the folders of other programs were made in."""
    report = intaglio.parity(bundle, against=f"golden:{published}")
    assert report.first_divergent is None and report.bound is None
    bounds = {d.bounds.relative_l2 for d in report.differences if d.bounds}
    assert bounds == {2e-2, 5e-2, np.inf}
