"""FLUX.2-klein 4B with random weights, at its published size: memory of export and run. Run by ``make bench``."""

from __future__ import annotations

from pathlib import Path

import pytest
from klein_full_size import export, write_sources
from measure import intaglio as command_line

from intaglio.exporters.bundle import read_bundle
from intaglio.exporters.checkpoints import open_checkpoint

# Packed transformer, 4-bit text encoder and autoencoder come to 3.9 GB, the bundle to 3.9.
_DISK = 9 << 30


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts in their packed spellings, with Qwen3's own tokenizer."""
    return write_sources(tmp_path_factory.mktemp("klein"), _DISK)


@pytest.fixture(scope="module")
def bundle(sources: Path) -> Path:
    done = export(sources)
    parts = [sources / "packed.safetensors", sources / "text_encoder", sources / "vae"]
    largest = max(tensor.nbytes for part in parts for tensor in open_checkpoint(part).tensors.values())
    print(f"export: peak RSS {done.peak_rss_mib:.0f} MiB; largest tensor {largest / 2**20:.0f} MiB")
    assert done.peak_rss_mib <= largest / 2**20 + 300
    done = command_line("compile", sources / "bundle")
    assert done.returncode == 0, done.stderr
    print(f"compile: peak RSS {done.peak_rss_mib:.0f} MiB")
    return sources / "bundle"


@pytest.mark.full_size
def test_ternary_layers_take_two_bits_and_a_scale(bundle: Path) -> None:
    kinds = read_bundle(bundle).components["transformer"].quantization
    packed = [kind for kind in kinds if kind.group_size]
    assert [(kind.tensors, kind.bits, kind.group_size, kind.has_offsets) for kind in packed] == [(100, 2, 128, False)]


@pytest.mark.full_size
@pytest.mark.parametrize(("budget", "most"), [(None, 6144), ("3500MiB", 3584)])
def test_a_picture_stays_within_its_memory(bundle: Path, tmp_path: Path, budget: str | None, most: int) -> None:
    """One step: every step takes the same memory."""
    options = ["--memory-budget", budget] if budget else []
    prompt = "a tiny bonsai tree in a ceramic pot"
    done = command_line("run", bundle, prompt, "-o", tmp_path / "out.png", "--steps", 1, "--seed", 42, *options)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    print(f"run: peak RSS {done.peak_rss_mib:.0f} MiB")
    assert done.peak_rss_mib <= most
