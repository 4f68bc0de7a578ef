"""Whole stages of our own as saved Core ML packages in float32: every tap against onnxruntime on random inputs.

Bounds: relative L2 <= 1e-5, where at most 1.3e-6 was measured, and <= 1e-4 for the transformer of the demo, which
depends on the timestep drawn: 4e-6 to 9e-6 for six of them, and for one above 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from coreml_stages import (
    PICTURE_STAGES,
    decoder_feeds,
    export_demo,
    export_klein,
    feeds_of,
    worst_tap,
)
from stage_runner import write_stages
from tiny_models import TINY_MODELS

from intaglio.engines.coreml.ops.packed_weights import ORDERS
from intaglio.exporters.bundle import Dim, read_bundle

BOUND, DEMO_TRANSFORMER_BOUND = 1e-5, 1e-4
# Biases, frequencies that depend on the length, windows in some layers, norms of queries and keys.
NAMES = ("llama-biases", "llama-dynamic", "qwen2-windows", "qwen3")
DECODERS = {tiny.name: tiny for tiny in TINY_MODELS if tiny.name in NAMES}


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_klein(tmp_path_factory.mktemp("klein"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("stage", PICTURE_STAGES)
def test_klein(klein: Path, stage: str) -> None:
    worst = worst_tap(klein / f"{stage}.onnx", feeds_of(klein, stage))
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize("stage", PICTURE_STAGES)
def test_the_demo(demo: Path, stage: str) -> None:
    worst = worst_tap(demo / f"{stage}.onnx", feeds_of(demo, stage))
    assert worst[0] <= (DEMO_TRANSFORMER_BOUND if stage == "transformer" else BOUND), worst


def test_the_stages_of_a_decoder_in_bands(demo: Path) -> None:
    stages = [name for name in read_bundle(demo).stages if name.startswith("vae_tiles")]
    assert len(stages) > 10
    for stage in stages:
        worst = worst_tap(demo / f"{stage}.onnx", feeds_of(demo, stage))
        assert worst[0] <= BOUND, (stage, worst)


@pytest.mark.parametrize("weights", ORDERS[1:])
def test_other_forms_of_ternary_weights(klein: Path, weights: str) -> None:
    worst = worst_tap(klein / "transformer.onnx", feeds_of(klein, "transformer"), weights=weights)
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize("stage", ["text_encoder", "transformer", "vae_decoder"])
def test_sizes_that_vary(klein: Path, stage: str) -> None:
    names = ("batch", "text_tokens", "image_tokens", "latent_height", "latent_width")
    dims = {name: Dim(min=1, max=4096) for name in names}
    feeds = feeds_of(klein, stage, height=48, width=32, tokens=9, batch=3)
    worst = worst_tap(klein / f"{stage}.onnx", feeds, dims=dims)
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str) -> None:
    DECODERS[name].build(tmp_path / "checkpoint")
    for stage in write_stages(tmp_path / "checkpoint", tmp_path, ["score", "generate"], taps=True):
        graph = tmp_path / f"{stage}.onnx"
        worst = worst_tap(graph, decoder_feeds(graph))
        assert worst[0] <= BOUND, (stage, worst)
