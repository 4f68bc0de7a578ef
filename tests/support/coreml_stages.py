"""Exported stages as saved Core ML packages: run by the evaluator and compared with onnxruntime, tap by tap."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from klein import make_checkpoint
from klein_sizes import TINY

import intaglio
from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.ops.packed_weights import packed_as
from intaglio.engines.coreml.package import write_package
from intaglio.engines.references import OnnxruntimeReference
from intaglio.exporters.bundle import Dim, read_bundle
from intaglio.runtimes.parity import compare
from intaglio.runtimes.random_feeds import Sizes, random_feeds

DEMO = Path(__file__).parents[2] / "demo" / "emoji"
PICTURE_STAGES = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")

Feeds = Mapping[str, np.ndarray]


def export_klein(folder: Path, **options: Any) -> Path:
    """The bundle of a tiny FLUX.2-klein of random weights, ternary, with taps, in no engine's form."""
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY)
    settings = {"stages": PICTURE_STAGES, "hidden_states": TINY.layers, "pack_ternary": True, "taps": True}
    intaglio.export(folder / "checkpoint", folder / "bundle", **{**settings, **options})
    return folder / "bundle"


def export_demo(folder: Path, **options: Any) -> Path:
    """The bundle of the painter that lies in the repository, with taps."""
    intaglio.export(DEMO, folder / "bundle", taps=True, **options)
    return folder / "bundle"


def feeds_of(bundle: Path, stage: str, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs of a stage, new ones each time; see :func:`random_feeds`."""
    described = read_bundle(bundle)
    chosen = Sizes.choose(described.dims, **sizes)
    return random_feeds(described, described.stages[stage], described.dims, chosen, int.from_bytes(np.random.bytes(4)))


def decoder_feeds(graph: Path, tokens: int = 12) -> dict[str, np.ndarray]:
    """Random inputs of ``score`` or ``generate``; the second row is padded on the left, past and new are as long."""
    rng = np.random.default_rng()
    inputs = {str(value.name): value for value in ir.load(graph).graph.inputs}
    past = {name: value for name, value in inputs.items() if name.startswith("past_key_values.")}
    before = tokens if past else 0
    mask = np.ones((2, before + tokens), np.int64)
    mask[1, : tokens // 3] = 0
    feeds = {
        "input_ids": rng.integers(0, 97, (2, tokens)),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)[:, before:],
    }
    for name, value in past.items():
        assert value.shape is not None
        feeds[name] = rng.standard_normal((2, int(value.shape[1]), tokens, int(value.shape[3])), np.float32)
    return feeds


def as_halves(feeds: Feeds) -> dict[str, np.ndarray]:
    """Floats that float16 holds, so that a graph of halves and one of floats are asked the same."""
    return {n: a.astype(np.float16).astype(np.float32) if a.dtype == np.float32 else a for n, a in feeds.items()}


def evaluated_stage(
    model: ir.Model,
    feeds: Feeds,
    *,
    dims: Mapping[str, int | Dim] | None = None,
    weights: str = "lut",
) -> dict[str, np.ndarray]:
    """The outputs of the saved package; by default its dims are fixed to those of the feeds."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    cast = {name: feeds[name].astype(value.dtype.numpy()) for name, value in inputs.items()}
    sizes = {
        str(dim): size
        for name, value in inputs.items()
        for dim, size in zip(value.shape or (), feeds[name].shape, strict=True)
        if not isinstance(dim, int)
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stage.mlpackage"
        with packed_as(weights):
            converted = convert(model, "stage.onnx", dims=sizes if dims is None else dims)
        write_package(converted, path)
        fed = {port.mil_name: np.atleast_1d(cast[port.name]) for port in converted.inputs}
        fed = {name: array.astype(np.int32) if array.dtype.kind in "biu" else array for name, array in fed.items()}
        found = Evaluator(path).run(fed)
        return {port.name: found[port.mil_name] for port in converted.outputs}


def worst_tap(
    graph: Path,
    feeds: Feeds,
    *,
    against: Path | None = None,
    lower: Callable[[ir.Model], object] = lambda model: None,
    **options: Any,
) -> tuple[float, str]:
    """The largest relative L2 of the outputs to onnxruntime's of ``against`` (the graph itself by default), and whose.

    ``lower`` changes the graph before it is converted; ``options`` are those of :func:`evaluated_stage`.
    """
    expected = OnnxruntimeReference(against or graph).run(feeds)
    model = ir.load(graph)
    lower(model)
    found = evaluated_stage(model, feeds, **options)
    assert found.keys() == expected.keys()
    distances = []
    for name, values in expected.items():
        difference = compare(name, found[name].astype(np.float32), values.astype(np.float32))
        assert difference.problem is None, difference
        distances.append((difference.relative_l2, name))
    return max(distances)
