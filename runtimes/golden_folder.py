"""Golden folders: the inputs and named tensors of one run, as ``.npy`` files that any implementation can write.

Files are ``<f4`` or integers and are called like the taps. What a stage takes and gives beside its taps has the names
below, which other programs use for FLUX.2 too. A leading batch axis, and axes of one element, may be left out.
``golden.json``, which intaglio writes, says where they came from; a folder needs none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.errors import InputError
from intaglio.exporters.bundle import Bundle, StageInfo
from intaglio.runtimes.parity import chosen_stages

GOLDEN_FILE = "golden.json"


class GoldenInfo(BaseModel):
    """``golden.json``: what wrote the tensors, of which bundle, on which inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    intaglio_version: str
    source: str
    runtime: str
    kind: str
    dtype: str
    stages: tuple[str, ...]
    seed: int
    sizes: dict[str, int]
    weights_sha256: str
    graphs: dict[str, str]


@dataclass(frozen=True)
class StageFiles:
    """Which files hold a stage's inputs, and which its outputs; those not named are called like the tensor."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


STAGE_FILES: Mapping[str, StageFiles] = {
    # The number is the width of the conditioning, 7680 for klein 4B.
    "text_encoder": StageFiles(outputs={"prompt_embeds": (r"te_cond_\d+", "cond")}),
    "transformer": StageFiles(
        {"hidden_states": "tf_in_hidden_states", "encoder_hidden_states": "cond", "timestep": "timestep_step0"},
        {"noise_pred": ("noise_step0",)},
    ),
    "vae_decoder": StageFiles({"latents": "vae_in_packed"}, {"sample": ("vae_decoded",)}),
    "vae_encoder": StageFiles({"image": "vae_in_image"}, {"latents": ("vae_encoded",)}),
}
# Of the loop around the transformer; timesteps run from 1000 down to 0.
SCHEDULE_FILES = ("timesteps", "sigmas")
_SAMPLER_FILE = re.compile(r"(?:noise|latent_after)_step(\d+)")


@dataclass(frozen=True)
class GoldenFolder:
    """A folder with the names of its ``.npy`` files; arrays are mapped, not read."""

    path: Path
    names: frozenset[str]
    info: GoldenInfo | None

    def load(self, name: str) -> np.ndarray:
        """The tensor of this name. Raises InputError naming the file."""
        file = self.file(name)
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{file}: cannot be read as an .npy file ({error})") from error
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            raise InputError(f"{file}: holds {getattr(array, 'dtype', 'an archive')}, expected float32 or integers")
        return array

    def read(self, name: str, shape: Sequence[int | None], dtype: str) -> np.ndarray:
        """A tensor as ``dtype``, finite, of ``shape``, where None is any size. Raises InputError naming the file."""
        stored = self.load(name)
        array = stored
        if None not in shape:
            array = self.shaped(name, tuple(n or 0 for n in shape))
        while array.ndim > len(shape) and len(array) == 1:
            array = array[0]
        while array.ndim < len(shape):
            array = array[None]
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        if not fits or not array.size:
            sizes = ", ".join("any" if n is None else str(n) for n in shape)
            raise InputError(f"{self.file(name)}: has the shape {list(stored.shape)}, expected [{sizes}]")
        return _convert(array, dtype, self.file(name))

    def shaped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as it is stored, but for axes of one element. Raises InputError naming the file."""
        array = self.load(name)
        if not same_shape(array.shape, shape):
            raise InputError(f"{self.file(name)}: has the shape {list(array.shape)}, expected {list(shape)}")
        return array.reshape(shape)

    def file(self, name: str) -> Path:
        """Where a tensor lies."""
        return self.path / f"{name}.npy"

    def output_names(self, stage: str, output: str) -> list[str]:
        """The files that hold an output of a stage."""
        patterns = STAGE_FILES.get(stage, StageFiles()).outputs.get(output, (re.escape(output),))
        return [name for pattern in patterns for name in sorted(self.names) if re.fullmatch(pattern, name)]

    def missing_inputs(self, stage: str, info: StageInfo) -> list[str]:
        """The files without which a stage cannot run."""
        names = (input_name(stage, tensor.name) for tensor in info.inputs)
        return [name for name in names if name not in self.names and not self._replaceable(name)]

    def _replaceable(self, name: str) -> bool:
        return name == "timestep_step0" and "timesteps" in self.names

    def sampler_steps(self) -> int:
        """The steps of a sampler that files look into: one more than the largest number in their names."""
        matches = (_SAMPLER_FILE.fullmatch(name) for name in self.names)
        return max((int(match[1]) + 1 for match in matches if match), default=0)

    def feeds(self, stage: str, info: StageInfo) -> dict[str, np.ndarray]:
        """The stored inputs of a stage as an engine takes them. Raises InputError naming the file.

        Timesteps are stored from 0 to 1000 and taken from 0 to 1. What has one row serves a whole batch.
        """
        arrays = {tensor.name: self._input(stage, tensor.name) for tensor in info.inputs}
        rows = {t.name: _with_batch(arrays[t.name], len(t.shape)) for t in info.inputs}
        batch = max((len(array) for array in rows.values() if array.ndim), default=1)
        feeds = {}
        for tensor in info.inputs:
            array = rows[tensor.name]
            where = self.file(input_name(stage, tensor.name))
            fixed = [n if isinstance(n, int) else None for n in tensor.shape]
            fits = array.ndim == len(fixed) and all(n in (None, m) for n, m in zip(fixed, array.shape, strict=True))
            if not fits:
                found = list(arrays[tensor.name].shape)
                raise InputError(
                    f"{where}: has the shape {found}, expected {list(tensor.shape)}, with or without batch"
                )
            if tensor.shape[:1] == ("batch",) and len(array) == 1:
                array = np.broadcast_to(array, (batch, *array.shape[1:]))
            feeds[tensor.name] = _convert(array, tensor.dtype, where)
        return feeds

    def _input(self, stage: str, tensor: str) -> np.ndarray:
        name = input_name(stage, tensor)
        if name in self.names:
            array = self.load(name)
        else:
            array = self.load("timesteps").reshape(-1)[:1]
        return array.astype(np.float32) / np.float32(1000) if tensor == "timestep" else array

    def schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """Sigmas, a final 0 among them, and timesteps from 0 to 1, one less: float32. Raises InputError."""
        sigmas = self.load("sigmas").astype(np.float32)
        stored = self.load("timesteps").astype(np.float32) if "timesteps" in self.names else None
        steps = len(stored) if stored is not None and stored.ndim == 1 else None
        if sigmas.ndim != 1 or not sigmas.size or not np.isfinite(sigmas).all() or (stored is not None and not steps):
            raise InputError(
                f"{self.path}: sigmas.npy and timesteps.npy must be lists of numbers, with no NaN among them"
            )
        if sigmas[-1] != 0 and steps in (None, len(sigmas)):
            sigmas = np.append(sigmas, np.float32(0))
        if stored is None:
            return sigmas, sigmas[:-1]
        if len(sigmas) != len(stored) + 1 or not np.isfinite(stored).all():
            raise InputError(
                f"{self.path}: has {len(stored)} timesteps and {len(sigmas)} sigmas, expected one more, or as many "
                "without the final 0"
            )
        return sigmas, stored / np.float32(1000)


