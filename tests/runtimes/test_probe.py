"""The activation-range probe on a model with an activation planted beyond half of float16's maximum."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from measure import intaglio as command_line

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.errors import BundleError, EngineError, InputError
from intaglio.runtimes.probe import TEXTS, probe

PLANTED = "model.layers.1.mlp.down_proj"


def checkpoint(folder: Path, largest: float) -> Path:
    """A model whose planted tap is about ``largest`` on the text ``abc``: scaled weights, within every dtype."""
    weights, config = tiny_checkpoint.tensors(), {"max_position_embeddings": 128}
    weights["model.embed_tokens.weight"][0] = 0  # nothing overflows on the token that a build runs on
    weights["model.layers.1.mlp.up_proj.weight"] *= 20
    if largest:
        intaglio.export(tiny_checkpoint.write(folder, config=config, weights=weights), folder / "plain", taps=True)
        intaglio.compile(folder / "plain")
        now = next(r for r in probe(folder / "plain", ["abc"]).ranges if r.name == PLANTED).max_abs
        weights[f"{PLANTED}.weight"] *= np.float32(largest / now)
        assert np.abs(weights[f"{PLANTED}.weight"]).max() < 65504
    return tiny_checkpoint.write(folder, config=config, weights=weights)


def bundle(folder: Path, largest: float, dtype: str = "float32") -> Path:
    intaglio.export(checkpoint(folder / "checkpoint", largest), folder / "bundle", taps=True, dtype=dtype)
    intaglio.compile(folder / "bundle")
    return folder / "bundle"


def test_every_tap_is_measured(tmp_path: Path) -> None:
    path = bundle(tmp_path, 0)
    report = probe(path, ["abc", "a longer text"])
    assert (report.dtype, report.maximum, report.above_half) == ("float16", 65504.0, ())
    engine = open_engine(path)
    session = engine.load("score")
    taps = [o.name for o in session.stage.outputs if o.name != "logits"]
    assert [r.name for r in report.ranges] == taps and len(taps) == 2 * 8 + 2
    tokenizer = intaglio.load(path).tokenizer
    expected = dict.fromkeys(taps, 0.0)
    for text in ("abc", "a longer text"):
        ids = np.array([tokenizer.encode(text)])
        positions = np.arange(ids.shape[1])[None]
        outputs = session.run({"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions})
        expected = {name: max(value, float(np.abs(outputs[name]).max())) for name, value in expected.items()}
    assert {r.name: r.max_abs for r in report.ranges} == expected
    assert all(r.share == r.max_abs / 65504 for r in report.ranges)
    assert probe(path) == probe(path, TEXTS)


@pytest.mark.parametrize(("largest", "above"), [(32000, False), (33500, True)])
def test_half_of_the_maximum_is_the_line(tmp_path: Path, largest: float, above: bool) -> None:
    report = probe(bundle(tmp_path, largest), ["abc"])
    planted = next(r for r in report.ranges if r.name == PLANTED)
    assert planted.max_abs == pytest.approx(largest, rel=1e-3)
    assert (planted in report.above_half) == above
    if above:  # and the residual it is added to, but nothing before
        assert [r.name for r in report.above_half] == [PLANTED, "model.layers.1"]


def test_bfloat16_has_room_and_float16_overflows(tmp_path: Path) -> None:
    report = probe(bundle(tmp_path / "a", 200000, "bfloat16"), ["abc"])
    assert report.dtype == "bfloat16" and report.maximum > 3e38 and not report.above_half
    report = probe(bundle(tmp_path / "b", 200000, "float16"), ["abc"])
    assert report.dtype == "float16"
    assert [r.name for r in report.above_half][:2] == [PLANTED, "model.layers.1"]
    assert report.above_half[0].max_abs == np.inf


def test_command_line(tmp_path: Path) -> None:
    intaglio.export(checkpoint(tmp_path / "checkpoint", 50000), tmp_path / "bundle", taps=True)
    done = command_line("inspect", tmp_path / "bundle", "--probe", "abc", "--probe", "cba")
    assert done.returncode == 1
    assert "no engine for cpu yet: compiling" in done.stderr
    assert f"2 tensors are above half of what float16 can hold:\n  {PLANTED}: " in done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"{PLANTED} "))
    assert row.split()[-1] == "yes" and done.stdout.count(" yes") == 2
    done = command_line("inspect", tmp_path / "bundle", "--probe", "abc", "--json")
    assert done.returncode == 1
    content = json.loads(done.stdout)
    assert content["above_half"] == [PLANTED, "model.layers.1"]
    assert content["dtype"] == "float16" and len(content["ranges"]) == 18
    intaglio.export(checkpoint(tmp_path / "checkpoint", 0), tmp_path / "bundle", taps=True)
    done = command_line("inspect", tmp_path / "bundle", "--probe", "")
    assert done.returncode == 0, done.stderr
    assert "all 18 tensors stay below half of what float16 can hold" in done.stderr


def test_infinite_is_null_in_json(tmp_path: Path) -> None:
    path = bundle(tmp_path, 200000, "float16")
    done = command_line("inspect", path, "--probe", "abc", "--json")
    assert done.returncode == 1
    content = json.loads(done.stdout, parse_constant=pytest.fail)
    assert next(r for r in content["ranges"] if r["name"] == PLANTED)["max_abs"] is None


def test_what_cannot_be_probed(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "checkpoint")
    for arguments in ({}, {"taps": True, "stages": ["generate"]}):
        intaglio.export(source, tmp_path / "bundle", **arguments)
        with pytest.raises(BundleError, match="has no taps to probe; export it again with --taps"):
            probe(tmp_path / "bundle")
    intaglio.export(source, tmp_path / "bundle", taps=True)
    with pytest.raises(EngineError, match="intaglio compile"):
        probe(tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    with pytest.raises(InputError, match="is empty"):
        probe(tmp_path / "bundle", [""])
    with pytest.raises(InputError, match="sequence is 80, expected 1 to 64"):
        probe(tmp_path / "bundle", ["a" * 80])
    done = command_line("inspect", tmp_path / "checkpoint", "--probe", "abc")
    assert done.returncode == 2 and "expected a bundle" in done.stderr
