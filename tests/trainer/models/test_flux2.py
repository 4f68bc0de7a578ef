"""Latents, positions and conditioning in training are those of diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline
from tiny_painter import TEXT_ENCODER, TRANSFORMER, VAE, write_tokenizer
from transformers import AutoTokenizer

from intaglio.errors import CheckpointError, ConfigError
from intaglio.trainer.models import flux2


def test_packing_is_that_of_the_pipeline() -> None:
    latents = torch.randn(2, 4, 6, 10)
    assert torch.equal(flux2.pack(latents, 2), Flux2KleinPipeline._patchify_latents(latents))


def test_positions_are_those_of_the_pipeline() -> None:
    assert torch.equal(flux2.image_ids(3, 5), Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 4, 3, 5))[0])
    assert torch.equal(flux2.text_ids(7), Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, 7, 4))[0])


def test_latents_are_normalised_by_the_running_statistics() -> None:
    vae = flux2.component("vae", VAE, Path())
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 9)
    latents = torch.randn(2, 16, 3, 4)
    assert torch.allclose(flux2.normalise(vae, latents), vae.bn.eval()(latents), atol=1e-5)


def test_conditioning_is_that_of_the_pipeline(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    text_encoder = flux2.component("text_encoder", TEXT_ENCODER, Path()).eval()
    expected = Flux2KleinPipeline._get_qwen3_prompt_embeds(
        text_encoder, tokenizer, ["a red apple", "leaf"], max_sequence_length=8, hidden_states_layers=[1, 2]
    )
    batch = tokenizer(
        ["<start> a red apple <end>", "<start> leaf <end>"], padding="max_length", max_length=8, return_tensors="pt"
    )
    with torch.no_grad():
        found = flux2.conditioning(text_encoder, [1, 2], batch["input_ids"], batch["attention_mask"])
    assert torch.equal(found, expected)


def test_a_fresh_transformer_predicts_nothing() -> None:
    transformer = flux2.component("transformer", TRANSFORMER, Path())
    velocity = transformer(
        hidden_states=torch.randn(1, 6, 16),
        encoder_hidden_states=torch.randn(1, 8, 128),
        timestep=torch.tensor([0.3]),
        img_ids=flux2.image_ids(2, 3),
        txt_ids=flux2.text_ids(8),
        return_dict=False,
    )[0]
    assert not velocity.any()
    gradients = torch.autograd.grad((velocity - 1).square().sum(), transformer.proj_out.weight)
    assert gradients[0].any()


def test_models_come_back_from_their_folders(tmp_path: Path) -> None:
    for role, config in (("vae", VAE), ("text_encoder", TEXT_ENCODER), ("transformer", TRANSFORMER)):
        model = flux2.component(role, config, Path())
        model.save_pretrained(tmp_path / role)
        again = flux2.component(role, {"path": role}, tmp_path).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_key_that_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vae\.latent_chanels is no key of AutoencoderKLFlux2"):
        flux2.component("vae", {**VAE, "latent_chanels": 4}, Path())
    with pytest.raises(ConfigError, match=r"text_encoder\.hiden_size"):
        flux2.component("text_encoder", {**TEXT_ENCODER, "hiden_size": 4}, Path())
    with pytest.raises(ConfigError, match="has path and in_channels"):
        flux2.component("transformer", {"path": "x", "in_channels": 4}, Path())


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        flux2.component("vae", {"path": "nowhere"}, tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLFlux2"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as AutoencoderKLFlux2"):
        flux2.component("vae", {"path": "."}, tmp_path)


@pytest.mark.parametrize(
    ("layers", "transformer", "said"),
    [
        ([1, 3], TRANSFORMER, "expected layers from 0 to 2"),
        ([], TRANSFORMER, "expected layers from 0 to 2"),
        ([1], TRANSFORMER, "1 layers of 64 are 64 wide"),
        ([1, 2], {**TRANSFORMER, "guidance_embeds": True}, "guidance_embeds .* is true.*set it to false"),
        ([1, 2], {**TRANSFORMER, "in_channels": 8}, "the packed latents have 16 channels"),
    ],
)
def test_parts_that_do_not_fit_are_refused(layers: list[int], transformer: dict[str, object], said: str) -> None:
    models = (("transformer", transformer), ("text_encoder", TEXT_ENCODER), ("vae", VAE))
    parts = [flux2.component(role, dict(config), Path()) for role, config in models]
    with pytest.raises(ConfigError, match=said):
        flux2.check_fit(*parts, layers)
