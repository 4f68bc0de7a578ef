"""Tiny FLUX.2 transformers from diffusers' own class, what goes into them, and the comparison with what comes out.

Bounds in float32: relative L2 <= 5e-6 and cosine >= 0.9999999 for every tap and the output. Measured: at most 6e-7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import Flux2Transformer2DModel

from intaglio.runtimes.parity import compare

BOUND, COSINE = 5e-6, 0.9999999

SETTINGS: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (16, 16, 16, 16),
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
TINY = {
    "flux2-klein": SETTINGS,
    "flux2-dev": {**SETTINGS, "guidance_embeds": True, "mlp_ratio": 2.5, "num_attention_heads": 3, "num_layers": 1},
    "flux2-axes": {
        **SETTINGS,
        "axes_dims_rope": (4, 20, 28, 12),
        "rope_theta": 500,
        "eps": 1e-3,
        "out_channels": 12,
        "num_single_layers": 1,
    },
}
# Widths that groups of 128 divide.
TERNARY = {**SETTINGS, "num_attention_heads": 4, "num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 128}
MODULATIONS = [f"{part}_{place}" for place in ("msa", "mlp") for part in ("shift", "scale", "gate")]


def tiny_model(config: dict[str, Any], seed: int = 20) -> Flux2Transformer2DModel:
    torch.manual_seed(seed)
    model = Flux2Transformer2DModel(**config).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Large enough to matter; the weights of norms around one.
        parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.normal_(1.0, 0.3)
    return model


def image_ids(height: int, width: int, time: int = 0) -> np.ndarray:
    """Positions of a grid of packed latents; a reference picture has a time of its own."""
    rows, columns = np.indices((height, width)).reshape(2, -1)
    return np.stack([np.full_like(rows, time), rows, columns, np.zeros_like(rows)], axis=1)


def feeds(config: dict[str, Any], batch: int, grids: list[tuple[int, int]], text: int, seed: int = 3) -> dict[str, Any]:
    """Random inputs; the grids after the first are reference pictures, at times 10, 20, …"""
    generator = np.random.default_rng(seed)
    img_ids = np.concatenate([image_ids(*grid, time=10 * i) for i, grid in enumerate(grids)])
    txt_ids = np.stack([np.array([0, 0, 0, i]) for i in range(text)])
    values = {
        "hidden_states": generator.standard_normal((batch, len(img_ids), config["in_channels"]), np.float32),
        "encoder_hidden_states": generator.standard_normal((batch, text, config["joint_attention_dim"]), np.float32),
        "timestep": generator.uniform(0, 1, batch).astype(np.float32),
        "img_ids": np.repeat(img_ids[None], batch, axis=0),
        "txt_ids": np.repeat(txt_ids[None], batch, axis=0),
    }
    if config["guidance_embeds"]:
        values["guidance"] = generator.uniform(1, 5, batch).astype(np.float32)
    return values


def run_oracle(oracle: Flux2Transformer2DModel, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """diffusers' prediction and all named points before it."""
    seen: dict[str, Any] = {}
    hooks = []

    def keep(name: str, module: torch.nn.Module) -> None:
        hooks.append(module.register_forward_hook(lambda m, i, output: seen.__setitem__(name, output)))

    keep("x_emb_out", oracle.x_embedder)
    keep("ctx_emb_out", oracle.context_embedder)
    keep("img", oracle.double_stream_modulation_img)
    keep("txt", oracle.double_stream_modulation_txt)
    keep("single", oracle.single_stream_modulation)
    for i, block in enumerate(oracle.transformer_blocks):
        keep(f"double_block{i}", block)
    for i, block in enumerate(oracle.single_transformer_blocks):
        keep(f"single_block{i}_h", block)
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    # The oracle takes the positions of the first row for all.
    ids = torch.cat([tensors["txt_ids"][0], tensors["img_ids"][0]])
    try:
        with torch.no_grad():
            seen["noise_pred"] = oracle(**tensors).sample
            for name, value in zip(("rope_cos", "rope_sin"), oracle.pos_embed(ids), strict=True):
                seen[name] = value[:, ::2].expand(len(inputs["timestep"]), -1, -1)
    finally:
        for hook in hooks:
            hook.remove()
    for i in range(len(oracle.transformer_blocks)):
        seen[f"double_block{i}_enc"], seen[f"double_block{i}_h"] = seen.pop(f"double_block{i}")
    last = len(oracle.transformer_blocks) - 1
    seen["single_in_hidden_states"] = torch.cat([seen[f"double_block{last}_enc"], seen[f"double_block{last}_h"]], dim=1)
    for name, names in (
        ("img", MODULATIONS),
        ("txt", [f"c_{n}" for n in MODULATIONS]),
        ("single", [f"single_mod_{part}" for part in ("shift", "scale", "gate")]),
    ):
        seen |= dict(zip(names, seen.pop(name)[:, None].chunk(len(names), dim=-1), strict=True))
    return {name: value.float().numpy() for name, value in seen.items()}


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float = BOUND) -> float:
    """Compares every name; returns the largest relative L2."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        difference = compare(name, found[name], value)
        assert difference.relative_l2 <= bound, difference
        assert difference.cosine >= min(COSINE, 1 - bound), difference
        worst = max(worst, difference.relative_l2)
    return worst
