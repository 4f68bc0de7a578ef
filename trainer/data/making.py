"""What worker processes do: records into examples, and examples into the arrays of a batch. Without torch.

Which examples a batch has does not depend on who makes them: all that is random in an example comes from the seed, the
epoch and its position in the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from intaglio.errors import DataError, IntaglioError
from intaglio.trainer.data.order import Draw
from intaglio.trainer.data.records import SAMPLE_NAME, Damage, IndexedReader, Record, StreamReader

Example = dict[str, Any]
Arrays = dict[str, np.ndarray]
# Makes the generator of one example; making one costs, and most examples need none.
RandomSource = Callable[[], np.random.Generator]

_EXAMPLES = 3
# The pictures of a batch, uint8 [B, H, W, 3] until they are tensors.
PIXELS = "pixel_values"


class Transform(Protocol):
    """From a record to an example, and from examples to a batch. Pure, and pickled into worker processes."""

    def __call__(self, record: Record, random: RandomSource) -> Example:
        """Raises an IntaglioError, which names no place, where the record cannot be used."""

    def collate(self, examples: Sequence[Example]) -> Arrays: ...


@dataclass(frozen=True)
class Made:
    """Arrays of a batch, or the examples themselves, and what was left out."""

    arrays: Arrays
    examples: list[Example]
    damages: list[Damage]


@dataclass(frozen=True)
class Maker:
    """``collated`` False leaves examples as they are, for packing."""

    reader: IndexedReader | StreamReader
    transform: Transform
    seed: int
    skip_bad: bool
    collated: bool = True

    def __call__(self, epoch: int, draws: Sequence[Draw]) -> Made:
        """Raises DataError naming the place of a record that cannot be used; with ``skip_bad`` leaves it out."""
        examples: list[Example] = []
        damages: list[Damage] = []
        for draw in draws:
            try:
                examples.append(self.transform(self._record(draw), self._random(epoch, draw.position)))
            except IntaglioError as error:
                damage = Damage(self.where(draw), str(error))
                if not self.skip_bad:
                    raise DataError(
                        f"{damage}. Mend the record, or leave such records out with --skip-bad (data.skip_bad)"
                    ) from error
                damages.append(damage)
        if not self.collated:
            return Made({}, examples, damages)
        return Made(self.transform.collate(examples) if examples else {}, [], damages)

    def where(self, draw: Draw) -> str:
        """File and place of a draw, and its name, if it has one."""
        if isinstance(self.reader, StreamReader):
            place = self.reader.where(draw.place[0], draw.place[1:])
            name = (draw.record or {}).get(SAMPLE_NAME)
            return place if name is None else f"{place}: {name}"
        return self.reader.where(draw.place[0])

    def _record(self, draw: Draw) -> Record:
        if draw.record is not None:
            return draw.record
        assert not isinstance(self.reader, StreamReader), "streams are read in order"
        return self.reader.get(draw.place[0])

    def _random(self, epoch: int, position: int) -> RandomSource:
        return lambda: np.random.default_rng([self.seed, epoch, _EXAMPLES, position])


def stacked(examples: Sequence[Example]) -> Arrays:
    """The arrays of examples that all have the same fields and shapes. Raises DataError where they do not."""
    arrays = {}
    for name in examples[0]:
        values = [np.asarray(example[name]) for example in examples]
        shapes = sorted({value.shape for value in values})
        if len(shapes) > 1:
            raise DataError(
                f"the examples of a batch have {name} of the shapes {', '.join(str(list(shape)) for shape in shapes)}; "
                "expected one. Give pictures a size, and rows the same fields"
            )
        arrays[name] = np.stack(values)
    return arrays
