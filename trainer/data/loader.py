"""The batch source: an order of records, workers that make examples of them, and a cursor.

All ranks go over the same order, and of each step's examples a rank takes its share: rank r of n the r-th of n runs of
``batch_size``. So ranks have equally many batches, n ranks see in a step what one with the n-fold batch would, and the
cursor is the same on every rank and valid for any number of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intaglio.errors import CheckpointError, DataError, InputError
from intaglio.trainer.data.fingerprint import described, fingerprint
from intaglio.trainer.data.making import PIXELS, Maker
from intaglio.trainer.data.order import Draw, IndexedOrder, Order, OrderState, StreamOrder
from intaglio.trainer.data.packing import Document, Packer
from intaglio.trainer.data.records import Damage, StreamReader
from intaglio.trainer.data.source import Batch
from intaglio.trainer.data.workers import OrderedPool

_log = logging.getLogger(__name__)
# Documents that are tokenized as one piece of work.
_DOCUMENTS = 32


@dataclass(frozen=True)
class Packing:
    """Windows of ``length`` tokens; ``segments`` keeps documents apart within them."""

    length: int
    segments: bool = False


@dataclass(frozen=True)
class Plan:
    """What batches are made of, and how many examples each has.

    ``buffer`` is that of streams: 1 leaves the order of the files. ``identity`` are the settings that change which
    examples come in which order, for the fingerprint; ``kind`` names the format in messages.
    """

    maker: Maker
    batch_size: int
    shuffle: bool
    root: Path
    kind: str
    buffer: int = 1
    workers: int = 0
    drop_last: bool = True
    packing: Packing | None = None
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cursor:
    """The place after a batch: an order's state, and how many tokens of the documents after it were used."""

    epoch: int
    order: OrderState | None = None
    tokens: int = 0
    # Records left out before the place; None where that is all of them.
    skipped: int | None = None


