"""FLUX.2-klein 4B with random weights as Core ML packages: memory, sizes and seconds. Run by ``make bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from klein_full_size import export, write_sources
from measure import intaglio as command_line

from intaglio.engines.coreml.stats import weight_stats

# The parts, the bundle and the packages come to 4 GB each.
_DISK = 13 << 30
_SIZES = "batch=1,height=512,width=512,image_tokens=1024,text_tokens=512"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ternary transformer, a 4-bit text encoder and an autoencoder."""
    sources = write_sources(tmp_path_factory.mktemp("klein"), _DISK)
    export(sources)
    return sources / "bundle"


def _compile(bundle: Path, *options: str) -> dict[str, Any]:
    """What the report says of each stage, after a look at the memory of the process that built it."""
    done = command_line("compile", bundle, "--target", "coreml", *options)
    assert done.returncode == 0, done.stderr
    stages: dict[str, Any] = json.loads((bundle / "engines" / "coreml" / "report.json").read_text())["stages"]
    for name, stage in stages.items():
        print(
            f"{name}: {stage['seconds']:.0f} s, peak RSS {stage['peak_rss_bytes'] >> 20} MiB, "
            f"{stage['package_bytes'] / 1e6:.0f} MB, {stage['bits_per_weight']} bits a weight, "
            f"{stage['quantized_bits_per_weight']} where it is packed"
        )
        assert stage["peak_rss_bytes"] <= 5.5 * 2**30
    return stages


@pytest.mark.full_size
@pytest.mark.parametrize(("weights", "most_bits"), [("lut", 2.3), ("lut-compact", 2.15)])
def test_packages_are_written_within_memory(bundle: Path, weights: str, most_bits: float) -> None:
    stages = _compile(bundle, "--shapes", _SIZES, "--weights", weights)
    transformer = stages["transformer"]
    assert transformer["quantized_bits_per_weight"] <= most_bits
    assert (transformer["attention_fused"], transformer["attention_total"]) == (25, 25)
    stats = weight_stats(bundle / "engines" / "coreml" / "transformer.mlpackage")
    assert stats.quantized.count == 3_680_501_760


@pytest.mark.full_size
def test_sizes_may_vary(bundle: Path) -> None:
    """The ranges of the dims table."""
    assert {"transformer", "text_encoder", "vae_decoder"} <= set(_compile(bundle))
