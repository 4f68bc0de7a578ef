"""FLUX.2-klein 4B with random weights as Core ML packages: memory, sizes and seconds. Run by ``make bench``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fetched import fetched
from klein import make_checkpoint as maker
from measure import intaglio as command_line

from intaglio.engines.coreml.stats import weight_stats

# The parts, the bundle and the packages come to 4 GB each.
_DISK = 13 << 30
_SIZES = "batch=1,height=512,width=512,image_tokens=1024,text_tokens=512"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ternary transformer, a 4-bit text encoder and an autoencoder."""
    folder = tmp_path_factory.mktemp("klein")
    if (free := shutil.disk_usage(folder).free) < _DISK:
        pytest.skip(f"needs {_DISK >> 30} GiB of disk, {free >> 30} GiB are free")
    sizes = maker.SIZES["4B"]
    maker.write_transformer(folder / "packed.safetensors", "mlx", sizes)
    maker.write_text_encoder(folder / "text_encoder", "mlx", sizes)
    maker.write_vae(folder / "vae", sizes)
    fetched("qwen3-tokenizer-config")
    maker.write_tokenizer(folder / "tokenizer", fetched("qwen3-tokenizer").parent)
    done = command_line(
        "export",
        "--transformer", folder / "packed.safetensors",
        "--text-encoder", folder / "text_encoder",
        "--vae", folder / "vae",
        "--tokenizer", folder / "tokenizer",
        folder / "bundle",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "bundle"


def _compile(bundle: Path, *options: str) -> dict[str, Any]:
    """The report by stage, and the memory of the largest process."""
    done = command_line("compile", bundle, "--target", "coreml", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((bundle / "engines" / "coreml" / "report.json").read_text())
    print(f"peak RSS {done.peak_rss_mib:.0f} MiB")
    assert done.peak_rss_mib <= 5632
    return report["stages"]


@pytest.mark.full_size
@pytest.mark.parametrize(("weights", "most_bits"), [("lut", 2.3), ("lut-compact", 2.15)])
def test_packages_are_written_within_memory(bundle: Path, weights: str, most_bits: float) -> None:
    stages = _compile(bundle, "--shapes", _SIZES, "--weights", weights)
    for name, stage in stages.items():
        print(f"{name}: {stage['seconds']:.0f} s, {stage['weight_bytes'] / 1e6:.0f} MB")
        stats = weight_stats(bundle / "engines" / "coreml" / f"{name}.mlpackage")
        print(
            f"  {stats.quantized.bits:.3f} bits a quantized weight, {stats.weights.bits:.3f} of all, {stats.bytes} bytes"
        )
    stats = weight_stats(bundle / "engines" / "coreml" / "transformer.mlpackage")
    assert stats.fused_attentions == 25
    assert stats.quantized.count == 3_680_501_760
    assert stats.quantized.bits <= most_bits


@pytest.mark.full_size
def test_sizes_may_vary(bundle: Path) -> None:
    """The ranges of the dims table."""
    assert {"transformer", "text_encoder", "vae_decoder"} <= set(_compile(bundle))
