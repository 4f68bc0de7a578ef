"""Readers of published checkpoints: GGUF files, safetensors files, Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf, safetensors
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor

__all__ = ["Checkpoint", "CheckpointTensor", "open_checkpoint"]

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_PICKLE_ADVICE = (
    "a pickle can run code when it is opened, so none is ever read. Take the safetensors files of the same "
    "model, or convert it where you trust it: `model.save_pretrained(folder, safe_serialization=True)`."
)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file, a safetensors file or its index, or a Hugging Face directory, told apart by content.

    Only headers are read. Raises CheckpointError.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; expected a checkpoint")
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file; expected a checkpoint")
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if head[:4] == gguf.MAGIC:
        return gguf.open_gguf(path)
    # The length of a safetensors header may have the same low byte; its upper four are zero.
    if head[4:9] != b"\0\0\0\0{" and (head[:4] == b"PK\x03\x04" or head[:1] == b"\x80"):
        raise CheckpointError(f"{path}: is a pickle; {_PICKLE_ADVICE}")
    if path.name.endswith(".index.json"):
        return safetensors.open_directory(path.parent, index=path)
    if head[8:9] == b"{":
        return safetensors.open_file(path)
    if path.suffix in _PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: is a pickle by its name; {_PICKLE_ADVICE}")
    raise CheckpointError(
        f"{path}: starts with {head[:8]!r}, which is neither GGUF (b'GGUF') nor a safetensors header. "
        "Expected a .gguf file, a .safetensors file, or a folder with config.json and safetensors."
    )


def _open_directory(path: Path) -> Checkpoint:
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return safetensors.open_directory(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return gguf.open_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(p.name for p in ggufs)
        raise CheckpointError(f"{path}: holds {len(ggufs)} GGUF files ({names}); name the one to open")
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(f"{path}: holds only pickles ({', '.join(pickles)}); {_PICKLE_ADVICE}")
    raise CheckpointError(f"{path}: holds no *.safetensors and no *.gguf; expected a checkpoint")
