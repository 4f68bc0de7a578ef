"""LoRA adapters for engines that are loaded: which weight of a stage each pair of matrices belongs to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from intaglio.engines.nvidia.refit import LoraTerm
from intaglio.errors import InputError
from intaglio.exporters.checkpoints.lora import check_finite, open_adapter
from intaglio.exporters.checkpoints.tensors import CheckpointTensor

# What files put before the names of modules of a pipeline's parts, dots or underscores after it.
_PREFIXES = (
    "model.diffusion_model",
    "diffusion_model",
    "transformer",
    "unet",
    "text_encoder",
    "lora_unet",
    "lora_transformer",
    "lora_te",
    "lora_te1",
    "lora_text_encoder",
)
_SHOWN = 4


def read_terms(path: str | Path, weights: Collection[str]) -> dict[str, LoraTerm]:
    """The terms of the adapter at ``path`` by the names of a stage's ``weights``, such as ``layers.0.q_proj.weight``.

    Names of modules are the checkpoint's, with the prefix of a part or ``model.`` before them, or with underscores for
    their dots. Raises CheckpointError, and InputError where modules are none of the stage's: a file that spells them as
    another publisher, or joins several, is for ``intaglio export --lora``.
    """
    adapter = open_adapter(path)
    check_finite(adapter)
    modules = {weight.removesuffix(".weight"): weight for weight in weights}
    flat = {module.replace(".", "_"): weight for module, weight in modules.items()}
    terms: dict[str, LoraTerm] = {}
    unmatched = []
    for module in adapter.modules.values():
        known = flat if module.is_flat else modules
        names = (name for name in _spellings(module.name, "_" if module.is_flat else ".") if name in known)
        if (name := next(names, None)) is None:
            unmatched.append(module.down.name)
        elif known[name] in terms:
            raise InputError(f"{path}: {module.down.name} is of {known[name]}, as another pair is; keep one spelling")
        else:
            terms[known[name]] = LoraTerm(_read(module.down), _read(module.up), module.scale)
    if unmatched:
        listed = ", ".join(unmatched[:_SHOWN]) + (", …" if len(unmatched) > _SHOWN else "")
        raise InputError(
            f"{path}: {len(unmatched)} of {len(adapter.modules)} modules are none of the stage's: {listed}. It has "
            f"{', '.join(sorted(modules)[:_SHOWN])}, …; --lora of `intaglio export` knows other spellings"
        )
    return terms


def _spellings(name: str, dot: str) -> list[str]:
    """The name as it stands, and without the prefixes of parts, each with and without ``model.``."""
    bare = [name, *(name.removeprefix(f"{prefix}{dot}") for prefix in _PREFIXES if name.startswith(f"{prefix}{dot}"))]
    return [spelling for each in bare for spelling in (each, f"model{dot}{each}", each.removeprefix(f"model{dot}"))]


def _read(tensor: CheckpointTensor) -> np.ndarray:
    rows = tensor.read()
    assert isinstance(rows, np.ndarray), "matrices of adapters are dense"
    return rows.astype(np.float32)
