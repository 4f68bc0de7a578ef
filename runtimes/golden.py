"""A golden folder beside a picture: tensors of another implementation's run, to start from and to compare with.

cond.npy                        the conditioning, [text tokens, width]
tf_in_hidden_states.npy         packed latents before the first step, [image tokens, channels]
img_ids.npy, txt_ids.npy        position ids, [tokens, 4]
sigmas.npy                      of every step, from 1, and perhaps a last 0
timesteps.npy                   from 1000; without them 1000 times the sigmas
noise_step{i}.npy               what the transformer gave at step i
latent_after_step{i}.npy        latents after it
vae_decoded.npy                 the decoded sample, [3, height, width]

`golden_folder.py` says what files may look like and reads them, here as for `parity`, which compares stages one by one,
each on the stored inputs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from intaglio.errors import InputError
from intaglio.runtimes.checks import sha256_of
from intaglio.runtimes.denoising import Schedule
from intaglio.runtimes.difference import Difference, compare
from intaglio.runtimes.golden_folder import read_golden
from intaglio.runtimes.latents import image_ids

# Stages that stored tensors can stand in for.
REPLACEABLE = ("text_encoder", "transformer")
_INPUTS = ("tf_in_hidden_states", "img_ids", "txt_ids", "sigmas")


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
        # SHA-256 of what stood in for something, by file.
        self.used: dict[str, str] = {}
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
        return len(self.schedule().timesteps) if "sigmas" in self._folder.names else self._folder.sampler_steps()

    @property
    def last_latents(self) -> str:
        """The name of the latents after the last step."""
        return f"latent_after_step{max(self.steps - 1, 0)}"

    @property
    def cond_name(self) -> str:
        """The file that the conditioning is compared with."""
        names = self._folder.output_names("text_encoder", "prompt_embeds")
        return names[0] if names and "cond" not in names else "cond"

    def grid(self) -> tuple[int, int] | None:
        """Height and width of the latent grid, as the stored image ids show it; None without them."""
        if "img_ids" not in self._folder.names:
            return None
        ids = self._ids("img_ids")
        height, width = (int(size) + 1 for size in ids[:, 1:3].max(axis=0))
        if height * width != len(ids) or (ids[:, 1:3] != image_ids(height, width)[:, 1:3]).any():
            raise InputError(f"{self._folder.file('img_ids')}: are not those of one grid, row by row")
        return height, width

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Image and text position ids, int64 ``[tokens, 4]``."""
        return self._ids("img_ids"), self._ids("txt_ids")

    def conditioning(self, width: int) -> np.ndarray:
        """The stored conditioning, float32 ``[1, tokens, width]``."""
        return self._used("cond", self._folder.read("cond", (1, None, width), "float32"))

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A stored tensor as finite float32 of ``shape``."""
        return self._used(name, self._folder.read(name, shape, "float32"))

    def schedule(self) -> Schedule:
        """The stored sigmas, with a last 0, and timesteps."""
        return Schedule(*self._folder.schedule())

    def check(self, text_length: int, embeds_width: int, channels: int, height: int, width: int, factor: int) -> int:
        """Raises InputError for a file that could not be used or compared; returns how many tokens of text there are.

        ``text_length`` are the text encoder's tokens, ``height`` and ``width`` the pixels of the picture, of which a
        latent is ``factor`` wide.
        """
        tokens = text_length
        if "text_encoder" in self.replaced:
            tokens = self.conditioning(embeds_width).shape[1]
        elif self.cond_name in self._folder.names:
            self._folder.shaped(self.cond_name, (1, text_length, embeds_width))
        if self.samples and (found := len(self._ids("txt_ids"))) != tokens:
            raise InputError(f"{self._folder.file('txt_ids')}: has {found} tokens, expected {tokens}")
        latents = (1, height // factor * (width // factor), channels)
        shapes: dict[str, tuple[int, ...]] = {"vae_decoded": (1, 3, height, width)}
        for i in range(self.steps):
            shapes |= {f"noise_step{i}": latents, f"latent_after_step{i}": latents}
        for name in shapes.keys() & self._folder.names:
            self._folder.shaped(name, shapes[name])
        return tokens

    def compare(self, stage: str, name: str, found: np.ndarray) -> None:
        """Measures what ``stage`` gave against the stored tensor; without one, its name is kept for the report."""
        if name not in self._folder.names:
            self._missing.append(name)
        else:
            stored = self._folder.shaped(name, found.shape)
            self._differences.append(replace(compare(name, found, stored), stage=stage))

    def report(self) -> GoldenReport:
        """What has been compared so far."""
        return GoldenReport(str(self.path), self.replaced, tuple(self._differences), tuple(self._missing))

    def _ids(self, name: str) -> np.ndarray:
        return self._folder.read(name, (None, 4), "int64")

    def _used(self, name: str, array: np.ndarray) -> np.ndarray:
        self.used[name] = sha256_of(array)
        return array
