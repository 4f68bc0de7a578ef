"""The painter that lies in the repository: its engine against torch, from the codes in its files to pictures.

Bounds: codes and scales identical; every tap of every stage relative L2 <= 1e-4; pictures within 1/255 before rounding,
given the same noise. torch computes with diffusers' and transformers' modules and the unpacked weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
from flux2_models import check, image_ids, run_oracle
from transformers import AutoTokenizer

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize
from intaglio.runtimes.parity import compare
from intaglio.trainer.models.flux2 import conditioning
from intaglio.trainer.tasks import flow_matching

DEMO = Path(__file__).parents[2] / "demo" / "emoji"
TAP_BOUND, PIXEL_BOUND = 1e-4, 1.0
PROMPTS = ["red apple", "four leaf clover", "a fish with the face of a lion", ""]


@pytest.fixture(scope="module")
def task() -> flow_matching.FlowMatchingTask:
    index = json.loads((DEMO / "model_index.json").read_text())
    settings = {key: index[key] for key in ("text_encoder_out_layers", "max_sequence_length")}
    parts = {role: {"path": role} for role in ("transformer", "text_encoder", "vae")}
    built = flow_matching.build_task(
        {"kind": "flow-matching", **settings}, parts, root=DEMO, tokenizer=DEMO / "tokenizer"
    )
    return built.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "bundle"
    intaglio.export(DEMO, folder, taps=True)
    intaglio.compile(folder)
    return folder


@pytest.mark.parametrize(("role", "matrices"), [("transformer", 20), ("text_encoder", 21)])
def test_codes_and_scales_of_the_graph_are_those_of_the_files(
    task: flow_matching.FlowMatchingTask, bundle: Path, role: str, matrices: int
) -> None:
    tensors = {name: t for name, t in open_checkpoint(DEMO / role).tensors.items() if t.layout is not None}
    assert len(tensors) == matrices
    nodes = [n for n in ir.load(bundle / f"{role}.onnx").graph if n.op_type == "GroupedQuantMatMul"]
    found: dict[str, tuple[GroupedQuantRows, GroupedQuantFormat]] = {}
    for node in nodes:
        values = [value for value in node.inputs[1:] if value is not None and value.const_value is not None]
        layout = GroupedQuantFormat(*(node.attributes[a].as_int() for a in ("bits", "group_size", "zero_point")))
        name = str(values[0].name).removeprefix("model.").removesuffix(".codes")
        found[name] = GroupedQuantRows(*(value.const_value.numpy() for value in values)), layout
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        rows, layout = found[name]
        stored = tensor.read()
        assert isinstance(stored, GroupedQuantRows)
        assert np.array_equal(rows.codes, stored.codes), name
        assert np.array_equal(rows.scales, stored.scales), name
        weight = getattr(task, role).get_submodule(name.removesuffix(".weight")).weight.numpy()
        assert np.array_equal(dequantize(rows, layout), weight), name


def test_every_tap_of_the_transformer_is_torch_s(task: flow_matching.FlowMatchingTask, bundle: Path) -> None:
    generator = np.random.default_rng()
    config, length = task.transformer.config, task.settings.max_sequence_length
    ids = np.stack([np.array([0, 0, 0, i]) for i in range(length)])
    inputs = {
        "hidden_states": generator.standard_normal((2, 64, config.in_channels), np.float32),
        "encoder_hidden_states": generator.standard_normal((2, length, config.joint_attention_dim), np.float32),
        "timestep": generator.uniform(0, 1, 2).astype(np.float32),
        "img_ids": np.repeat(image_ids(8, 8)[None], 2, axis=0),
        "txt_ids": np.repeat(ids[None], 2, axis=0),
    }
    found = open_engine(bundle).load("transformer").run(inputs)
    check(found, run_oracle(task.transformer, inputs), TAP_BOUND)


def test_every_tap_of_the_text_encoder_is_torch_s(task: flow_matching.FlowMatchingTask, bundle: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer")
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False) for chat in chats]
    length = task.settings.max_sequence_length
    tokens = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    feeds = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    states = task.text_encoder(**feeds, output_hidden_states=True).hidden_states
    expected = {f"te_hidden_{i}": state.numpy() for i, state in enumerate(states)}
    layers = task.settings.text_encoder_out_layers
    expected["prompt_embeds"] = conditioning(task.text_encoder, layers, *feeds.values()).numpy()
    found = open_engine(bundle).load("text_encoder").run({name: value.numpy() for name, value in feeds.items()})
    check(found, expected, TAP_BOUND)
    # The prompts are tokenized in the same way.
    embeds = intaglio.load(bundle).encode_prompt(PROMPTS)
    assert compare("prompt_embeds", embeds, expected["prompt_embeds"]).relative_l2 <= TAP_BOUND


def test_every_tap_of_the_autoencoder_is_torch_s(task: flow_matching.FlowMatchingTask, bundle: Path) -> None:
    generator, vae = np.random.default_rng(), task.vae
    latents = torch.from_numpy(generator.standard_normal((2, 32, 8, 8), np.float32))
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    seen = {"vae_bn_denorm": latents * std[:, None, None] + vae.bn.running_mean[:, None, None]}
    seen["vae_unpatchified"] = Flux2KleinPipeline._unpatchify_latents(seen["vae_bn_denorm"])
    modules = {
        "vae_post_quant_conv": vae.post_quant_conv,
        "vae_conv_in": vae.decoder.conv_in,
        "vae_mid": vae.decoder.mid_block,
        **{f"vae_up{i}": block for i, block in enumerate(vae.decoder.up_blocks)},
        "vae_conv_norm_out": vae.decoder.conv_norm_out,
    }
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output}))
        for name, module in modules.items()
    ]
    seen["sample"] = vae.decode(seen["vae_unpatchified"]).sample
    for handle in handles:
        handle.remove()
    found = open_engine(bundle).load("vae_decoder").run({"latents": latents.numpy()})
    check(found, {name: value.numpy() for name, value in seen.items()}, TAP_BOUND)
    pixels = generator.integers(0, 256, (64, 64, 3), np.uint8)
    batch = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    encoded = intaglio.load(bundle).encode_image(pixels)
    assert compare("latents", encoded, task._encoded(batch).numpy()).relative_l2 <= TAP_BOUND


@pytest.mark.parametrize(("steps", "guidance"), [(4, 1.0), (20, 3.0)])
def test_pictures_are_those_of_diffusers(
    task: flow_matching.FlowMatchingTask, bundle: Path, steps: int, guidance: float
) -> None:
    oracle = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(DEMO / "scheduler"),
        vae=task.vae,
        text_encoder=task.text_encoder,
        tokenizer=AutoTokenizer.from_pretrained(DEMO / "tokenizer"),
        transformer=task.transformer,
        is_distilled=False,
    )
    oracle.set_progress_bar_config(disable=True)
    noise = np.random.default_rng().standard_normal(
        (len(PROMPTS), task.transformer.config.in_channels, 8, 8), np.float32
    )
    request: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance, "height": 64, "width": 64}
    painted = oracle(
        prompt=PROMPTS,
        latents=torch.from_numpy(noise),
        text_encoder_out_layers=task.settings.text_encoder_out_layers,
        max_sequence_length=task.settings.max_sequence_length,
        output_type="np",
        **request,
    ).images
    expected = 255 * np.asarray(painted, np.float64)
    images = intaglio.load(bundle)(PROMPTS, latents=noise, **request).images
    found = np.stack([np.asarray(image) for image in images]).astype(np.float64)
    assert found.shape == expected.shape == (len(PROMPTS), 64, 64, 3)
    assert expected.std() > 10
    assert np.abs(found - expected).max() <= PIXEL_BOUND


def test_it_is_small_and_says_what_it_is_made_of() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8 << 20
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    for word in ("MIT", "fluent-emoji-flat", "emojibase-data", "recipes/emoji", "top 5"):
        assert word in card
