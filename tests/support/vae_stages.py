"""Tiny autoencoders of FLUX.2 from diffusers' own class, and their stages as models that onnxruntime runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnxruntime
import torch

from intaglio.exporters.architecture import find_architecture, match_weights, model_tensors
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.graph import attach_weights, build_graph, save_graph, stage_parameters
from intaglio.exporters.layers.dtype import DTYPES, set_dtype
from intaglio.exporters.weights import plan_weights, write_weights
from intaglio.progress import Progress

FULL: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 8,
    "block_out_channels": (8, 16, 32, 32),
    "layers_per_block": 2,
    "norm_num_groups": 4,
    "batch_norm_eps": 1e-4,
}
SMALL = {**FULL, "decoder_block_out_channels": (4, 12, 24, 24)}


def tiny_vae(folder: Path, *, seed: int = 0, **config: Any) -> diffusers.AutoencoderKLFlux2:
    """A model with random weights, written to ``folder`` as diffusers does."""
    torch.manual_seed(seed)
    model = diffusers.AutoencoderKLFlux2(**config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # Norms and biases are made as ones and zeros, which would hide that they are mixed up.
        if parameter.ndim == 1:
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0))
    model.bn.running_mean.copy_(torch.randn_like(model.bn.running_mean))
    model.bn.running_var.copy_(torch.rand_like(model.bn.running_var) * 3 + 0.2)
    model.save_pretrained(folder)
    return model


def write_stages(
    checkpoint: Path, folder: Path, names: Sequence[str] | None = None, *, dtype: str = "float32", taps: bool = False
) -> list[str]:
    """Writes stages of the autoencoder at ``checkpoint`` (all by default) and their weights; returns their names."""
    opened = open_checkpoint(checkpoint)
    architecture, keys = find_architecture(opened)
    config = architecture.read_config(keys)
    stages = dict(architecture.stages(config, (), DTYPES[dtype]))
    chosen = {name: stages[name] for name in (names or stages)}

    def model() -> Any:
        built = architecture.build(config)
        set_dtype(built, DTYPES[dtype])
        return built

    needed = set().union(*(stage_parameters(model(), stage) for stage in chosen.values()))
    tensors = model_tensors(opened, architecture, config)
    weights, _ = match_weights(
        model(), needed, tensors, lambda name: architecture.unneeded(name, config), str(checkpoint)
    )
    plan, size = plan_weights(weights, DTYPES[dtype])
    folder.mkdir(exist_ok=True)
    write_weights(folder / "weights.data", weights, plan, size, Progress(None, "weights", size, "bytes"))
    parts = {part.name: part for group in plan.values() for part in group}
    for name, stage in chosen.items():
        graph = build_graph(name, model(), stage, with_taps=taps)
        attach_weights(graph, parts, "weights.data")
        save_graph(graph, folder / f"{name}.onnx")
    return list(chosen)


class OrtStage:
    """A written stage that onnxruntime runs, as a pipeline's engine does: ``run(feeds) -> outputs``."""

    def __init__(self, path: Path, threads: int = 2) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.session.run(self.names, feeds), strict=True))
