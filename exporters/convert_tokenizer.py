"""A `tokenizer.json` as GGUF metadata: exactly, or refused.

GGUF keeps vocabulary and merges, and a mere name for the way text is split. So the metadata is written for each
name, read back by :func:`tokenizer_from_gguf`, and taken only if the tokenizer that comes out is the same.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from intaglio.errors import ConfigError
from intaglio.exporters.tokenizer import _CONTROL, _NORMAL, _PRE_TOKENIZERS, _UNUSED, _USER_DEFINED, TokenizerFiles
from intaglio.exporters.tokenizer import tokenizer_from_gguf as _read

_ADVICE = "--no-tokenizer converts the weights alone"
# What a byte-level BPE model may not use, since GGUF has no key for it.
_MODEL_KEYS = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")


def tokenizer_metadata(files: TokenizerFiles, vocab_size: int, source: str) -> dict[str, Any]:
    """The `tokenizer.*` keys for `files`; ids up to `vocab_size` that have no token become unused ones.

    Raises ConfigError, naming `source`, where GGUF cannot say what the tokenizer does.
    """
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE" or content["decoder"] is None or _simple(content["decoder"])["type"] != "ByteLevel":
        raise ConfigError(f"{source}: its model is {model['type']}, not byte-level BPE, the one written; {_ADVICE}")
    if odd := [key for key in _MODEL_KEYS if model.get(key)]:
        raise ConfigError(f"{source}: {odd[0]} is {model[odd[0]]!r}, which GGUF has no key for; {_ADVICE}")
    tokens, types = _vocabulary(content, vocab_size, source)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        **_special(files, source),
        **_affixes(tokenizer, files, source),
    }
    if files.chat_template is not None:
        metadata["tokenizer.chat_template"] = files.chat_template
    reasons = []
    for name in _PRE_TOKENIZERS:
        metadata["tokenizer.ggml.pre"] = name
        different = _differences(content, tokenizer, _read(metadata, source))
        if not different:
            return metadata
        reasons.append(f"{name} (differs in {', '.join(different)})")
    raise ConfigError(
        f"{source}: GGUF knows this way of splitting text by no name that is written here: {'; '.join(reasons)}. "
        f"{_ADVICE}"
    )


def _vocabulary(content: dict[str, Any], vocab_size: int, source: str) -> tuple[list[str], list[int]]:
    known = {
        # What fills the holes of a vocabulary in a GGUF file comes back as an entry of that name.
        index: (token, _UNUSED if token == f"[PAD{index}]" else _NORMAL)
        for token, index in content["model"]["vocab"].items()
    }
    for added in content["added_tokens"]:
        kind = _CONTROL if added["special"] else _USER_DEFINED
        known[added["id"]] = (added["content"], kind)
    if known and max(known) >= vocab_size:
        raise ConfigError(f"{source}: has the token id {max(known)}, but vocab_size is {vocab_size}; {_ADVICE}")
    entries = [known.get(index, (f"[PAD{index}]", _UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in entries], [kind for _, kind in entries]


def _special(files: TokenizerFiles, source: str) -> dict[str, int]:
    # GGUF has three keys for what ends a text; the first is the end of sequence.
    ends = files.eos_token_ids
    if len(ends) > 3:
        raise ConfigError(f"{source}: {len(ends)} tokens end generation ({ends}), GGUF has keys for 3; {_ADVICE}")
    ids = {"bos": files.bos_token_id, "padding": files.pad_token_id}
    ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    return {f"tokenizer.ggml.{key}_token_id": index for key, index in ids.items() if index is not None}


def _affixes(tokenizer: Tokenizer, files: TokenizerFiles, source: str) -> dict[str, bool]:
    bare, whole = (tokenizer.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    eos = files.eos_token_ids[0] if files.eos_token_ids else None
    for first in (False, True):
        for last in (False, True):
            front, back = ([files.bos_token_id] if first else []), ([eos] if last else [])
            if whole == [*front, *bare, *back]:
                return {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
    raise ConfigError(f"{source}: 'a' is encoded as {whole}, of which GGUF can add only bos and eos; {_ADVICE}")


def _differences(content: dict[str, Any], tokenizer: Tokenizer, files: TokenizerFiles) -> list[str]:
    other = Tokenizer.from_str(files.tokenizer_json)
    found = json.loads(other.to_str())
    different = [
        part for part in ("normalizer", "pre_tokenizer", "decoder") if _simple(content[part]) != _simple(found[part])
    ]
    if bool(content["model"].get("ignore_merges")) != bool(found["model"].get("ignore_merges")):
        different.append("ignore_merges")
    # `normalized` says nothing where there is no normalizer.
    ignored = ("normalized",) if content["normalizer"] is None else ()
    added = [
        {t["id"]: {k: v for k, v in t.items() if k not in ignored} for t in side["added_tokens"]}
        for side in (content, found)
    ]
    if added[0] != added[1]:
        different.append("added_tokens")
    if any(tokenizer.encode("a", pair).ids != other.encode("a", pair).ids for pair in (None, "a")):
        different.append("post_processor")
    return different


def _simple(part: Any) -> Any:
    """A part of the file without what does not change ids or text."""
    if isinstance(part, list):
        return [_simple(item) for item in part]
    if not isinstance(part, dict):
        return part
    for key in ("pretokenizers", "normalizers", "decoders"):
        if part.get("type") == "Sequence" and len(part.get(key, ())) == 1:
            return _simple(part[key][0])
    return {key: _simple(value) for key, value in part.items() if key not in ("trim_offsets", "cache_capacity")}
