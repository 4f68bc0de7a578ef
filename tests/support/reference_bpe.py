"""Byte-level BPE written down a second time, with no tokenizer library, to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_CONTROL = 3

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def bytes_to_unicode() -> dict[int, str]:
    """The GPT-2 byte alphabet: printable Latin-1 stands for itself, other bytes follow from U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


class ReferenceBPE:
    """Byte-level BPE as Sennrich et al. 2016 (arXiv:1508.07909) and GPT-2 describe it.

    `metadata` is that of a GGUF file; `split` cuts text into words.
    """

    def __init__(self, metadata: dict[str, Any], split: Callable[[str], Iterator[str]]) -> None:
        self.regex = pytest.importorskip("regex")
        self.split = split
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.vocab = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.special = {token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL}
        self.alphabet = bytes_to_unicode()

    def encode(self, text: str) -> list[int]:
        longest_first = sorted(self.special, key=len, reverse=True)
        ids: list[int] = []
        for part in self.regex.split("(" + "|".join(map(self.regex.escape, longest_first)) + ")", text):
            words = [part] if part in self.special else self.split(part)
            for word in words:
                ids.extend(self.vocab[symbol] for symbol in self.merge(word))
        return ids

    def merge(self, word: str) -> list[str]:
        if word in self.special:
            return [word]
        letters = (self.alphabet[byte] for byte in word.encode("utf-8"))
        symbols = [letter for letter in letters if letter in self.vocab]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(range(len(pairs)), key=lambda at: self.ranks.get(pairs[at], len(self.ranks)))
            if pairs[best] not in self.ranks:
                break
            symbols[best : best + 2] = ["".join(pairs[best])]
        return symbols


def split_smollm(text: str) -> Iterator[str]:
    import regex

    for part in regex.split(r"(\p{N})", text):
        yield from regex.findall(GPT2_SPLIT, part)
