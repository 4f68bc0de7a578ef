"""What ``bench`` says of a picture pipeline. How fast anything is, it alone knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import intaglio
from intaglio.engines.coreml import models
from intaglio.engines.engine import open_engine
from intaglio.errors import EngineError, InputError, RuntimeMissingError
from intaglio.runtimes import bench_against
from intaglio.runtimes.bench_picture import _operations


def test_every_stage_is_timed_and_the_transformer_beside_diffusers(klein: Path) -> None:
    result = intaglio.bench(klein, height=32, width=48, repeats=2, against="diffusers")
    assert [row["stage"] for row in result["rows"]] == ["text_encoder", "transformer", "vae_decoder", "vae_encoder"]
    assert result["ceilings"]["float32_matmul_gops"] > 0
    for row in result["rows"]:
        assert (row["height"], row["width"]) == (32, 48)
        assert row["peak_rss_mib"] > 0
        assert 0 <= row["best_seconds"] <= row["seconds"]
        assert ("of_diffusers" in row) == (row["stage"] == "transformer")
    assert result["rows"][1]["diffusers_seconds"] > 0


def test_operations_of_klein_at_512_pixels() -> None:
    """Nine and a half tera-operations in linear layers and 0.7 in attention, at 1024 image and 512 text tokens."""

    class Component:
        config = {  # noqa: RUF012
            "num_attention_heads": 24, "attention_head_dim": 128, "mlp_ratio": 3.0, "num_layers": 5,
            "num_single_layers": 20,
        }  # fmt: skip

    class Bundle:
        components = {"transformer": Component}  # noqa: RUF012

    class Engine:
        bundle = Bundle

    feeds = {"hidden_states": np.empty((1, 1024, 1)), "encoder_hidden_states": np.empty((1, 512, 1))}
    assert _operations(Engine, feeds) / 1e12 == pytest.approx(9.42 + 0.72, rel=0.01)  # type: ignore[arg-type]


def test_core_ml_is_measured_where_it_runs_and_by_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "is_mac", lambda: False)
    with pytest.raises(EngineError, match="Core ML runs on macOS"):
        intaglio.bench(tmp_path, "coreml")
    monkeypatch.setattr(models, "is_mac", lambda: True)
    with pytest.raises(InputError, match="threads is for the target cpu, and this one is coreml"):
        intaglio.bench(tmp_path, "coreml", threads=2)
    with pytest.raises(InputError, match="operators are timed on the target cpu, and this one is coreml"):
        intaglio.bench(tmp_path, "coreml", profile=True)


def test_what_has_no_meaning_is_refused(klein: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"prompt_tokens": 3}, "prompt tokens has no meaning"),
        ({"height": 40}, "multiple of 16"),
        ({"repeats": 0}, "repeats is 0"),
    ):
        with pytest.raises(InputError, match=message):
            intaglio.bench(klein, **options)
    monkeypatch.setitem(bench_against.COMPETITORS["text-to-image"], "diffusers", "intaglio.no.such.module")
    with pytest.raises(RuntimeMissingError, match=r"diffusers cannot be run beside ours: .*No module named"):
        intaglio.bench(klein, height=32, width=32, repeats=1, against="diffusers")
    assert open_engine(klein).bundle.kind == "text-to-image"
