"""The tasks that learn pictures: their losses by hand, what they learn and what they leave alone, what they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline
from safetensors.torch import load_file
from tiny_painter import LENGTH, MODEL, TASK, TEXT_ENCODER, TRANSFORMER, VAE, write_tokenizer
from training_parts import ListSource, recipe

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.errors import CancelledError, ConfigError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.kernels.quantize import Quantization
from intaglio.runtimes.flow_matching import scale_noise
from intaglio.trainer.loading import FrozenQuantizedLinear
from intaglio.trainer.loop import Trainer
from intaglio.trainer.lora import LoraSettings
from intaglio.trainer.models.flux2 import conditioning, image_ids, text_ids
from intaglio.trainer.quantization import QuantizationRule, QuantizedLinear, quantize_linears
from intaglio.trainer.tasks import autoencoder, flow_matching
from intaglio.trainer.tasks.adapted import AdaptedTask


def _batch(count: int, size: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 9, (count, LENGTH), generator=generator)
    mask = torch.ones(count, LENGTH, dtype=torch.int64)
    mask[0, 4:] = 0
    pixels = torch.randint(256, (count, 3, size, size), generator=generator) / 127.5 - 1
    return {"pixel_values": pixels, "input_ids": ids, "attention_mask": mask}


def _painter(tmp_path: Path, model: dict[str, Any] = MODEL, **settings: Any) -> flow_matching.FlowMatchingTask:
    torch.manual_seed(3)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    task = flow_matching.build_task({**TASK, **settings}, model, root=tmp_path, tokenizer=tokenizer)
    for parameter in task.transformer.parameters():
        if not parameter.any():  # it starts as the identity, which would hide everything
            parameter.data.normal_(std=0.05)
    task.vae.bn.running_var.fill_(0.3)
    return task


def test_the_loss_of_flow_matching_by_hand(tmp_path: Path) -> None:
    task, batch = _painter(tmp_path, sigma_mean=0.4, sigma_std=0.7).eval(), _batch(3)
    with torch.no_grad():
        losses = task(batch, torch.Generator().manual_seed(5))
        generator = torch.Generator().manual_seed(5)
        latents = task._encoded(batch["pixel_values"]).flatten(2).transpose(1, 2)
        drawn = torch.stack([torch.randn(4 * 4 * 16 + 1, generator=generator.manual_seed(5 + i)) for i in range(3)])
        noise = drawn[:, :-1].view_as(latents)
        sigmas = torch.sigmoid(drawn[:, -1] * 0.7 + 0.4)
        embeds = conditioning(task.text_encoder, [1, 2], batch["input_ids"], batch["attention_mask"])
        total = 0.0
        for i in range(3):  # one by one, at the noise level that the runtime would give it
            noisy = scale_noise(latents[i].numpy(), noise[i].numpy(), float(sigmas[i]))
            velocity = task.transformer(
                hidden_states=torch.from_numpy(noisy)[None],
                encoder_hidden_states=embeds[i : i + 1],
                timestep=sigmas[i : i + 1],
                img_ids=image_ids(4, 4),
                txt_ids=text_ids(LENGTH),
                return_dict=False,
            )[0]
            total += np.square((velocity[0] - (noise[i] - latents[i])).numpy().astype(np.float64)).mean()
    assert float(losses.total) == pytest.approx(total, rel=1e-5)
    assert task.weight(batch) == 3


def test_the_painter_learns_and_leaves_its_autoencoder_alone(tmp_path: Path) -> None:
    task, batch = _painter(tmp_path), _batch(4)
    quantize_linears(task, [QuantizationRule("transformer.*transformer_blocks.*", Quantization("ternary", 128))])
    before = {name: tensor.clone() for name, tensor in task.vae.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(40):
        task.train()
        loss = task(batch, torch.Generator().manual_seed(1)).total / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in task.vae.state_dict().items())
    assert all(p.grad is None for p in task.vae.parameters())


@pytest.mark.parametrize(
    ("layers", "deeper", "blocks"),
    [([1, 2], 1, (1, 1)), ([1, 2], 0, (1, 1)), ([0, 0], 0, (1, 1)), ([1, 2], 2, (2, 0)), ([0, 1], 0, (0, 2))],
)
@pytest.mark.parametrize("train_text_encoder", [True, False])
def test_trained_is_what_gets_a_gradient(
    tmp_path: Path, layers: list[int], deeper: int, blocks: tuple[int, int], train_text_encoder: bool
) -> None:
    """Text-encoder layers above the conditioning, the final norm, and ends of the transformer are frozen."""
    model = {
        **MODEL,
        "text_encoder": {**TEXT_ENCODER, "num_hidden_layers": 2 + deeper},
        "transformer": {**TRANSFORMER, "num_layers": blocks[0], "num_single_layers": blocks[1]},
    }
    task = _painter(tmp_path, model, text_encoder_out_layers=layers, train_text_encoder=train_text_encoder)
    task(_batch(2), torch.Generator()).total.backward()
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in task.named_parameters() if parameter.grad is not None}
    assert any(name.startswith("transformer.") for name in trained)
    assert any(name.startswith("text_encoder.") for name in trained) == train_text_encoder


def test_data_that_the_painter_is_not_made_for_is_refused(tmp_path: Path) -> None:
    task = _painter(tmp_path)
    with pytest.raises(ConfigError, match=r"caption_length .* is 8, and task\.max_sequence_length, .* is 16; set both"):
        _painter(tmp_path, max_sequence_length=16).weight(_batch(2))
    with pytest.raises(ConfigError, match="the data has no captions"):
        task.weight({"pixel_values": _batch(2)["pixel_values"]})
    said = "size .* is 36 x 36 pixels; the autoencoder takes multiples of 8 x 8, such as 32 x 32"
    vae = autoencoder.build_task({"kind": "autoencoder"}, VAE, root=tmp_path, tokenizer=None)
    for refusing in (task, vae):
        with pytest.raises(ConfigError, match=said):
            refusing.weight(_batch(2, 36))
        assert refusing.weight(_batch(2, 40)) == 2


def test_what_train_compile_compiles_is_called(tmp_path: Path) -> None:
    painter = _painter(tmp_path)
    vae = autoencoder.build_task({"kind": "autoencoder"}, VAE, root=tmp_path, tokenizer=None)
    adapted = AdaptedTask(_painter(tmp_path), LoraSettings(rank=2, alpha=2, target_modules=("to_q",)))
    for task, modules in ((painter, 2), (vae, 2), (adapted, 2)):
        called: set[torch.nn.Module] = set()
        for module in task.heavy_modules():
            module.register_forward_hook(lambda module, _inputs, _output, called=called: called.add(module))
        task(_batch(2), torch.Generator())
        assert called == set(task.heavy_modules())
        assert len(called) == modules


def test_adapters_of_what_nothing_uses_are_frozen(tmp_path: Path) -> None:
    model = {**MODEL, "transformer": {**TRANSFORMER, "num_layers": 2, "num_single_layers": 0}}
    task = AdaptedTask(_painter(tmp_path, model), LoraSettings(rank=2, alpha=2, target_modules="all-linear"))
    task(_batch(2), torch.Generator()).total.backward()
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in task.named_parameters() if parameter.grad is not None}
    assert trained and all(".lora_" in name for name in trained)


def test_remembered_latents_are_those_of_the_autoencoder(tmp_path: Path) -> None:
    task, batch = _painter(tmp_path, latent_cache=2), _batch(3)
    calls: list[int] = []
    encode = task.vae.encode
    task.vae.encode = lambda pixels: calls.append(len(pixels)) or encode(pixels)
    first, second = task._latents(batch["pixel_values"]), task._latents(batch["pixel_values"].flip(0)).flip(0)
    assert torch.equal(first, second)
    assert calls == [1, 1, 1, 1]  # the third picture found no room
    assert torch.allclose(first, task._encoded(batch["pixel_values"]), atol=1e-5)


def test_what_the_painter_saves_is_exported_and_paints_the_same(tmp_path: Path) -> None:
    task, batch = _painter(tmp_path, dtype="bfloat16").eval(), _batch(2)
    rules = [
        QuantizationRule("transformer.*transformer_blocks.*", Quantization("ternary", 128)),
        QuantizationRule("text_encoder.layers.*", Quantization("affine4", 64)),
    ]
    quantize_linears(task, rules)
    (tmp_path / "model").mkdir()
    task.save(tmp_path / "model")
    _round_dense(task)
    intaglio.export(tmp_path / "model", tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    pipeline = intaglio.load(tmp_path / "bundle")
    assert pipeline.model.text_length == LENGTH
    embeds = pipeline.encode_prompt(["a red apple", ""])
    ids = [[1, 3, 4, 6, 2, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0]]
    mask = [[1] * 5 + [0] * 3, [1] * 2 + [0] * 6]
    with torch.no_grad():
        expected = conditioning(task.text_encoder, [1, 2], torch.tensor(ids), torch.tensor(mask)).numpy()
        latents = task._encoded(batch["pixel_values"]).numpy()
    assert _relative(embeds, expected) <= 1e-5
    picture = (batch["pixel_values"][:1].numpy() + 1) / 2
    found = pipeline.encode_image(np.round(picture[0].transpose(1, 2, 0) * 255).astype(np.uint8))
    assert _relative(found, latents[:1]) <= 1e-5
    noise = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)
    start = torch.from_numpy(noise)
    with torch.no_grad():
        for sigma in (1.0, 0.5):
            velocity = task.transformer(
                hidden_states=start,
                encoder_hidden_states=torch.from_numpy(expected),
                timestep=torch.full((2,), sigma),
                img_ids=image_ids(4, 4),
                txt_ids=text_ids(LENGTH),
                return_dict=False,
            )[0]
            start = start - 0.5 * velocity
    painted = pipeline.sample_latents(
        embeds, height=32, width=32, num_inference_steps=2, guidance_scale=1.0, latents=noise
    )
    assert _relative(painted, start.numpy()) <= 1e-5


def _round_dense(task: flow_matching.FlowMatchingTask) -> None:
    """Rounds the parameters that are saved densely, as saving them does."""
    packed = {f"{name}.weight" for name, module in task.named_modules() if isinstance(module, QuantizedLinear)}
    for name, parameter in task.named_parameters():
        if name not in packed:
            parameter.data.copy_(parameter.bfloat16())


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_a_tokenizer_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer is missing"):
        flow_matching.build_task(TASK, MODEL, root=tmp_path, tokenizer=None)
    with pytest.raises(ConfigError, match=r"task\.shfit is unknown; did you mean shift"):
        flow_matching.build_task({**TASK, "shfit": 2}, MODEL, root=tmp_path, tokenizer=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.vae is missing"):
        flow_matching.build_task(
            TASK, {k: v for k, v in MODEL.items() if k != "vae"}, root=tmp_path, tokenizer=tmp_path
        )


def test_the_autoencoder_learns_pictures_and_the_statistics_of_its_latents(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = {**VAE, "batch_norm_momentum": 0.2}
    task = autoencoder.build_task({"kind": "autoencoder"}, config, root=tmp_path, tokenizer=None)
    rows = torch.linspace(-1, 1, 32)
    pixels = torch.stack([torch.stack([rows[:, None] * rows, rows[:, None] + 0 * rows, -rows[:, None] * rows])] * 2)
    batch = {"pixel_values": pixels}
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    parts: list[dict[str, float]] = []
    for i in range(60):
        task.train()
        losses = task(batch, torch.Generator().manual_seed(i))
        (losses.total / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        parts.append({name: part.item() / 2 for name, part in losses.parts.items()})
        expected = parts[-1]["pixel"] + parts[-1]["edge"] + 1e-4 * parts[-1]["kl"]
        assert losses.total.item() / 2 == pytest.approx(expected, rel=1e-4)
    assert parts[-1]["pixel"] < 0.5 * parts[0]["pixel"]
    task.eval()
    before = task.vae.bn.running_mean.clone()
    with torch.no_grad():
        task(batch, torch.Generator().manual_seed(0))
    assert torch.equal(task.vae.bn.running_mean, before)
    task.save(tmp_path / "vae")
    assert (tmp_path / "vae" / "config.json").is_file()


def test_the_divergence_is_that_of_torch(tmp_path: Path) -> None:
    task = autoencoder.build_task({"kind": "autoencoder"}, VAE, root=tmp_path, tokenizer=None).eval()
    batch = _batch(2)
    with torch.no_grad():
        losses = task(batch, torch.Generator().manual_seed(0))
        posterior = task.vae.encode(batch["pixel_values"]).latent_dist
    normal = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    divergence = torch.distributions.kl_divergence(torch.distributions.Normal(posterior.mean, posterior.std), normal)
    per_pixel = divergence.sum() / batch["pixel_values"].numel()
    assert losses.parts["kl"].item() / 2 == pytest.approx(per_pixel.item(), rel=1e-4)


def test_statistics_stay_float32_in_a_bfloat16_file(tmp_path: Path) -> None:
    """Bit for bit, also as diffusers reads them."""
    task = _painter(tmp_path, dtype="bfloat16")
    task.vae.bn.running_mean.normal_()
    task.vae.bn.running_var.uniform_(0.1, 3)
    (tmp_path / "model").mkdir()
    task.save(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors")
    read = AutoencoderKLFlux2.from_pretrained(tmp_path / "model" / "vae")
    for name in ("running_mean", "running_var"):
        expected = getattr(task.vae.bn, name)
        assert stored[f"bn.{name}"].dtype == torch.float32
        assert torch.equal(stored[f"bn.{name}"], expected) and torch.equal(getattr(read.bn, name), expected)
    kinds = {tensor.dtype for name, tensor in stored.items() if not name.startswith("bn.")}
    assert kinds == {torch.bfloat16}


def test_a_quantized_autoencoder_is_saved_packed_exported_and_taken_by_the_painter(tmp_path: Path) -> None:
    task = autoencoder.build_task({"kind": "autoencoder"}, VAE, root=tmp_path, tokenizer=None).eval()
    quantize_linears(task, [QuantizationRule("*.attentions.0.*", Quantization("affine4", 32))])
    task.save(tmp_path / "vae")
    tensors = open_checkpoint(tmp_path / "vae").tensors
    assert sum(tensor.layout is not None for tensor in tensors.values()) == 8
    intaglio.export(None, tmp_path / "bundle", vae=tmp_path / "vae", stages=["vae_decoder"])
    intaglio.compile(tmp_path / "bundle")
    latents = torch.randn(1, 16, 4, 4)
    bn = task.vae.bn
    with torch.no_grad():
        raw = latents * torch.sqrt(bn.running_var + bn.eps)[:, None, None] + bn.running_mean[:, None, None]
        expected = task.vae.decode(Flux2KleinPipeline._unpatchify_latents(raw)).sample.numpy()
    found = open_engine(tmp_path / "bundle").load("vae_decoder").run({"latents": latents.numpy()})
    assert _relative(found["sample"], expected) <= 1e-5

    painter = _painter(tmp_path, {**MODEL, "vae": {"path": "vae"}})
    assert any(isinstance(module, FrozenQuantizedLinear) for module in painter.vae.modules())
    with torch.no_grad():
        again = painter.vae.decode(Flux2KleinPipeline._unpatchify_latents(raw)).sample.numpy()
    assert np.array_equal(again, expected)
    (tmp_path / "model").mkdir()
    painter.save(tmp_path / "model")
    for name, tensor in open_checkpoint(tmp_path / "model" / "vae").tensors.items():
        assert tensor.layout == tensors[name].layout


def test_the_published_autoencoder_has_the_average_s_own_statistics(tmp_path: Path) -> None:
    """Averaged as its weights are, computed again in float64; and the same through a checkpoint."""
    settings = recipe({"steps": 6, "ema": 0.5, "checkpoint_every": 3})

    def trainer(folder: Path, **options: Any) -> Trainer:
        torch.manual_seed(1)
        task = autoencoder.build_task({"kind": "autoencoder"}, VAE, root=tmp_path, tokenizer=None)
        return Trainer(task, ListSource({"pixel_values": _batch(8)["pixel_values"]}, 4), settings, folder, **options)

    whole = trainer(tmp_path / "whole")
    assert whole.average is not None
    statistics, update = whole.task.vae.bn, whole.average.update
    expected = {name: value.double().clone() for name, value in statistics.named_buffers()}

    def watched() -> None:
        update()
        n = whole.average.updates
        for name, value in statistics.named_buffers():
            expected[name].lerp_(value.double(), 1 - min(0.5, (1 + n) / (10 + n)))

    whole.average.update = watched
    whole.run()
    stored = load_file(tmp_path / "whole" / "model" / "diffusion_pytorch_model.safetensors")
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(stored[f"bn.{name}"].double(), expected[name], rtol=1e-6, atol=1e-7)
        assert not torch.allclose(stored[f"bn.{name}"], getattr(statistics, name), rtol=1e-4)
    assert stored["bn.num_batches_tracked"] == statistics.num_batches_tracked == 6

    with pytest.raises(CancelledError):
        trainer(tmp_path / "cut", progress=lambda event: event.done < 4).run()
    trainer(tmp_path / "cut").run(resume=True)
    files = [tmp_path / run / "model" / "diffusion_pytorch_model.safetensors" for run in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
