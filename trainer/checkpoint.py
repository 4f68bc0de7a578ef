"""Checkpoints of a run: folders that appear whole or not at all, from which it goes on bit for bit.

``checkpoints/step-00000500/`` holds ``weights.safetensors`` (what is trained, and buffers), ``average.safetensors``
(of these weights, where the recipe asks for it), ``optimizer.safetensors``, ``random-RANK.safetensors`` and
``state.json``. Tensors are whole whatever they were sharded over, so any number of ranks can go on from them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from intaglio.errors import CheckpointError, OutputError
from intaglio.output import replaced_folder
from intaglio.trainer.loading import FrozenQuantizedLinear
from intaglio.trainer.sharding import like, whole

FORMAT = 2
# Enough to tell two models apart, and little to read of a large one.
_HASHED_VALUES = 4096
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` updates lies."""
    return checkpoints / f"step-{step:08}"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps of which there are checkpoints, oldest first."""
    matches = (_NAME.fullmatch(folder.name) for folder in checkpoints.glob("step-*") if folder.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def prune(checkpoints: Path, keep: int) -> None:
    """Removes all but the last ``keep`` checkpoints."""
    for step in saved_steps(checkpoints)[:-keep]:
        folder = checkpoint_folder(checkpoints, step)
        # Renamed first: what is half removed must not look like a checkpoint.
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any], writes: bool = True
) -> None:
    """Writes ``NAME.safetensors`` for each of ``tensors`` and ``state.json``. Raises OutputError.

    All ranks have to call it, for sharded tensors are gathered; the one that ``writes`` does.
    """
    if not writes:
        for content in tensors.values():
            for tensor in content.values():
                whole(tensor.detach())
        return
    with replaced_folder(folder) as partial:
        for name, content in tensors.items():
            gathered = {key: whole(tensor.detach()).cpu().contiguous() for key, tensor in content.items()}
            try:
                save_file(gathered, partial / f"{name}.safetensors")
            except SafetensorError as error:  # a full disk, for one, which it does not say as an OSError
                raise OutputError(
                    f"{folder}: cannot be written ({error}); free space or choose another disk. Earlier checkpoints "
                    "are kept"
                ) from error
        text = json.dumps({"format": FORMAT, **state}, indent=1)
        (partial / "state.json").write_text(text, encoding="utf-8")


def read_state(folder: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """What ``state.json`` of a checkpoint holds. Raises CheckpointError, also where it lacks one of ``keys``."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_advice(folder)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: is no state of a training run in format {FORMAT}; {_advice(folder)}")
    if lacking := [key for key in keys if key not in state]:
        raise CheckpointError(f"{path}: lacks {', '.join(lacking)}; {_advice(folder)}")
    return state


@contextmanager
def refused_state(folder: Path) -> Iterator[None]:
    """Raises CheckpointError where values of a checkpoint turn out inside the block to be of other kinds or shapes."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder}: holds something else than a run saves ({reason}); {_advice(folder)}"
        ) from error


def _advice(folder: Path) -> str:
    """What to do about a damaged checkpoint."""
    if not _NAME.fullmatch(folder.name):
        return f"move {folder} away; --resume goes on without it, and the next evaluation writes it anew"
    earlier = [step for step in saved_steps(folder.parent) if checkpoint_folder(folder.parent, step) < folder]
    then = f"--resume goes on from step {earlier[-1]}" if earlier else "start anew: there is no earlier one"
    return f"move {folder} away, then {then}"


def read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of ``NAME.safetensors`` of a checkpoint. Raises CheckpointError."""
    path = folder / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_advice(folder)}") from error


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; one that has several names has its first."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the weights and change, by name: not those of packed layers."""
    kept = module.state_dict(keep_vars=True).keys() - _packed_buffers(module).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _packed_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, FrozenQuantizedLinear)]
    return {f"{name}.{key}": buffer for name, layer in layers for key, buffer in layer.named_buffers()}


def frozen_fingerprint(module: nn.Module) -> str:
    """A hash of the weights that are not trained, which no checkpoint holds: of the first values of each."""
    digest = hashlib.blake2b(digest_size=16)
    frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    for name, tensor in {**frozen, **_packed_buffers(module)}.items():
        first = tensor.detach().flatten()[:_HASHED_VALUES].float().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(first.numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def load_weights(module: nn.Module, tensors: Mapping[str, torch.Tensor], what: Path) -> None:
    """Copies trained weights and buffers of a checkpoint into ``module``. Raises CheckpointError on a difference."""
    own: dict[str, torch.Tensor] = {**trained_parameters(module), **saved_buffers(module)}
    if own.keys() != tensors.keys():
        name = min(own.keys() ^ tensors.keys())
        where = "is in the checkpoint only" if name in tensors else "is missing"
        raise CheckpointError(f"{what}: {name} {where}; resume with the recipe that the checkpoint was written with")
    for name, target in own.items():
        if target.shape != tensors[name].shape:
            raise CheckpointError(
                f"{what}: {name} has shape {tuple(tensors[name].shape)}, the model {tuple(target.shape)}; resume with "
                "the recipe that the checkpoint was written with"
            )
        target.copy_(like(tensors[name], target))


def random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The states of torch's, NumPy's and Python's own generators: tensors, and plain values."""
    numpy_state: Any = np.random.get_state(legacy=False)
    version, numbers, gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "python": torch.tensor(numbers, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    values = {
        "numpy": [int(numpy_state["state"]["pos"]), int(numpy_state["has_gauss"]), float(numpy_state["gauss"])],
        "python": [version, gauss],
    }
    return tensors, values


def set_random_state(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Puts back what :func:`random_state` gave."""
    torch.set_rng_state(tensors["torch"])
    position, has_gauss, gauss = values["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, next_gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
