"""What every source of a tokenizer comes to, and the few steps that all of them share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Tokenizer, processors

# What a token is for, in the numbers of SentencePiece's `ModelProto.SentencePiece.Type`; GGUF has the same in
# `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class TokenizerFiles:
    """What a bundle stores of a tokenizer.

    `tokenizer_json` is the content of the file that the `tokenizers` library reads, `chat_template` a Jinja
    source. `eos_token_ids` holds every id that ends generation, that of `eos_token` first; it is empty where
    the checkpoint names none.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(value: object) -> int | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def set_template(
    tokenizer: Tokenizer, tokens: Sequence[str] | Mapping[int, str], bos_id: int | None, eos_id: int | None
) -> None:
    """Puts BOS before and EOS after each encoded text, where they are not None."""
    used = {name: index for name, index in (("bos", bos_id), ("eos", eos_id)) if index is not None}
    if not used:
        return
    # Named, not spelled out: the template syntax gives colons and spaces in a token a meaning of their own.
    first, last = (["bos"] if "bos" in used else []), (["eos"] if "eos" in used else [])
    single = [f"{piece}:0" for piece in [*first, "$A", *last]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=single + [f"{piece}:1" for piece in [*first, "$B", *last]],
        special_tokens=[{"id": name, "ids": [index], "tokens": [tokens[index]]} for name, index in used.items()],
    )


def add_tokens(
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    special_ids: Sequence[int] = (),
    normalized: bool = False,
) -> None:
    """Lets control and user-defined tokens be found in raw text; they keep their ids.

    Those of `special_ids` are special whatever their type. `normalized`: user-defined tokens are looked for
    after normalization instead of before.
    """
    special: list[AddedToken] = []
    kept: list[AddedToken] = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, UNKNOWN) or index in special_ids:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            kept.append(AddedToken(token, normalized=normalized, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(kept)