class Loader:
    """Batches of ``plan``, for rank ``rank`` of ``world_size``; see BatchSource.

    ``skipped`` counts the records that this rank left out as damaged, ``dropped`` what the last epoch had left over:
    examples that filled no batch on all ranks. A batch with a damaged picture is smaller by it, so that ranks stay
    together; damage that a reader meets costs no place. Raises DataError for damage unless the plan skips it, and for
    an epoch without a batch.
    """

    def __init__(self, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        if not plan.drop_last and world_size > 1:
            raise InputError(
                f"drop_last is false, and {world_size} ranks would not all have a last batch; leave the rest out with "
                "drop_last = true"
            )
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.skipped = 0
        self.dropped = 0
        self._pool: OrderedPool[Any] = OrderedPool(plan.maker, plan.workers)
        self._cursor = _Cursor(0)
        # The loaded state of the order, until a batch has another.
        self._loaded: dict[str, Any] = {}

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.plan.maker.reader.files, self.plan.root, self.plan.identity)

    @cached_property
    def _described(self) -> str:
        return described(self.plan.maker.reader.files, self.plan.kind)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._cursor.epoch

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "data": self._described,
            "epoch": self._cursor.epoch,
            "order": self._order_state(),
            "tokens": self._cursor.tokens,
            "skipped": self.skipped if self._cursor.skipped is None else self._cursor.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise CheckpointError(f"the state of the data lacks {', '.join(lacking)}; is it that of another source?")
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"the checkpoint was saved in the middle of {state['data']} (fingerprint {state['fingerprint'][:12]}), "
                f"and this is {self._described} ({self.fingerprint[:12]}), or its settings are others. Resume with the "
                "data and settings of the checkpoint, or start anew"
            )
        self._cursor = _Cursor(state["epoch"], None, state["tokens"])
        self._loaded = state["order"]
        self.skipped = state["skipped"]

    def shard(self, rank: int, world_size: int) -> Loader:
        """The part of one rank, at the same place; see the head of this file."""
        if not 0 <= rank < world_size or self.world_size != 1:
            raise InputError(
                f"rank {rank} of {world_size} of a source that is part {self.rank} of {self.world_size}; expected a "
                "rank below the number of ranks, of a whole source"
            )
        part = Loader(self.plan, rank, world_size)
        part._cursor, part._loaded, part.skipped = self._cursor, self._loaded, self.skipped
        return part

    def close(self) -> None:
        """Ends the worker processes; iterating starts others."""
        self._pool.close()

    def __iter__(self) -> Iterator[Batch]:
        epoch, order = self._cursor.epoch, self._order()
        whole = not self._loaded and self._cursor.order is None
        # Damage behind the last batch.
        rest: list[Damage] = []
        prepare = self._made if self.plan.packing is None else self._packed
        batches = prepare(epoch, order, rest)
        # One batch is made ahead, so that with the last one the cursor is at the next epoch.
        held = next(batches, None)
        any_batch, counted = False, False
        while held is not None:
            arrays, cursor, damages = held
            held = next(batches, None)
            if held is None:
                cursor = _Cursor(epoch + 1)
                damages += rest
                counted = True
            self._cursor, self._loaded = cursor, {}
            self._count(damages)
            if arrays:
                any_batch = True
                yield {name: _tensor(name, array) for name, array in arrays.items()}
            elif self.world_size > 1:
                raise DataError(
                    f"all records of a batch of rank {self.rank} are damaged, and the other ranks have one; mend the "
                    "data (INTAGLIO_DEBUG=1 lists the places), or use larger batches"
                )
        if not counted:
            self._count(rest)
        if whole and not any_batch:
            self._refuse_empty()
        if self._cursor.epoch == epoch:  # there was nothing after the place that was loaded
            self._cursor, self._loaded = _Cursor(epoch + 1), {}

    def _order_state(self) -> dict[str, Any]:
        return self._loaded if self._cursor.order is None else self._cursor.order.plain()

    def _order(self) -> Order:
        state = self._order_state()
        maker, plan, epoch = self.plan.maker, self.plan, self._cursor.epoch
        if isinstance(maker.reader, StreamReader):
            buffer = plan.buffer if plan.shuffle else 1
            return StreamOrder(maker.reader, maker.seed, epoch, buffer, maker.skip_bad, state)
        return IndexedOrder(maker.reader, maker.seed, epoch, plan.shuffle, state)

    def _made(self, epoch: int, order: Order, rest: list[Damage]) -> Iterator[_Prepared]:
        """Batches of one example a record."""
        for made, (cursor, damages) in self._pool.run(self._shares(epoch, order)):
            yield made.arrays, cursor, damages + made.damages
        rest += order.damages()

    def _shares(self, epoch: int, order: Order) -> Iterator[tuple[int, list[Draw], tuple[_Cursor, list[Damage]]]]:
        size = self.plan.batch_size
        while True:
            draws = list(islice(order, size * self.world_size))
            if not draws or (len(draws) < size * self.world_size and self.plan.drop_last):
                self.dropped = len(draws)
                return
            share = draws[self.rank * size : (self.rank + 1) * size]
            yield epoch, share, (_Cursor(epoch, order.snapshot()), order.damages())

    def _packed(self, epoch: int, order: Order, rest: list[Damage]) -> Iterator[_Prepared]:
        """Batches of windows. Every rank tokenizes all documents, since where a window begins depends on all before."""
        assert self.plan.packing is not None
        packer = Packer(self.plan.packing.length, self.plan.packing.segments)
        size = self.plan.batch_size
        resumed = self._cursor.tokens
        skipped, put = self.skipped, 0
        # Where each piece of work that still has unused tokens began: tokens before it, state, records left out.
        begins: deque[tuple[int, OrderState, int]] = deque()
        waiting: list[Damage] = []
        for made, (before, damages) in self._pool.run(self._documents(epoch, order)):
            begins.append((put, before, skipped))
            waiting += damages + made.damages
            skipped += sum(damage.records for damage in damages + made.damages)
            for example in made.examples:
                packer.put(Document(**example))
                put += len(example["ids"])
            known = min(resumed, packer.tokens)
            packer.drop(known)
            resumed -= known
            while packer.windows >= size * self.world_size:
                arrays = packer.take(size * self.world_size)
                used = put - packer.tokens
                while len(begins) > 1 and begins[1][0] <= used:
                    begins.popleft()
                begin, state, skipped_before = begins[0]
                own = {name: rows[self.rank * size : (self.rank + 1) * size] for name, rows in arrays.items()}
                yield own, _Cursor(epoch, state, used - begin, skipped_before), waiting
                waiting = []
        if packer.windows and not self.plan.drop_last:
            yield packer.take(packer.windows), _Cursor(epoch + 1), waiting
            waiting = []
        rest += waiting + order.damages()
        self.dropped = packer.windows

    def _documents(self, epoch: int, order: Order) -> Iterator[tuple[int, list[Draw], tuple[OrderState, list[Damage]]]]:
        while True:
            before = order.snapshot()
            if not (draws := list(islice(order, _DOCUMENTS))):
                return
            yield epoch, draws, (before, order.damages())

    def _count(self, damages: Sequence[Damage]) -> None:
        for damage in damages:
            self.skipped += damage.records
            _log.info("left out %s", damage)

    def _refuse_empty(self) -> None:
        what = "windows" if self.plan.packing is not None else "examples"
        raise DataError(
            f"{self._described}: an epoch has no batch. {self.dropped} {what} were found and {self.skipped} damaged "
            f"records left out, and a batch takes {self.plan.batch_size} on each of {self.world_size} ranks. Is the "
            "data empty?"
        )


# Arrays of a batch, the cursor after it, and what was left out for it.
_Prepared = tuple[dict[str, np.ndarray], _Cursor, list[Damage]]


def _tensor(name: str, array: np.ndarray) -> torch.Tensor:
    """A tensor of an array; pictures uint8 ``[B, H, W, 3]`` become float32 ``[B, 3, H, W]`` from -1 to 1."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if name == PIXELS and tensor.dtype == torch.uint8:
        # Here and not in the workers, since bytes are a quarter of what has to be sent. As `images.load_image`.
        return tensor.permute(0, 3, 1, 2).contiguous().float().div_(255).mul_(2).sub_(1)
    return tensor
