"""The one protocol between data and the loop: a source of batches whose place can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

# Tensors by name, all with the same first axis.
Batch = dict[str, torch.Tensor]


class BatchSource(Protocol):
    """Batches, epoch after epoch, with a cursor.

    Iterating goes on from the cursor to the end of its epoch, and leaves the cursor at the start of the next. The
    cursor is that of the batches handed out, however many were prepared ahead: a source that loads the state which
    another saved after n batches hands out what that one would have handed out next.
    """

    @property
    def fingerprint(self) -> str:
        """A hash of what the data is (files, sizes, settings that change batches), by which a resume is checked."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands: epoch, place, shuffling; of plain Python values, small."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was saved. Raises CheckpointError where the state is of other data."""

    def shard(self, rank: int, world_size: int) -> BatchSource:
        """The part of ``rank`` of ``world_size``: as many batches an epoch on each, no example twice.

        The state after a batch is the same on every rank, and goes for any number of ranks.
        """
