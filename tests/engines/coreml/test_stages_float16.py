"""Whole stages narrowed to float16, as saved Core ML packages: every tap against onnxruntime in float32.

Bound: relative L2 <= 5e-3. Measured: at most 4e-3, at the logits of decoders and after their feed-forward layers, and
2.6e-3 in the stages of pictures. A graph that was exported in float16 is narrowed by the same rules: what a float32
graph becomes gives the same numbers, to the bit, where no rounding of a weight comes in between.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from coreml_models import expected, model
from coreml_stages import (
    PICTURE_STAGES,
    as_halves,
    decoder_feeds,
    evaluated_stage,
    export_demo,
    export_klein,
    feeds_of,
    worst_tap,
)
from stage_runner import write_stages
from tiny_models import TINY_MODELS

from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.runtimes.parity import compare

BOUND = 5e-3
DECODERS = {tiny.name: tiny for tiny in TINY_MODELS if tiny.name in ("llama-biases", "qwen3")}


def narrow(model: ir.Model) -> None:
    lowering = NarrowDtypePass(ir.DataType.FLOAT16)
    lowering(model)
    assert not lowering.kept
    assert not lowering.broken


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("klein")
    return {dtype: export_klein(folder / dtype, dtype=dtype) for dtype in ("float32", "float16")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("stage", PICTURE_STAGES)
def test_klein(klein: dict[str, Path], stage: str) -> None:
    graph = klein["float32"] / f"{stage}.onnx"
    worst = worst_tap(graph, feeds_of(klein["float32"], stage), lower=narrow)
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize("stage", PICTURE_STAGES)
def test_the_demo(demo: Path, stage: str) -> None:
    worst = worst_tap(demo / f"{stage}.onnx", feeds_of(demo, stage), lower=narrow)
    assert worst[0] <= BOUND, worst


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str) -> None:
    DECODERS[name].build(tmp_path / "checkpoint")
    for stage in write_stages(tmp_path / "checkpoint", tmp_path, ["score", "generate"], taps=True):
        graph = tmp_path / f"{stage}.onnx"
        worst = worst_tap(graph, decoder_feeds(graph), lower=narrow)
        assert worst[0] <= BOUND, (stage, worst)


@pytest.mark.parametrize("stage", ["text_encoder", "transformer"])
def test_it_computes_what_a_float16_export_computes(klein: dict[str, Path], stage: str) -> None:
    feeds = as_halves(feeds_of(klein["float32"], stage))
    graphs = [ir.load(klein[dtype] / f"{stage}.onnx") for dtype in ("float32", "float16")]
    narrow(graphs[0])
    ours, theirs = (evaluated_stage(graph, feeds) for graph in graphs)
    for name, values in theirs.items():
        # Angles are taps before they are rounded.
        found = ours[name].astype(np.float16 if name.startswith("rope_") else np.float32)
        assert np.array_equal(found.astype(np.float32), values.astype(np.float32)), name


def test_an_exported_float16_graph(klein: dict[str, Path]) -> None:
    feeds = as_halves(feeds_of(klein["float32"], "vae_decoder"))
    graphs = {dtype: klein[dtype] / "vae_decoder.onnx" for dtype in klein}
    worst = worst_tap(graphs["float16"], feeds, against=graphs["float32"])
    assert worst[0] <= BOUND, worst


def test_an_attention_whose_mask_float16_does_not_hold() -> None:
    text = """g (float[1,2,4,8] q, float[1,1,4,4] m) => (float[1,2,4,8] y) <float least = {-3.4e38}> {
        a = Mul(m, least) t = Attention(q, q, q, a) y = Relu(t)
    }"""
    mask = np.triu(np.ones((1, 1, 4, 4), np.float32), 1)
    mask[..., 2, :] = 1  # masked as a whole: what it sees then is nothing to rely on, but no NaN
    proto = model(text, 23)
    feeds = {"q": np.random.default_rng().standard_normal((1, 2, 4, 8), np.float32), "m": mask}
    graph = ir.from_proto(proto)
    NarrowDtypePass(ir.DataType.FLOAT16)(graph)
    found, (wanted,) = evaluated_stage(graph, feeds)["y"], expected(proto, feeds)
    assert np.isfinite(found).all()
    rows = [0, 1, 3]
    assert compare("y", found[..., rows, :], wanted[..., rows, :]).relative_l2 <= BOUND
