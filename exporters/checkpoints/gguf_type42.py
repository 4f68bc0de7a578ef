"""Which of three layouts the type id 42 means in a file.

Published files use the id for three things, of which only the first is read; the others are named:

- ``TQ2_0_g128`` (oxibonsai): 128 values in 34 bytes, 32 bytes of ternary codes, then a float16 scale;
- ``PQ2_0`` (PrismML's first Q2_0, later id 142): 128 values in 34 bytes, the scale first;
- ``Q2_0`` (ggml, 2026): 64 values in 18 bytes, the scale first.

Sizes cannot tell the first two apart, but contents can: a scale is finite and as a rule not negative, which
codes read as a scale soon are, and a ternary code is never 3. All tensors of the id vote together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.tensors import FileBytes

TYPE_ID = 42
# What the writer notes, for files too small to tell.
HINT_KEY = "intaglio.type_42"

# name -> (values a block, bytes a block, where its float16 scale stands)
LAYOUTS: dict[str, tuple[int, int, int]] = {
    "TQ2_0_g128": (128, 34, 32),
    "PQ2_0": (128, 34, 0),
    "Q2_0": (64, 18, 0),
}
_SAMPLED_TENSORS = 16
_SAMPLED_BLOCKS = 256


@dataclass(frozen=True)
class Extent:
    """A tensor of the id: how many values it has, where it starts, and the bytes before the next one."""

    values: int
    offset: int
    room: int


@dataclass(frozen=True)
class Resolution:
    """The layout's name, or None if it cannot be told; ``why`` says what decided."""

    storage: str | None
    why: str


def resolve(file: FileBytes, extents: Sequence[Extent], metadata: Mapping[str, object]) -> Resolution:
    """Decides for one file; reads a few kilobytes of it. Raises CheckpointError when a hint contradicts them."""
    fitting = [name for name in LAYOUTS if all(_fits(extent, name) for extent in extents)]
    sampled = extents[:: -(-len(extents) // _SAMPLED_TENSORS)]
    possible = [name for name in fitting if all(_possible(_sample(file, e, name), name) for e in sampled)]
    hint = metadata.get(HINT_KEY)
    if hint is not None:
        if hint not in possible:
            raise CheckpointError(
                f"{file.path}: {HINT_KEY} is {hint!r}, but the contents allow {_listed(possible)}; the file is damaged"
            )
        return Resolution(str(hint), f"{HINT_KEY} says so")
    positive = [name for name in possible if all(_no_negative_scale(_sample(file, e, name), name) for e in sampled)]
    for names in (possible, positive):
        if len(names) == 1:
            return Resolution(names[0], "of the three layouts of this id only this one fits the contents")
    if "TQ2_0_g128" in possible and metadata.get("general.architecture") == "bonsai-image":
        return Resolution("TQ2_0_g128", "the contents leave it open, and general.architecture is 'bonsai-image'")
    return Resolution(None, f"the contents allow {_listed(possible)}")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if names else f"none of {', '.join(LAYOUTS)}"


def _fits(extent: Extent, name: str) -> bool:
    values, size, _ = LAYOUTS[name]
    return extent.values % values == 0 and extent.values // values * size <= extent.room


def _sample(file: FileBytes, extent: Extent, name: str) -> np.ndarray:
    values, size, _ = LAYOUTS[name]
    count = min(extent.values // values, _SAMPLED_BLOCKS)
    return np.frombuffer(file.read(extent.offset, count * size), np.uint8).reshape(count, size)


def _scale_bits(blocks: np.ndarray, name: str) -> np.ndarray:
    at = LAYOUTS[name][2]
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")


def _possible(blocks: np.ndarray, name: str) -> bool:
    if np.any(_scale_bits(blocks, name) & 0x7C00 == 0x7C00):
        return False
    codes = blocks[:, :32]
    return name != "TQ2_0_g128" or not np.any(codes & codes >> np.uint8(1) & np.uint8(0x55))


def _no_negative_scale(blocks: np.ndarray, name: str) -> bool:
    return bool(np.all(_scale_bits(blocks, name) <= 0x8000))
