"""FLUX.2-klein 4B with random weights as engines of TensorRT for RTX: memory, sizes, seconds. Run by ``make bench``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from klein_full_size import export, write_sources
from measure import intaglio as command_line
from tensorrt_rtx_builds import require_tensorrt_rtx

require_tensorrt_rtx()

# The parts and the bundle come to 4 GB each; engines, their copies in the cache and the lowered graphs to 12 together.
_DISK = 20 << 30
_SIZES = "batch=1,height=512,width=512,image_tokens=1024,text_tokens=512"
# In the blocks of the transformer.
_TERNARY = 3_680_501_760


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ternary transformer, a 4-bit text encoder and an autoencoder."""
    sources = write_sources(tmp_path_factory.mktemp("klein"), _DISK)
    export(sources)
    return sources / "bundle"


@pytest.mark.full_size
def test_engines_are_built_within_time_and_memory(bundle: Path) -> None:
    done = command_line(
        "compile", bundle, "--target", "tensorrt-rtx", "--sm", "86,89,120", "--dtype", "float16", "--shapes", _SIZES
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((bundle / "engines" / "tensorrt-rtx" / "report.json").read_text())
    stages: dict[str, Any] = report["stages"]
    for name, stage in stages.items():
        print(
            f"{name}: {stage['seconds']:.0f} s, peak RSS {stage['peak_rss_bytes'] >> 20} MiB, "
            f"{stage['package_bytes'] / 1e6:.0f} MB, {stage['bits_per_weight']} bits a weight, "
            f"{stage['quantized_bits_per_weight']} where it is packed"
        )
    transformer = stages["transformer"]
    assert transformer["peak_rss_bytes"] <= 7 * 2**30
    assert transformer["quantized_bits_per_weight"] <= 4.3
    assert (transformer["attention_fused"], transformer["attention_total"]) == (25, 25)
    assert transformer["package_bytes"] <= 4.3 / 8 * _TERNARY + 16 / 8 * (transformer["weight_count"] - _TERNARY)
