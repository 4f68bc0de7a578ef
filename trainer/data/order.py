"""The order of one epoch: a permutation where records have numbers, else shuffled shards and a shuffle buffer.

An order is drawn from seed, epoch and position alone, so that its state is a position and places, and no generator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from intaglio.errors import DataError
from intaglio.trainer.data.records import Damage, IndexedReader, Offset, Record, StreamReader

# What a number drawn is for: epochs draw for each independently.
_RECORDS, _SHARDS, _BUFFER = range(3)
_DRAWN_AT_ONCE = 4096


class Draw(NamedTuple):
    """One record of an epoch. ``place`` is its number, or shard and offset; ``record`` is None until it is read."""

    position: int
    place: tuple[int, ...]
    record: Record | None


class Order(Protocol):
    """The draws of one epoch, and the state after the last of them."""

    def __iter__(self) -> Iterator[Draw]: ...

    def __next__(self) -> Draw: ...

    def snapshot(self) -> OrderState: ...

    def damages(self) -> list[Damage]:
        """What was passed over since this was last asked."""


class OrderState(Protocol):
    """Where an order stands; made for every batch, so it is cheap, and turned into plain values only when saved."""

    def plain(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class IndexedState:
    """``position`` draws were made."""

    position: int

    def plain(self) -> dict[str, Any]:
        return {"position": self.position}


class IndexedOrder:
    """All records of an indexed reader, in the order of a seeded permutation, or in their own."""

    def __init__(self, reader: IndexedReader, seed: int, epoch: int, shuffle: bool, state: dict[str, Any]) -> None:
        count = len(reader)
        self._position = int(state.get("position", 0))
        self._count = count
        self._order = None
        if shuffle:
            # Four bytes a record, where they suffice.
            order = np.arange(count, dtype=np.uint32 if count < 2**32 else np.uint64)
            np.random.default_rng([seed, epoch, _RECORDS]).shuffle(order)
            self._order = order

    def __iter__(self) -> Iterator[Draw]:
        return self

    def __next__(self) -> Draw:
        position = self._position
        if position >= self._count:
            raise StopIteration
        self._position += 1
        return Draw(position, (position if self._order is None else int(self._order[position]),), None)

    def snapshot(self) -> OrderState:
        return IndexedState(self._position)

    def damages(self) -> list[Damage]:
        return []


@dataclass(frozen=True)
class StreamState:
    """``last`` is the place that was read last, ``held`` the places of the records in the buffer, by slot."""

    position: int
    last: tuple[int, ...] | None
    held: list[tuple[int, ...]]

    def plain(self) -> dict[str, Any]:
        last = None if self.last is None else list(self.last)
        return {"position": self.position, "last": last, "held": [list(place) for place in self.held]}


class StreamOrder:
    """The records of a stream, shards in a seeded order, through a seeded buffer of ``buffer`` records.

    The state holds the places of the buffered records and not their contents: they are read again, in one pass over
    the shards from the first place to the last. Damage raises DataError, or is passed over with ``skip_bad``.
    """

    def __init__(
        self, reader: StreamReader, seed: int, epoch: int, buffer: int, skip_bad: bool, state: dict[str, Any]
    ) -> None:
        self._reader, self._skip_bad = reader, skip_bad
        self._key = (seed, epoch)
        self._buffer = max(buffer, 1)
        # A buffer of one is the files' own order.
        self._shards = list(range(reader.shards))
        if buffer > 1:
            np.random.default_rng([*self._key, _SHARDS]).shuffle(self._shards)
        self._position = int(state.get("position", 0))
        self._last = None if state.get("last") is None else tuple(state["last"])
        self._places = [tuple(place) for place in state.get("held", [])]
        self._records = self._read_again(self._places)
        self._damages: list[Damage] = []
        self._coming: Iterator[tuple[tuple[int, ...], Record]] | None = self._from(self._last)
        self._drawn = np.empty(0)

    def __iter__(self) -> Iterator[Draw]:
        return self

    def __next__(self) -> Draw:
        while self._coming is not None and len(self._records) < self._buffer:
            item = next(self._coming, None)
            if item is None:
                self._coming = None
                break
            self._places.append(item[0])
            self._records.append(item[1])
        if not self._records:
            raise StopIteration
        slot = self._slot(len(self._records))
        # The last takes the place of the one that goes.
        self._places[slot], place = self._places[-1], self._places[slot]
        self._records[slot], record = self._records[-1], self._records[slot]
        self._places.pop()
        self._records.pop()
        self._position += 1
        return Draw(self._position - 1, place, record)

    def snapshot(self) -> OrderState:
        return StreamState(self._position, self._last, self._places[:])

    def damages(self) -> list[Damage]:
        damages, self._damages = self._damages, []
        return damages

    def _slot(self, count: int) -> int:
        if self._buffer == 1:
            return 0
        block, i = divmod(self._position, _DRAWN_AT_ONCE)
        if i == 0 or not len(self._drawn):
            self._drawn = np.random.default_rng([*self._key, _BUFFER, block]).random(_DRAWN_AT_ONCE)
        return int(self._drawn[i] * count)

    def _from(self, last: tuple[int, ...] | None) -> Iterator[tuple[tuple[int, ...], Record]]:
        """All that comes after the place ``last``."""
        begin = 0 if last is None else self._shards.index(last[0])
        for shard in self._shards[begin:]:
            start = last[1:] if last is not None and last[0] == shard else None
            for offset, item in self._reader.records(shard, start):
                if offset == start:
                    continue
                self._last = (shard, *offset)
                if not isinstance(item, Damage):
                    yield self._last, item
                elif self._skip_bad:
                    self._damages.append(item)
                else:
                    raise DataError(f"{item}. Mend the file, or leave such records out with --skip-bad (data.skip_bad)")

    def _read_again(self, places: list[tuple[int, ...]]) -> list[Record]:
        wanted: dict[int, dict[Offset, int]] = {}
        for slot, place in enumerate(places):
            wanted.setdefault(place[0], {})[place[1:]] = slot
        records: list[Record] = [{} for _ in places]
        for shard, slots in wanted.items():
            missing = len(slots)
            for offset, item in self._reader.records(shard, min(slots)):
                if offset not in slots:
                    continue
                if isinstance(item, Damage):
                    raise DataError(f"{item}. It was whole when the checkpoint was saved")
                records[slots[offset]] = item
                missing -= 1
                if not missing:
                    break
            if missing:
                file = self._reader.where(shard, min(slots))
                raise DataError(f"{file}: {missing} records after it are not found again; was the file changed?")
        return records
