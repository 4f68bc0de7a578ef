"""Documents, cut and packed into windows of tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from intaglio.trainer.data.making import Arrays

# The label of a token that is not learned, as transformers and torch's cross_entropy have it.
IGNORED = -100


@dataclass(frozen=True)
class Document:
    """Token ids ``[n]``, and which of them are to be learned."""

    ids: np.ndarray
    learned: np.ndarray


class Packer:
    """Cuts documents, laid end to end, into windows of ``length + 1`` tokens, ``length`` apart.

    The last token of a window is the first of the next, so each is predicted once, as in a flat token file of the
    same documents. With ``segments`` no token is predicted from another document, and positions say where documents
    begin, by which models keep them apart.
    """

    def __init__(self, length: int, segments: bool) -> None:
        self.length, self.segments = length, segments
        self._held: deque[tuple[int, Document]] = deque()
        self._tokens = 0
        self._documents = 0

    @property
    def windows(self) -> int:
        """How many windows can be taken."""
        return max(self._tokens - 1, 0) // self.length

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return self._tokens

    def put(self, document: Document) -> None:
        """Adds a document behind the others."""
        if len(document.ids):
            self._held.append((self._documents, document))
            self._tokens += len(document.ids)
        self._documents += 1

    def drop(self, tokens: int) -> None:
        """Forgets the first ``tokens`` held."""
        self._tokens -= tokens
        while tokens:
            number, first = self._held.popleft()
            if len(first.ids) > tokens:
                self._held.appendleft((number, Document(first.ids[tokens:], first.learned[tokens:])))
            tokens -= min(tokens, len(first.ids))

    def take(self, windows: int) -> Arrays:
        """The next windows: ``input_ids`` and ``labels`` int64 ``[windows, length]``.

        With segments also ``position_ids``, counted from 0 in each document, or from where the window begins.
        """
        wanted = windows * self.length + 1
        ids, learned, numbers = self._first(wanted)
        index_WT = np.arange(self.length) + self.length * np.arange(windows)[:, None]
        labels_WT = np.where(learned[index_WT + 1], ids[index_WT + 1], IGNORED)
        arrays = {"input_ids": ids[index_WT], "labels": labels_WT}
        if self.segments:
            numbers_WT = numbers[index_WT]
            labels_WT[numbers_WT != numbers[index_WT + 1]] = IGNORED
            begins_WT = np.diff(numbers_WT, axis=1, prepend=numbers_WT[:, :1]) != 0
            offset_T = np.arange(self.length)
            arrays["position_ids"] = offset_T - np.maximum.accumulate(np.where(begins_WT, offset_T, 0), axis=1)
        self.drop(windows * self.length)
        return arrays

    def _first(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first ``count`` tokens: ids, which are learned, and the number of their document."""
        ids, learned, numbers = np.empty(count, np.int64), np.empty(count, bool), np.empty(count, np.int64)
        begin = 0
        for number, document in self._held:
            end = min(begin + len(document.ids), count)
            ids[begin:end] = document.ids[: end - begin]
            learned[begin:end] = document.learned[: end - begin]
            numbers[begin:end] = number
            begin = end
            if begin == count:
                break
        return ids, learned, numbers