def read_golden(path: Path) -> GoldenFolder:
    """Lists a golden folder. Raises InputError where it is none."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; expected one with .npy files, as `--write-golden` makes")
    names = frozenset(file.stem for file in path.glob("*.npy"))
    if not names:
        raise InputError(f"{path}: holds no .npy files; make a golden folder with `intaglio parity --write-golden`")
    file = path / GOLDEN_FILE
    try:
        info = GoldenInfo.model_validate_json(file.read_bytes()) if file.is_file() else None
    except (ValidationError, OSError) as error:
        raise InputError(f"{file}: is damaged or of another version; write the folder again") from error
    return GoldenFolder(path, names, info)


def stored_stages(bundle: Bundle, stage: str | None) -> tuple[str, ...]:
    """``stage``, else those that a folder holds side by side: the tensors of others have no names of their own."""
    stages = chosen_stages(bundle, stage)
    if stage is not None or bundle.kind == "text-generation":
        return stages
    return tuple(name for name in stages if name in STAGE_FILES)


def input_name(stage: str, tensor: str) -> str:
    """The file of a stage's input, without ``.npy``."""
    return STAGE_FILES.get(stage, StageFiles()).inputs.get(tensor, tensor)


def known_names(folder: GoldenFolder, stages: Mapping[str, StageInfo], steps: int) -> set[str]:
    """The files that belong to an input or an output of ``stages``, or to ``steps`` of the sampler."""
    known: set[str] = set()
    for stage, info in stages.items():
        known |= {input_name(stage, tensor.name) for tensor in info.inputs}
        known |= {name for tensor in info.outputs for name in folder.output_names(stage, tensor.name)}
    if "transformer" in stages:
        known |= {*SCHEDULE_FILES, *(f"{kind}_step{i}" for kind in ("noise", "latent_after") for i in range(steps))}
    return known


def same_shape(found: Iterable[int], stored: Iterable[int]) -> bool:
    """Whether two shapes differ at most by axes of one element, of which files may have fewer."""
    return [n for n in found if n != 1] == [n for n in stored if n != 1]


def _with_batch(array: np.ndarray, rank: int) -> np.ndarray:
    return array[None] if array.ndim == rank - 1 else array


def _convert(array: np.ndarray, dtype: str, where: Path) -> np.ndarray:
    if not np.isfinite(array).all():
        raise InputError(f"{where}: {np.count_nonzero(~np.isfinite(array))} values are not finite; it is an input")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(array.astype(dtype))
    if np.dtype(dtype).kind == "i" and (converted != array).any():
        raise InputError(f"{where}: holds values that are no integers")
    if np.dtype(dtype).kind == "f" and not np.isfinite(converted).all():
        raise InputError(f"{where}: holds values that are too large for {dtype}, the bundle's dtype")
    return converted
