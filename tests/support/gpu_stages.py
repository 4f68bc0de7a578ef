"""Stages to lower for TensorRT, what goes into them, and how they run in onnxruntime before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import tiny_checkpoint
from run_graph import run_onnxruntime
from safetensors.numpy import save_file

import intaglio
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.nvidia.lower import lower

# A decoder whose heads of 32 have fused kernels, two of queries for one of keys.
DECODER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def export_decoder(folder: Path, **options: Any) -> Path:
    """The bundle of a small llama of random weights: its stages are ``score`` and ``generate``."""
    tiny_checkpoint.write(folder / "checkpoint", config=DECODER)
    config = {**tiny_checkpoint.CONFIG, **DECODER}
    width, hidden, rng = config["hidden_size"], config["intermediate_size"], np.random.default_rng(4)
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        rows = {"q_proj": width, "k_proj": keys, "v_proj": keys, "o_proj": width}
        shapes |= {f"{prefix}self_attn.{name}.weight": (size, width) for name, size in rows.items()}
        shapes |= {f"{prefix}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}mlp.{name}.weight": (hidden, width) for name in ("gate_proj", "up_proj")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (width, hidden)
    tensors = {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else rng.uniform(0.7, 1.3, shape))
        for name, shape in shapes.items()
    }
    save_file({n: a.astype(np.float32) for n, a in tensors.items()}, folder / "checkpoint" / "model.safetensors")
    intaglio.export(folder / "checkpoint", folder / "bundle", **options)
    return folder / "bundle"


def write_lowered(graph: Path, folder: Path, **options: Any) -> tuple[Path, list[str]]:
    """The lowered stage in ``folder``, and what lowering says of it; ``options`` are those of ``lower``."""
    model = ir.load(graph)
    notes = lower(model, **options)
    folder.mkdir(parents=True, exist_ok=True)
    write_graph(model, folder / graph.name)
    return folder / graph.name, notes


def run_widened(graph: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs in onnxruntime as float64; bfloat16 is widened to float32 there, in feeds as well."""
    fed = {name: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for name, a in feeds.items()}
    return {name: array.astype(np.float64) for name, array in run_onnxruntime(graph, fed).items()}


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference, of that of what is expected."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
