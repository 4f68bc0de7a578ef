"""Parity: a fault is named where it begins."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint

import intaglio
from intaglio.errors import EngineError, InputError
from intaglio.runtimes.parity import compare


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle", taps=True)
    intaglio.compile(folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("stage", ["generate", "score"])
def test_all_outputs_agree_in_order_of_computation(bundle: Path, stage: str) -> None:
    report = intaglio.parity(bundle, stage=stage)
    assert report.first_divergent is None
    names = [difference.name for difference in report.differences]
    assert names[0] == "model.embed_tokens"
    assert names[-1] == "logits"
    if stage == "generate":
        assert names.index("present.0.key") < names.index("model.layers.0") < names.index("present.1.key")


def test_the_first_wrong_layer_is_found(bundle: Path) -> None:
    """An engine whose second layer divides by another epsilon than the bundle's graph."""
    file = bundle / "engines" / "cpu" / "score.onnx"
    whole = file.read_bytes()
    model = ir.load(file)
    norm = next(
        n for n in model.graph if n.op_type == "RMSNormalization" and "layers/1/post" in str(n.name).replace(".", "/")
    )
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    ir.save(model, file)
    info_file = bundle / "engines" / "cpu" / "engine.json"
    info = info_file.read_text()
    with pytest.raises(EngineError, match=r"score\.onnx is not the graph that was built"):
        intaglio.parity(bundle)
    digests = [hashlib.sha256(content).hexdigest() for content in (whole, file.read_bytes())]
    info_file.write_text(info.replace(*digests))
    try:
        first = intaglio.parity(bundle).first_divergent
    finally:
        file.write_bytes(whole)
        info_file.write_text(info)
    assert first is not None
    assert first.name == "model.layers.1.post_attention_layernorm"


def test_measures() -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert compare("a", a, a).relative_l2 == 0
    difference = compare("a", np.array([3.0, 4.5], np.float32), a)
    assert difference.relative_l2 == pytest.approx(0.1)
    assert difference.max_abs == pytest.approx(0.5)
    assert difference.cosine == pytest.approx((9 + 18) / (5 * np.hypot(3, 4.5)))
    assert compare("a", np.array([np.nan, 4.0]), a).relative_l2 == np.inf
    assert compare("a", np.zeros(2), a).relative_l2 == 1.0
    assert compare("a", a, np.zeros(2)).relative_l2 == np.inf
    assert compare("a", np.zeros(2), np.zeros(2)).relative_l2 == 0
    with pytest.raises(InputError, match=r"shapes differ, \[2\] and \[3\]"):
        compare("a", a, np.zeros(3))
