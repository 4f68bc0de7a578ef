"""Values of a record by the name of their field, and records of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.errors import DataError
from intaglio.trainer.data.making import Arrays, Example, RandomSource, stacked
from intaglio.trainer.data.records import Record


def field_of(record: Record, name: str) -> Any:
    """The value of a field; ``json.caption`` is the field caption of the object json. Raises DataError."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise DataError(f"has no field {name!r}; it has {', '.join(map(repr, record))}")
        value = value[part]
    return value


def text_of(record: Record, name: str) -> str:
    """The text of a field. Raises DataError where it is none."""
    value = field_of(record, name)
    if not isinstance(value, str):
        raise DataError(f"field {name!r} is a {type(value).__name__}; expected text")
    return value


@dataclass(frozen=True)
class NumberTransform:
    """``inputs`` float32 of the values of ``fields``, laid end to end, and the ``labels`` of the field ``label``.

    Labels are int64 where they are whole numbers by ``classes``, else float32.
    """

    fields: tuple[str, ...]
    label: str | None = None
    classes: bool = True

    def __call__(self, record: Record, random: RandomSource) -> Example:
        example: Example = {"inputs": np.concatenate([_numbers(record, name) for name in self.fields])}
        if self.label is not None:
            label = _numbers(record, self.label)
            label = label[0] if len(label) == 1 else label
            if self.classes and not np.all(label == np.rint(label)):
                raise DataError(f"field {self.label!r} is {label}; expected the number of a class")
            example["labels"] = label.astype(np.int64 if self.classes else np.float32)
        example["inputs"] = example["inputs"].astype(np.float32)
        return example

    def collate(self, examples: Sequence[Example]) -> Arrays:
        return stacked(examples)


def _numbers(record: Record, name: str) -> np.ndarray:
    value = field_of(record, name)
    try:
        numbers = np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise DataError(f"field {name!r} is {value!r:.80}; expected a number, or a list of numbers") from error
    if not np.isfinite(numbers).all():
        raise DataError(f"field {name!r} is {value!r:.80}; expected finite numbers")
    return numbers
