"""SentencePiece BPE as a tokenizer of the `tokenizers` library.

The two say the same thing differently. SentencePiece joins the neighbours whose concatenation is the piece of
highest score, the leftmost first; the library joins the pair that stands first in a list of merges. The list
comes of one observation: whatever stands around it, a piece can only be formed from the same two parts, those
that are left before the last step when the piece alone is encoded. (A step across its border would prevent it,
and steps inside do not depend on what is outside.) So each piece has at most one merge, in the order of scores.

Sources: Sennrich et al. 2016 (arXiv:1508.07909); SentencePiece `src/bpe_model.cc` and `src/normalizer.cc` for
the order of steps, and what byte fallback and the dummy prefix do.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from intaglio.errors import ConfigError
from intaglio.exporters.tokenizer_files import BYTE, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, add_tokens, shown

SPACE = "▁"  # how pieces spell a space

# Steps are counted as the squares of the lengths; 256,000 published pieces take some 20 million. The bound keeps
# a damaged file from taking minutes.
_MOST_STEPS = 100_000_000
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SentencePieces:
    """A SentencePiece BPE model: for each id the piece, its score and its type (`NORMAL` … `BYTE`).

    `byte_fallback`: a character without a piece becomes the pieces of its UTF-8 bytes instead of the unknown
    one. `add_dummy_prefix`: text is encoded with a space in front.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    byte_fallback: bool
    add_dummy_prefix: bool


def sentencepiece_tokenizer(
    model: SentencePieces,
    source: str,
    special_ids: Sequence[int] = (),
    prefix: Literal["first", "always"] = "first",
) -> Tokenizer:
    """A tokenizer with the ids of `model`; no tokens are put around the text yet.

    Special tokens that are spelled out in text become their ids, which SentencePiece itself never does.
    `special_ids` are special whatever their type. `prefix` says where the dummy prefix goes: before the text
    (nowhere, where it begins with a special or user-defined token), or also after each such token.

    Raises ConfigError, which names `source`, where the model contradicts itself, and where it cannot be said
    in merges: pieces of equal score (but for runs of one character), unused pieces that text would go through.
    """
    _check(model, source)
    vocab = {piece: index for index, piece in enumerate(model.pieces)}
    unknown = next(index for index, kind in enumerate(model.types) if kind == UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(model, source),
            unk_token=model.pieces[unknown],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        # Metaspace adds no prefix to text that begins with its replacement. SentencePiece adds one always, so
        # the prefix is a space until the text's own spaces have become the other character.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement=" ", prepend_scheme=prefix, split=False),
                pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False),
            ]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # Normalized, because pieces spell spaces in their own way.
    add_tokens(tokenizer, model.pieces, model.types, special_ids, normalized=True)
    return tokenizer


def _check(model: SentencePieces, source: str) -> None:
    first: dict[str, int] = {}
    for index, (piece, score, kind) in enumerate(zip(model.pieces, model.scores, model.types, strict=True)):
        if not piece:
            raise ConfigError(f"{source}: piece {index} is empty; expected text. Get the file again.")
        if first.setdefault(piece, index) != index:
            raise ConfigError(
                f"{source}: holds the piece {shown(piece)} twice, as ids {first[piece]} and {index}; every "
                "piece must be there once. Get the file again."
            )
        if not math.isfinite(score):
            raise ConfigError(f"{source}: piece {index} ({shown(piece)}) has the score {score}; expected a number.")
        if kind == BYTE and not _BYTE_PIECE.fullmatch(piece):
            raise ConfigError(f"{source}: piece {index} is {shown(piece)}; expected '<0x00>' to '<0xFF>' for a byte.")
        if kind == USER_DEFINED and model.add_dummy_prefix and piece.replace(" ", SPACE).startswith(SPACE):
            raise ConfigError(
                f"{source}: the user-defined piece {index} ({shown(piece)}) begins with a space, and text gets "
                "a dummy prefix that would become part of it; only one of the two is read. Export from a "
                "directory with a tokenizer.json."
            )
    formed = [piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind in (NORMAL, UNUSED)]
    if sum(len(piece) ** 2 for piece in formed) > _MOST_STEPS:
        raise ConfigError(
            f"{source}: {len(formed)} pieces of up to {max(map(len, formed))} characters are neither control nor "
            "user-defined; expected words, such as a trainer finds. Get the file again."
        )
    unknown = [index for index, kind in enumerate(model.types) if kind == UNKNOWN]
    if len(unknown) != 1:
        raise ConfigError(f"{source}: {len(unknown)} pieces are of the type unknown; expected exactly one.")
    count = sum(kind == BYTE for kind in model.types)
    if count != (256 if model.byte_fallback else 0):
        raise ConfigError(
            f"{source}: {count} pieces stand for bytes; expected 256 where the model falls back to bytes, else none "
            f"(byte_fallback is {str(model.byte_fallback).lower()})."
        )


def _merges(model: SentencePieces, source: str) -> list[tuple[str, str]]:
    table = zip(model.pieces, model.scores, model.types, strict=True)
    # The others are never formed of characters: they are matched whole, or not at all.
    scores = {piece: score for piece, score, kind in table if kind in (NORMAL, UNUSED, USER_DEFINED)}
    merges: dict[str, tuple[str, str]] = {}
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind not in (NORMAL, UNUSED):
            continue
        parts = _last_step(piece, scores) if len(piece) > 1 else None
        if kind == UNUSED and (parts or len(piece) == 1):
            raise ConfigError(
                f"{source}: the piece {shown(piece)} is unused, but text goes through it; a list of merges "
                "cannot take a step back. Export from a directory with a tokenizer.json."
            )
        if parts is None:
            continue
        for part in parts:
            if part not in scores:
                raise ConfigError(
                    f"{source}: the piece {shown(piece)} is made of {' and '.join(map(shown, parts))}, but "
                    f"{shown(part)} is not a piece; expected both. Get the file again."
                )
        merges[piece] = parts
    # Of runs of one character (of spaces, in published models) with one score, the longest first: a run grows
    # from the left, step by step, before another one starts.
    ordered = sorted(merges, key=lambda piece: (-scores[piece], -len(piece)))
    for one, other in itertools.pairwise(ordered):
        if scores[one] == scores[other] and len(set(one + other)) > 1:
            raise ConfigError(
                f"{source}: the pieces {shown(one)} and {shown(other)} have one score, {scores[one]:g}, which "
                "leaves open what is joined first; expected scores that differ, as SentencePiece writes them. "
                "Convert the model again, or export from a directory with a tokenizer.json."
            )
    return [merges[piece] for piece in ordered]


def _last_step(piece: str, scores: Mapping[str, float]) -> tuple[str, str] | None:
    """The two parts from which the characters of `piece` become `piece`; None where they never do."""
    symbols = list(piece)
    joined = [scores.get(left + right, -math.inf) for left, right in itertools.pairwise(symbols)]
    while len(symbols) > 2:
        best = max(joined)
        if best == -math.inf:
            return None
        at = joined.index(best)  # the leftmost
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        del joined[at]
        if at > 0:
            joined[at - 1] = scores.get(symbols[at - 1] + symbols[at], -math.inf)
        if at < len(joined):
            joined[at] = scores.get(symbols[at] + symbols[at + 1], -math.inf)
    return symbols[0], symbols[1]
