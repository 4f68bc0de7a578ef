"""The tokenizer that GGUF metadata describes.

GGUF names the pre-tokenizer of byte-level BPE (`tokenizer.ggml.pre`) but does not describe it. Those read here
are written down in `PRE_TOKENIZERS` as the models of that name publish them in their own `tokenizer.json`.

Sources: the GGUF specification (ggml `docs/gguf.md`) for the keys; the `tokenizer.json` of SmolLM2, Qwen2,
Llama 3 and GPT-2 for the pre-tokenizers; llama.cpp `src/llama-vocab.cpp` for what absent `add_bos_token` and
`add_space_prefix` mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from intaglio.errors import ConfigError
from intaglio.exporters.tokenizer_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerFiles,
    add_tokens,
    integer,
    set_template,
    shown,
)
from intaglio.exporters.tokenizer_sentencepiece import SentencePieces, sentencepiece_tokenizer

# Qwen2 and Llama 3 publish one split that differs only in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """The parts of a published byte-level `tokenizer.json` that GGUF keeps only as a name."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    # A word that is itself a token is taken whole, even where no merges lead to it.
    ignore_merges: bool = False
    # Whether the published post-processor puts BOS in front. Converters leave `add_bos_token` out of many
    # files, and readers then go by the pre-tokenizer, so an absent key does have a meaning.
    add_bos: bool = False


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT.format(digits=digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": _PreTokenizer(lambda: _split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(lambda: _split(r"\p{N}"), nfc=True),
    "smollm": _PreTokenizer(_single_digits_then_gpt2),
}


def tokenizer_from_gguf(metadata: Mapping[str, object], source: str) -> TokenizerFiles:
    """Builds the tokenizer that GGUF metadata describes.

    Read are byte-level BPE (`tokenizer.ggml.model` = gpt2) and SentencePiece BPE (llama). `metadata` holds
    plain Python values; numeric arrays may be NumPy arrays. `source` names the file in messages. Control
    tokens become special tokens, user-defined ones added tokens that decoding keeps. An unused or padding
    entry of the vocabulary keeps its id. As in the published tokenizers, a byte that has no token of its own
    is left out of the text that byte-level BPE encodes.

    Raises ConfigError, which names the key, what was found and what is expected.
    """
    hint = "Byte-level BPE (gpt2) and SentencePiece BPE (llama) are what is read"
    kind = _choice(metadata, "tokenizer.ggml.model", ["gpt2", "llama"], source, hint)
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    _check_unique(tokens, source)
    types = _token_types(metadata, tokens, source)
    ids = {
        name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens), source)
        for name in ("bos", "eos", "padding", "unknown", "eot", "eom")
    }
    ends = (ids["eos"], ids["eot"], ids["eom"])
    eos_token_ids = tuple(dict.fromkeys(index for index in ends if index is not None))
    for index in eos_token_ids:
        _check_not_empty(index, tokens[index], types[index], source)

    if kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, eos_token_ids, source)
        add_bos = True
    else:
        tokenizer, add_bos = _byte_level(metadata, tokens, types, eos_token_ids, source)
    first = _affix(metadata, "bos", ids["bos"], add_bos, source)
    last = _affix(metadata, "eos", ids["eos"], False, source)
    set_template(tokenizer, tokens, first, last)

    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{source}: tokenizer.chat_template is {shown(template)}; expected text (a Jinja template).")
    texts = {name: None if index is None else tokens[index] for name, index in ids.items()}
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        bos_token=texts["bos"],
        eos_token=texts["eos"],
        pad_token=texts["padding"],
        bos_token_id=ids["bos"],
        pad_token_id=ids["padding"],
        eos_token_ids=eos_token_ids,
    )


