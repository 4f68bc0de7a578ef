"""The sources of FLUX.2-klein 4B with random weights, at its published size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fetched import fetched
from klein import make_checkpoint as maker
from measure import Measured
from measure import intaglio as command_line


def write_sources(folder: Path, disk: int) -> Path:
    """The parts in their packed spellings, with Qwen3's own tokenizer. Skips unless ``disk`` bytes are free."""
    if (free := shutil.disk_usage(folder).free) < disk:
        pytest.skip(f"needs {disk >> 30} GiB of disk, {free >> 30} GiB are free")
    sizes = maker.SIZES["4B"]
    maker.write_transformer(folder / "packed.safetensors", "mlx", sizes)
    maker.write_text_encoder(folder / "text_encoder", "mlx", sizes)
    maker.write_vae(folder / "vae", sizes)
    fetched("qwen3-tokenizer-config")
    maker.write_tokenizer(folder / "tokenizer", fetched("qwen3-tokenizer").parent)
    return folder


def export(sources: Path) -> Measured:
    """``sources/bundle`` by the command line, and what that took."""
    done = command_line(
        "export",
        "--transformer", sources / "packed.safetensors",
        "--text-encoder", sources / "text_encoder",
        "--vae", sources / "vae",
        "--tokenizer", sources / "tokenizer",
        sources / "bundle",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done
