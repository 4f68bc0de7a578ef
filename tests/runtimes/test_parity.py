"""Parity: a fault is named where it begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint

import intaglio
from intaglio.engines.artifact import digest
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, TensorInfo, read_bundle
from intaglio.runtimes.difference import Bounds, Difference, compare, measure
from intaglio.runtimes.random_feeds import Sizes, random_feeds


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
    whole, built = file.read_bytes(), digest(file)
    model = ir.load(file)
    norm = next(
        n for n in model.graph if n.op_type == "RMSNormalization" and "layers/1/post" in str(n.name).replace(".", "/")
    )
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    ir.save(model, file)
    info_file = bundle / "engines" / "cpu" / "engine.json"
    info = info_file.read_text()
    with pytest.raises(EngineError, match=r"score\.onnx is not what was built"):
        intaglio.parity(bundle)
    info_file.write_text(info.replace(built, digest(file)))
    try:
        report, whole_report = intaglio.parity(bundle), intaglio.parity(bundle, keep_going=True)
        loose = intaglio.parity(bundle, bound=100, min_cosine=-1)
        direction = intaglio.parity(bundle, bound=100, min_cosine=0.999999).first_divergent
    finally:
        file.write_bytes(whole)
        info_file.write_text(info)
    first = report.first_divergent
    assert first is not None and first.name == "model.layers.1.post_attention_layernorm" and first.stage == "score"
    measures = f"relative L2 is {first.relative_l2:.2e}, above 0.0001 and cosine is {first.cosine:.7f}, below 0.99999"
    assert first.reason == measures
    assert report.differences[-1] == first and whole_report.first_divergent == first
    assert [d.name for d in whole_report.differences][: len(report.differences)] == [d.name for d in report.differences]
    assert whole_report.differences[-1].name == "logits" and len(whole_report.differences) > len(report.differences)
    assert loose.first_divergent is None and (loose.bound, loose.min_cosine) == (100, -1)
    assert direction is not None and direction.reason is not None and direction.reason.startswith("cosine is 0.")


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
    assert measure("a", a, np.zeros(3)).reason == "has the shape [2], the reference's [3]"
    assert compare("a", np.array([np.nan, 4.0]), a).reason == "1 of 2 values are not finite, and 0 of the reference's"
    assert compare("a", a, a).reason is None


def test_large_arrays_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 11)).astype(np.float32), rng.normal(size=(7, 11)).astype(np.float32)
    expected = compare("a", a, b)
    assert expected.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-6)
    assert expected.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-6)
    monkeypatch.setattr("intaglio.runtimes.difference._PART", 5)
    found = compare("a", a, b)
    assert found.cosine == pytest.approx(expected.cosine, rel=1e-12)
    assert found.relative_l2 == pytest.approx(expected.relative_l2, rel=1e-12) and found.max_abs == expected.max_abs
    b[6, 10], a[0, 0] = np.inf, np.nan
    assert compare("a", a, b).problem == "1 of 77 values are not finite, and 1 of the reference's"


def test_both_measures_are_bounds() -> None:
    bounds = Bounds(cosine=0.9, relative_l2=0.5)
    assert Difference("a", 0.9, 0.5, 1.0, bounds=bounds).reason is None
    assert Difference("a", 0.89, 0.5, 1.0, bounds=bounds).reason == "cosine is 0.8900000, below 0.9"
    assert Difference("a", 0.9, 0.51, 1.0, bounds=bounds).reason == "relative L2 is 5.10e-01, above 0.5"
    both = Difference("a", np.nan, np.nan, 1.0, bounds=bounds).reason
    assert both is not None and "relative L2" in both and " and cosine" in both


def test_sizes() -> None:
    text = {"batch": Dim(min=1, max=1), "sequence": Dim(min=1, max=16)}
    assert Sizes.choose(text) == Sizes(8, 64, 96, 1)
    assert Sizes.choose(text, tokens=2).tokens == 2
    with pytest.raises(InputError, match="tokens is 9, expected 2 to 8"):
        Sizes.choose(text, tokens=9)
    picture = {
        "batch": Dim(min=1, max=64),
        "text_tokens": Dim(min=32, max=512),
        "height": Dim(min=48, max=512, multiple_of=48),
        "width": Dim(min=512, max=512, multiple_of=16),
    }
    assert Sizes.choose(picture) == Sizes(32, 48, 512, 2)
    assert Sizes.choose(picture, height=96, tokens=33, batch=64) == Sizes(33, 96, 512, 64)
    for options, message in (
        ({"height": 64}, "height is 64, expected 48 to 512, a multiple of 48"),
        ({"width": 256}, "width is 256, expected 512 to 512"),
        ({"tokens": 31}, "tokens is 31, expected 32 to 512"),
        ({"batch": 0}, "batch is 0, expected 1 to 64"),
    ):
        with pytest.raises(InputError, match=message):
            Sizes.choose(picture, **options)


def test_random_inputs(bundle: Path) -> None:
    described = read_bundle(bundle)
    sizes = Sizes(tokens=6, height=64, width=96, batch=3)
    feeds = random_feeds(described, described.stages["generate"], described.dims, sizes, 4)
    assert feeds["attention_mask"].tolist() == [[1] * 12, [0] * 2 + [1] * 10, [1] * 12]
    assert feeds["position_ids"][:2].tolist() == [list(range(6, 12)), list(range(4, 10))]
    assert feeds["past_key_values.1.value"].shape == (3, 2, 6, 8)
    again = random_feeds(described, described.stages["generate"], described.dims, sizes, 4)
    assert all((again[name] == value).all() for name, value in feeds.items())
    other = random_feeds(described, described.stages["score"], described.dims, sizes, 5)
    assert (other["input_ids"] != feeds["input_ids"]).any()
    odd = described.stages["score"].model_copy(update={"inputs": (TensorInfo(name="odd", dtype="bool", shape=(1,)),)})
    with pytest.raises(InputError, match=r"score\.onnx: has the inputs odd, of which no random values are known"):
        random_feeds(described, odd, described.dims, sizes, 0)


def test_a_language_model_is_compared_in_score_or_its_only_stage(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "checkpoint")
    intaglio.export(source, tmp_path / "bundle", stages=["generate"])
    intaglio.compile(tmp_path / "bundle")
    report = intaglio.parity(tmp_path / "bundle")
    assert report.stages == ("generate",) and report.first_divergent is None
    with pytest.raises(InputError, match="has no stage 'score', only generate"):
        intaglio.parity(tmp_path / "bundle", stage="score")
