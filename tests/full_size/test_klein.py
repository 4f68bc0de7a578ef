"""FLUX.2-klein 4B with random weights, at its published size: memory of export and run. Run by ``make bench``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fetched import fetched
from klein import make_checkpoint as maker
from measure import intaglio as command_line

from intaglio.exporters.bundle import read_bundle
from intaglio.exporters.checkpoints import open_checkpoint

# Packed transformer, 4-bit text encoder and autoencoder come to 3.9 GB, the bundle to 3.9.
_DISK = 9 << 30


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts in their packed spellings, with Qwen3's own tokenizer."""
    folder = tmp_path_factory.mktemp("klein")
    if (free := shutil.disk_usage(folder).free) < _DISK:
        pytest.skip(f"needs {_DISK >> 30} GiB of disk, {free >> 30} GiB are free")
    sizes = maker.SIZES["4B"]
    maker.write_transformer(folder / "packed.safetensors", "mlx", sizes)
    maker.write_text_encoder(folder / "text_encoder", "mlx", sizes)
    maker.write_vae(folder / "vae", sizes)
    fetched("qwen3-tokenizer-config")
    maker.write_tokenizer(folder / "tokenizer", fetched("qwen3-tokenizer").parent)
    return folder


@pytest.fixture(scope="module")
def bundle(sources: Path) -> Path:
    done = command_line(
        "export",
        "--transformer", sources / "packed.safetensors",
        "--text-encoder", sources / "text_encoder",
        "--vae", sources / "vae",
        "--tokenizer", sources / "tokenizer",
        sources / "bundle",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
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
