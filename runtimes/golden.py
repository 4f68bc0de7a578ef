"""Golden folders: tensors that another implementation wrote while it made a picture, to start from and compare with.

cond.npy                        the conditioning, [text tokens, width]
tf_in_hidden_states.npy         packed latents before the first step, [image tokens, channels]
img_ids.npy, txt_ids.npy        position ids, [tokens, 4]
timesteps.npy, sigmas.npy       of every step, and a last sigma of 0
noise_step{i}.npy               what the transformer gave at step i
latent_after_step{i}.npy        latents after it
vae_decoded.npy                 the decoded sample, [3, height, width]

Files are NumPy's format, of any floating or integer dtype; a batch axis of one is taken with or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from intaglio.errors import InputError
from intaglio.runtimes import flow_matching
from intaglio.runtimes.denoising import Schedule
from intaglio.runtimes.latents import image_ids
from intaglio.runtimes.parity import Difference, compare

# Stages that stored tensors can stand in for.
REPLACEABLE = ("text_encoder", "transformer")
_INPUTS = ("tf_in_hidden_states", "img_ids", "txt_ids", "timesteps", "sigmas")
# Timesteps are 1000 times the sigmas, or that rounded to bfloat16.
_TIMESTEP_TOLERANCE = 0.01


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
    """A golden folder of one picture, with the stages in ``replace`` taken from it.

    Raises InputError for what is no such folder, an unknown stage, a file that is needed and missing, damaged or of
    another shape or dtype.
    """

    def __init__(self, folder: str | Path, replace: Sequence[str] = ()) -> None:
        self.folder, self.replaced = Path(folder), tuple(replace)
        if not self.folder.is_dir():
            raise InputError(f"{folder}: {'is no folder' if self.folder.exists() else 'no such folder'}; expected one")
        for stage in self.replaced:
            if stage not in REPLACEABLE:
                raise InputError(f"golden_replace names {stage!r}; there is {', '.join(REPLACEABLE)}")
        self._differences: list[Difference] = []
        self._missing: list[str] = []
        needed = ["cond"] if "text_encoder" in self.replaced else []
        needed += [] if "transformer" in self.replaced else list(_INPUTS)
        if "transformer" in self.replaced:
            needed.append(f"latent_after_step{max(self.steps - 1, 0)}")
        if missing := [f"{name}.npy" for name in needed if not self._file(name).is_file()]:
            raise InputError(f"{folder}: {', '.join(missing)} are needed for this and missing")

    @property
    def samples(self) -> bool:
        """Whether the transformer runs."""
        return "transformer" not in self.replaced

    @property
    def steps(self) -> int:
        """Steps of the stored run."""
        if self._file("timesteps").is_file():
            return self._read("timesteps").size
        count = 0
        while self._file(f"latent_after_step{count}").is_file():
            count += 1
        return count

    def grid(self) -> tuple[int, int] | None:
        """Height and width of the latent grid, as the stored image ids show it; None without them."""
        if not self._file("img_ids").is_file():
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
        """A stored tensor as finite float32 of ``shape``, whose first size is the batch."""
        array = self._read(name)
        if array.shape not in (shape, shape[1:]) or shape[0] != 1:
            raise InputError(f"{self._file(name)}: has the shape {list(array.shape)}, expected {list(shape[1:])}")
        array = array.astype(np.float32).reshape(shape)
        if not np.isfinite(array).all():
            raise InputError(f"{self._file(name)}: has values that are not finite")
        return array

    def schedule(self) -> Schedule:
        """The stored sigmas, with a last 0, and timesteps."""
        sigmas = flow_matching.given_sigmas(self._read("sigmas").reshape(-1))
        timesteps = self._read("timesteps").reshape(-1).astype(np.float32)
        expected = flow_matching.timesteps(sigmas)
        if timesteps.shape != expected.shape:
            raise InputError(f"{self.folder}: timesteps.npy has {timesteps.size} steps, sigmas.npy {expected.size}")
        if not np.allclose(timesteps, expected, rtol=_TIMESTEP_TOLERANCE, atol=0):
            raise InputError(
                f"{self._file('timesteps')}: are {timesteps}, expected about {expected}, as the sigmas say"
            )
        return Schedule(sigmas, timesteps)

    def compare(self, name: str, found: np.ndarray) -> None:
        """Measures ``found`` against the stored tensor; without one, its name is kept for the report."""
        if not self._file(name).is_file():
            self._missing.append(name)
            return
        stored = self._read(name)
        if stored.shape == found.shape[1:] and len(found) == 1:
            stored = stored[None]
        if stored.shape != found.shape:
            raise InputError(
                f"{self._file(name)}: has the shape {list(stored.shape)}, expected {list(found.shape[1:])} to compare "
                "with"
            )
        self._differences.append(compare(name, found, stored))

    def report(self) -> GoldenReport:
        """What has been compared so far."""
        return GoldenReport(str(self.folder), self.replaced, tuple(self._differences), tuple(self._missing))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _read(self, name: str) -> np.ndarray:
        file = self._file(name)
        try:
            with file.open("rb") as content:
                array = np.lib.format.read_array(content, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            raise InputError(f"{file}: cannot be read as a NumPy array ({error})") from error
        if array.dtype.kind not in "fiu" or not array.size:
            raise InputError(f"{file}: holds {array.dtype} {list(array.shape)}, expected numbers")
        return array

    def _ids(self, name: str) -> np.ndarray:
        array = self._read(name)
        if array.ndim == 3 and len(array) == 1:
            array = array[0]
        whole = array.ndim == 2 and array.shape[1] == 4 and np.isfinite(array).all() and (array == array.round()).all()
        if not whole or array.min() < 0 or array.max() >= 2**24:
            raise InputError(
                f"{self._file(name)}: holds {array.dtype} {list(array.shape)}, expected whole numbers [tokens, 4]"
            )
        return array.astype(np.int64)
