"""A golden folder beside a picture: tensors of another implementation's run, to start from and to compare with.

cond.npy                        the conditioning, [text tokens, width]
tf_in_hidden_states.npy         packed latents before the first step, [image tokens, channels]
img_ids.npy, txt_ids.npy        position ids, [tokens, 4]
timesteps.npy, sigmas.npy       of every step, from 1000 and from 1, and perhaps a last sigma of 0
noise_step{i}.npy               what the transformer gave at step i
latent_after_step{i}.npy        latents after it
vae_decoded.npy                 the decoded sample, [3, height, width]

`golden_folder.py` says what files may look like; `parity` compares stages one by one, each on the stored inputs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from intaglio.errors import InputError
from intaglio.runtimes import flow_matching
from intaglio.runtimes.denoising import Schedule
from intaglio.runtimes.difference import Difference, compare
from intaglio.runtimes.golden_folder import read_golden, same_shape
from intaglio.runtimes.latents import image_ids

# Stages that stored tensors can stand in for.
REPLACEABLE = ("text_encoder", "transformer")
_INPUTS = ("tf_in_hidden_states", "img_ids", "txt_ids", "timesteps", "sigmas")


@dataclass(frozen=True)
class GoldenReport:
    """How far each tensor was from the stored one, in order of computation; what ``missing`` names had no file.

    ``replaced`` are the stages that stored tensors stood in for.
    """

    folder: str
    replaced: tuple[str, ...]
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]


class Golden:
    """A golden folder of one picture, with the stages ``replaced`` taken from it.

    Raises InputError for what is no such folder, an unknown stage, a file that is needed and missing, and in every
    method for a file that is damaged or of another shape or dtype.
    """

    def __init__(self, folder: str | os.PathLike[str], replaced: Sequence[str] = ()) -> None:
        self.replaced = tuple(replaced)
        for stage in self.replaced:
            if stage not in REPLACEABLE:
                raise InputError(f"golden_replace names {stage!r}; there is {', '.join(REPLACEABLE)}")
        self._folder = read_golden(Path(folder))
        self._differences: list[Difference] = []
        self._missing: list[str] = []
        needed = ["cond"] if "text_encoder" in self.replaced else []
        needed += _INPUTS if self.samples else [self.last_latents]
        if missing := [f"{name}.npy" for name in needed if name not in self._folder.names]:
            raise InputError(f"{folder}: lacks {', '.join(missing)}, needed here")

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def samples(self) -> bool:
        """Whether the transformer runs."""
        return "transformer" not in self.replaced

    @property
    def steps(self) -> int:
        """Steps of the stored run."""
        if {"sigmas", "timesteps"} <= self._folder.names:
            return len(self.schedule().timesteps)
        return self._folder.sampler_steps()

    @property
    def last_latents(self) -> str:
        """The name of the latents after the last step."""
        return f"latent_after_step{max(self.steps - 1, 0)}"

    def grid(self) -> tuple[int, int] | None:
        """Height and width of the latent grid, as the stored image ids show it; None without them."""
        if "img_ids" not in self._folder.names:
            return None
        ids = self._ids("img_ids")
        height, width = (int(size) + 1 for size in ids[:, 1:3].max(axis=0))
        if height * width != len(ids) or (ids[:, 1:3] != image_ids(height, width)[:, 1:3]).any():
            raise InputError(f"{self._file('img_ids')}: are not those of one grid, row by row")
        return height, width

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Image and text position ids, int64 ``[tokens, 4]``."""
        return self._ids("img_ids"), self._ids("txt_ids")

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A stored tensor as finite float32 of ``shape``."""
        stored = self._shaped(name, shape)
        with np.errstate(over="ignore"):
            array = stored.astype(np.float32)
        if not np.isfinite(array).all():
            raise InputError(f"{self._file(name)}: has values that are not finite in float32")
        return array

    def schedule(self) -> Schedule:
        """The stored sigmas, with a last 0, and timesteps."""
        stored, timesteps = self._folder.schedule()
        sigmas = flow_matching.given_sigmas(stored)
        if len(sigmas) != len(timesteps) + 1:
            raise InputError(
                f"{self._file('sigmas')}: has {len(stored)} levels, the last of them {stored[-1]:g}, for "
                f"{len(timesteps)} timesteps; expected as many, and perhaps a 0 after them"
            )
        return Schedule(sigmas, timesteps)

    def compare(self, stage: str, name: str, found: np.ndarray) -> None:
        """Measures what ``stage`` gave against the stored tensor; without one, its name is kept for the report."""
        if name not in self._folder.names:
            self._missing.append(name)
        else:
            self._differences.append(replace(compare(name, found, self._shaped(name, found.shape)), stage=stage))

    def report(self) -> GoldenReport:
        """What has been compared so far."""
        return GoldenReport(str(self.path), self.replaced, tuple(self._differences), tuple(self._missing))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"

    def _shaped(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = self._folder.load(name)
        if not same_shape(array.shape, shape):
            raise InputError(f"{self._file(name)}: has the shape {list(array.shape)}, expected {list(shape)}")
        return array.reshape(shape)

    def _ids(self, name: str) -> np.ndarray:
        array = self._folder.load(name)
        array = array[0] if array.ndim == 3 and len(array) == 1 else array
        good = array.ndim == 2 and array.shape[1] == 4 and array.size and ((array >= 0) & (array < 2**24)).all()
        if not good or (array.astype(np.int64) != array).any():
            raise InputError(
                f"{self._file(name)}: holds {array.dtype} {list(array.shape)}, expected whole numbers [tokens, 4]"
            )
        return array.astype(np.int64)
