"""Stages of a checkpoint as portable graphs with their weights, and ways to run one, without a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from graph_text import graph_text
from run_graph import run_onnxruntime, run_tract

from intaglio.engines import cpu
from intaglio.exporters.architecture import find_architecture, match_weights, model_tensors
from intaglio.exporters.bundle import WEIGHTS_FILE
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.graph import attach_weights, build_graph, quantize_modules, save_graph, stage_parameters
from intaglio.exporters.layers.dtype import DTYPES, set_dtype
from intaglio.exporters.weights import plan_weights, write_weights
from intaglio.kernels.cpu.library import library_path
from intaglio.progress import Progress


def write_stages(
    checkpoint: Path,
    folder: Path,
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    layers: Sequence[int] = (),
    config: Mapping[str, Any] | None = None,
    taps: bool = False,
) -> list[str]:
    """Writes stages of the model at ``checkpoint`` (all by default) and their weights; returns their names."""
    opened = open_checkpoint(checkpoint)
    architecture, keys = find_architecture(opened)
    settings = architecture.read_config(keys.overridden(config or {}))
    stages = architecture.stages(settings, tuple(layers), DTYPES[dtype])
    chosen = {name: stages[name] for name in names or stages}

    def model() -> Any:
        built = architecture.build(settings)
        set_dtype(built, DTYPES[dtype])
        return built

    weights, _ = match_weights(
        model(),
        set().union(*(stage_parameters(model(), stage) for stage in chosen.values())),
        model_tensors(opened, architecture, settings),
        lambda tensor: architecture.unneeded(tensor, settings),
        str(checkpoint),
    )
    plan, size = plan_weights(weights, DTYPES[dtype])
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / WEIGHTS_FILE, weights, plan, size, Progress(None, "weights", size, "bytes"))
    parts = {part.name: part for group in plan.values() for part in group}
    for name, stage in chosen.items():
        built = model()
        quantize_modules(built, weights)
        graph = build_graph(name, built, stage, with_taps=taps)
        attach_weights(graph, parts, WEIGHTS_FILE)
        save_graph(graph, folder / f"{name}.onnx")
    return list(chosen)


def write_stage(checkpoint: Path, name: str, folder: Path, *, taps: bool = True, **options: Any) -> Path:
    """Writes one stage as :func:`write_stages` does, with taps; returns the graph's path."""
    write_stages(checkpoint, folder, [name], taps=taps, **options)
    return folder / f"{name}.onnx"


def check_golden(graph: Path, name: str, *, write: bool) -> None:
    """Compares a graph's text with the golden file ``name``; ``write`` rewrites that first."""
    file = Path(__file__).resolve().parents[1] / "goldens" / f"{name}.txt"
    text = graph_text(ir.load(graph))
    if write:
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


def run_lowered(graph: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the graph as lowered for the CPU, with our kernels."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    options.register_custom_ops_library(str(library_path()))
    data = ir.serde.serialize_model(cpu.lower(ir.load(graph), "exact")).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


RUNNERS = {"onnxruntime": run_onnxruntime, "lowered": run_lowered, "tract": run_tract}