def _byte_level(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int], special_ids: Sequence[int], source: str
) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether an absent `add_bos_token` means true."""
    pre_name = _choice(
        metadata,
        "tokenizer.ggml.pre",
        sorted(PRE_TOKENIZERS),
        source,
        "It decides how text is split and cannot be guessed: convert the model again with a converter that "
        "writes it, or export from the original directory with its tokenizer.json",
    )
    pre = PRE_TOKENIZERS[pre_name]
    if _flag(metadata, "tokenizer.ggml.add_space_prefix", False, source):
        raise ConfigError(
            f"{source}: tokenizer.ggml.add_space_prefix is true; readers of byte-level BPE do not agree on "
            "what that means, so only false is read. Export from the original directory with its "
            "tokenizer.json."
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(metadata, vocab, source)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, tokens, types, special_ids)
    return tokenizer, pre.add_bos


def _sentencepiece(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int], special_ids: Sequence[int], source: str
) -> Tokenizer:
    # `tokenizer.ggml.pre` has no meaning here: nothing is split before pieces are joined.
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and len(charsmap) > 0:  # type: ignore[arg-type]
        raise ConfigError(
            f"{source}: tokenizer.ggml.precompiled_charsmap is there, so the model rewrites characters; only "
            "SentencePiece models that keep text as it is are read. Export from a directory with a tokenizer.json."
        )
    if _flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False, source):
        raise ConfigError(
            f"{source}: tokenizer.ggml.remove_extra_whitespaces is true; only SentencePiece models that keep "
            "text as it is are read. Export from a directory with a tokenizer.json."
        )
    model = SentencePieces(
        pieces=tokens,
        scores=_scores(metadata, len(tokens), source),
        types=types,
        # GGUF has no key for it; readers fall back where the byte tokens are there.
        byte_fallback=BYTE in types,
        add_dummy_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", True, source),
    )
    return sentencepiece_tokenizer(model, source, special_ids)


def _check_unique(tokens: Sequence[str], source: str) -> None:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        index = next(index for index, token in enumerate(tokens) if vocab[token] != index)
        raise ConfigError(
            f"{source}: tokenizer.ggml.tokens holds {shown(tokens[index])} twice, as ids {index} and "
            f"{vocab[tokens[index]]}; every token must be there once. Convert the model again."
        )


def _check_not_empty(index: int, token: str, kind: int, source: str) -> None:
    if not token:
        raise ConfigError(
            f"{source}: entry {index} of tokenizer.ggml.tokens is empty, though its "
            f"tokenizer.ggml.token_type is {kind}; a control or user-defined token needs text."
        )


def _scores(metadata: Mapping[str, object], count: int, source: str) -> list[float]:
    key = "tokenizer.ggml.scores"
    value = metadata.get(key)
    if value is None:
        raise ConfigError(
            f"{source}: {key} is missing; it says which pieces are joined first. Convert the model again."
        )
    scores = np.asarray(value)
    if scores.ndim != 1 or not np.issubdtype(scores.dtype, np.floating):
        raise ConfigError(f"{source}: {key} is {shown(value)}; expected an array of {count} numbers.")
    if len(scores) != count:
        raise ConfigError(f"{source}: {key} has {len(scores)} entries; expected {count}, one for each token.")
    return scores.tolist()


def _choice(metadata: Mapping[str, object], key: str, known: Sequence[str], source: str, hint: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or value not in known:
        found = "is missing" if value is None else f"is {shown(value)}"
        raise ConfigError(f"{source}: {key} {found}; expected one of: {', '.join(known)}. {hint}.")
    return value


def _strings(metadata: Mapping[str, object], key: str, source: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing; the tokenizer needs it. Convert the model again.")
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise ConfigError(f"{source}: {key} is {shown(value)}; expected an array of strings.")
    strings = list(value)
    for index, entry in enumerate(strings):
        if not isinstance(entry, str):
            raise ConfigError(f"{source}: entry {index} of {key} is {shown(entry)}; expected a string.")
    return strings


def _token_types(metadata: Mapping[str, object], tokens: Sequence[str], source: str) -> list[int]:
    count = len(tokens)
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing; it says which tokens are special. Convert the model again.")
    types = np.asarray(value)
    if types.ndim != 1 or not np.issubdtype(types.dtype, np.integer):
        raise ConfigError(f"{source}: {key} is {shown(value)}; expected an array of {count} integers.")
    if len(types) != count:
        raise ConfigError(f"{source}: {key} has {len(types)} entries; expected {count}, one for each token.")
    wrong = np.flatnonzero((types < NORMAL) | (types > BYTE))
    if wrong.size:
        raise ConfigError(f"{source}: entry {wrong[0]} of {key} is {types[wrong[0]]}; expected 1 (normal) to 6 (byte).")
    for index, (token, kind) in enumerate(zip(tokens, types.tolist(), strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            _check_not_empty(index, token, kind, source)
    return types.tolist()


def _merges(metadata: Mapping[str, object], vocab: Mapping[str, int], source: str) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    merges: dict[tuple[str, str], int] = {}
    for index, merge in enumerate(_strings(metadata, key, source)):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ConfigError(
                f"{source}: entry {index} of {key} is {shown(merge)}; expected two tokens with one space between."
            )
        for token in (left, right, left + right):
            if token not in vocab:
                raise ConfigError(
                    f"{source}: entry {index} of {key} is {shown(merge)}, but {token!r} is not among the "
                    f"{len(vocab)} of tokenizer.ggml.tokens; expected both parts and what they merge into."
                )
        if (left, right) in merges:
            raise ConfigError(
                f"{source}: entry {index} of {key} is {shown(merge)}, as is entry {merges[left, right]}; "
                "its rank must be unique."
            )
        merges[left, right] = index
    return list(merges)


def _token_id(metadata: Mapping[str, object], key: str, count: int, source: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    index = integer(value)
    if index is None or not 0 <= index < count:
        raise ConfigError(f"{source}: {key} is {shown(value)}; expected a token id from 0 to {count - 1}.")
    return index


def _flag(metadata: Mapping[str, object], key: str, default: bool, source: str) -> bool:
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{source}: {key} is {shown(value)}; expected true or false.")
    return bool(value)


def _affix(metadata: Mapping[str, object], name: str, index: int | None, default: bool, source: str) -> int | None:
    """The id that is put before (bos) or after (eos) an encoded text, if one is."""
    key = f"tokenizer.ggml.add_{name}_token"
    if not _flag(metadata, key, default, source):
        return None
    if index is None:
        implies = "model" if metadata["tokenizer.ggml.model"] == "llama" else "pre"
        found = f"{key} is true" if key in metadata else f"tokenizer.ggml.{implies} implies that {key} is true"
        raise ConfigError(f"{source}: {found}, but tokenizer.ggml.{name}_token_id is missing; expected both.")
    return index
