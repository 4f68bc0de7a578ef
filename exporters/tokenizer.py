"""Tokenizer files of a bundle, from GGUF metadata or from a Hugging Face directory.

What comes out is always the `tokenizer.json` of the `tokenizers` library, so that the runtime knows one
format only. GGUF names a pre-tokenizer (`tokenizer.ggml.pre`) but does not describe it. Those read here are
written down in `_PRE_TOKENIZERS` as the models of that name publish them in their own `tokenizer.json`.

Sources: the GGUF specification (ggml `docs/gguf.md`) for the keys; the `tokenizer.json` of SmolLM2, Qwen2,
Llama 3 and GPT-2 for the pre-tokenizers; llama.cpp `src/llama-vocab.cpp` for what an absent `add_bos_token`
means.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from intaglio.errors import CheckpointError, ConfigError

# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Qwen2 and Llama 3 publish one split that differs only in how many digits stay together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": _PreTokenizer(lambda: _split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(lambda: _split(r"\p{N}"), nfc=True),
    "smollm": _PreTokenizer(_single_digits_then_gpt2),
}


# --- GGUF ---------------------------------------------------------------------------------------------------


def tokenizer_from_gguf(metadata: Mapping[str, object], source: str) -> TokenizerFiles:
    """Builds the tokenizer that GGUF metadata describes.

    Only byte-level BPE (`tokenizer.ggml.model` = gpt2) is read. `metadata` holds plain Python values; numeric
    arrays may be NumPy arrays. `source` names the file in messages. Control tokens become special tokens,
    user-defined ones added tokens that decoding keeps. An unused or padding entry of the vocabulary keeps its
    id. As in the published tokenizers, a byte that has no token of its own is left out of the encoded text.

    Raises ConfigError, which names the key, what was found and what is expected.
    """
    _choice(metadata, "tokenizer.ggml.model", ["gpt2"], source, "Byte-level BPE is what is read")
    pre_name = _choice(
        metadata,
        "tokenizer.ggml.pre",
        sorted(_PRE_TOKENIZERS),
        source,
        "It decides how text is split and cannot be guessed: convert the model again with a converter that "
        "writes it, or export from the original directory with its tokenizer.json",
    )
    pre = _PRE_TOKENIZERS[pre_name]
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        index = next(index for index, token in enumerate(tokens) if vocab[token] != index)
        raise ConfigError(
            f"{source}: tokenizer.ggml.tokens holds {tokens[index]!r} twice, as ids {index} and "
            f"{vocab[tokens[index]]}; every token must be there once. Convert the model again."
        )
    types = _token_types(metadata, len(tokens), source)
    merges = _merges(metadata, vocab, source)

    bos_id, eos_id, pad_id, _, eot_id, eom_id = (
        _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens), source)
        for key in ("bos", "eos", "padding", "unknown", "eot", "eom")
    )
    eos_token_ids = tuple(dict.fromkeys(index for index in (eos_id, eot_id, eom_id) if index is not None))

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types, eos_token_ids, source)

    if _flag(metadata, "tokenizer.ggml.add_space_prefix", False, source):
        raise ConfigError(
            f"{source}: tokenizer.ggml.add_space_prefix is true; readers of byte-level BPE do not agree on "
            "what that means, so only false is read. Export from the original directory with its "
            "tokenizer.json."
        )
    first = _affix(metadata, "bos", bos_id, pre.add_bos, source)
    last = _affix(metadata, "eos", eos_id, False, source)
    _set_template(tokenizer, tokens, first, last)

    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{source}: tokenizer.chat_template is {_shown(template)}; expected text (a Jinja template).")
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=None if eos_id is None else tokens[eos_id],
        pad_token=None if pad_id is None else tokens[pad_id],
        bos_token_id=bos_id,
        pad_token_id=pad_id,
        eos_token_ids=eos_token_ids,
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _choice(metadata: Mapping[str, object], key: str, known: Sequence[str], source: str, hint: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or value not in known:
        found = "is missing" if value is None else f"is {_shown(value)}"
        raise ConfigError(f"{source}: {key} {found}; expected one of: {', '.join(known)}. {hint}.")
    return value


def _strings(metadata: Mapping[str, object], key: str, source: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing; a byte-level BPE tokenizer needs it. Convert the model again.")
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise ConfigError(f"{source}: {key} is {_shown(value)}; expected an array of strings.")
    strings = list(value)
    for index, entry in enumerate(strings):
        if not isinstance(entry, str):
            raise ConfigError(f"{source}: entry {index} of {key} is {_shown(entry)}; expected a string.")
    return strings


def _token_types(metadata: Mapping[str, object], count: int, source: str) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing; it says which tokens are special. Convert the model again.")
    types = np.asarray(value)
    if types.ndim != 1 or not np.issubdtype(types.dtype, np.integer):
        raise ConfigError(f"{source}: {key} is {_shown(value)}; expected an array of {count} integers.")
    if len(types) != count:
        raise ConfigError(f"{source}: {key} has {len(types)} entries; expected {count}, one for each token.")
    wrong = np.flatnonzero((types < _NORMAL) | (types > _BYTE))
    if wrong.size:
        raise ConfigError(f"{source}: entry {wrong[0]} of {key} is {types[wrong[0]]}; expected 1 (normal) to 6 (byte).")
    return types.tolist()


def _merges(metadata: Mapping[str, object], vocab: Mapping[str, int], source: str) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    merges: dict[tuple[str, str], int] = {}
    for index, merge in enumerate(_strings(metadata, key, source)):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ConfigError(
                f"{source}: entry {index} of {key} is {_shown(merge)}; expected two tokens with one space between."
            )
        for token in (left, right, left + right):
            if token not in vocab:
                raise ConfigError(
                    f"{source}: entry {index} of {key} is {_shown(merge)}, but {token!r} is not among the "
                    f"{len(vocab)} of tokenizer.ggml.tokens; expected both parts and what they merge into."
                )
        if (left, right) in merges:
            raise ConfigError(
                f"{source}: entry {index} of {key} is {_shown(merge)}, as is entry {merges[left, right]}; "
                "its rank must be unique."
            )
        merges[left, right] = index
    return list(merges)


def _token_id(metadata: Mapping[str, object], key: str, count: int, source: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    index = _integer(value)
    if index is None or not 0 <= index < count:
        raise ConfigError(f"{source}: {key} is {_shown(value)}; expected a token id from 0 to {count - 1}.")
    return index


def _integer(value: object) -> int | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _flag(metadata: Mapping[str, object], key: str, default: bool, source: str) -> bool:
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{source}: {key} is {_shown(value)}; expected true or false.")
    return bool(value)


def _add_tokens(
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    eos_token_ids: Sequence[int],
    source: str,
) -> None:
    """Lets control and user-defined tokens be found in raw text; they keep their ids."""
    special: list[AddedToken] = []
    kept: list[AddedToken] = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        # What ends generation is never text, whatever its type says.
        is_special = kind in (_CONTROL, _UNKNOWN) or index in eos_token_ids
        if not is_special and kind != _USER_DEFINED:
            continue
        if not token:
            raise ConfigError(
                f"{source}: entry {index} of tokenizer.ggml.tokens is empty, though its "
                f"tokenizer.ggml.token_type is {kind}; a control or user-defined token needs text."
            )
        (special if is_special else kept).append(AddedToken(token, normalized=False, special=is_special))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(kept)


def _affix(metadata: Mapping[str, object], name: str, index: int | None, default: bool, source: str) -> int | None:
    """The id that is put before (bos) or after (eos) an encoded text, if one is."""
    key = f"tokenizer.ggml.add_{name}_token"
    if not _flag(metadata, key, default, source):
        return None
    if index is None:
        found = f"{key} is true" if key in metadata else f"tokenizer.ggml.pre implies that {key} is true"
        raise ConfigError(f"{source}: {found}, but tokenizer.ggml.{name}_token_id is missing; expected both.")
    return index


def _set_template(tokenizer: Tokenizer, tokens: Sequence[str], bos_id: int | None, eos_id: int | None) -> None:
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


# --- Hugging Face directory ---------------------------------------------------------------------------------


def tokenizer_from_directory(folder: Path) -> TokenizerFiles | None:
    """Reads the tokenizer of a Hugging Face directory; None where it has no `tokenizer.json`.

    `tokenizer.json` is kept as it is, except that padding and truncation stored in it are switched off.
    Special tokens come from `tokenizer_config.json`, then `special_tokens_map.json`; the chat template from
    `chat_template.jinja`, then `tokenizer_config.json` (of several named templates the one named `default`);
    the ids that end generation from `generation_config.json`, else `config.json`, in addition to that of
    `eos_token`. `clean_up_tokenization_spaces` is not read: it would change text that was already streamed.

    Raises CheckpointError for a damaged file and ConfigError for values that make no sense or contradict each
    other.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = _without_padding(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            f"{path}: not a tokenizer that the tokenizers library can read ({error}). Get the file again, "
            "or update the library if the model is newer."
        ) from error

    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path)
    special_path = folder / "special_tokens_map.json"
    special = _read_json(special_path)
    found: dict[str, tuple[str | None, int | None]] = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = _special_token(config, key, config_path)
        where = config_path
        if token is None:
            token, where = _special_token(special, key, special_path), special_path
        index = None if token is None else tokenizer.token_to_id(token)
        if token is not None and index is None:
            raise ConfigError(
                f"{where}: {key} is {token!r}, which is not in {path.name}; expected one of its "
                f"{tokenizer.get_vocab_size()} tokens. Name a token that is there, or null."
            )
        found[key] = token, index
    bos_token, bos_id = found["bos_token"]
    eos_token, eos_id = found["eos_token"]
    pad_token, pad_id = found["pad_token"]
    _check_affixes(tokenizer, config, config_path, bos_id, eos_id)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=_chat_template(folder, config),
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token=pad_token,
        bos_token_id=bos_id,
        pad_token_id=pad_id,
        eos_token_ids=_eos_token_ids(folder, tokenizer, eos_id),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error}). Get the file again.") from error


def _read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; an absent file is an empty object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON ({error}). Get the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {_shown(content)}; expected a JSON object.")
    return content


def _without_padding(path: Path) -> str:
    # Some published files pad every text to a fixed length, or cut it, because that is how the model was last
    # used.
    content = _read_json(path)
    stored = [key for key in ("padding", "truncation") if content.get(key) is not None]
    if not stored:
        return _read_text(path)
    return json.dumps(content | dict.fromkeys(stored), ensure_ascii=False)


def _special_token(config: Mapping[str, object], key: str, path: Path) -> str | None:
    value = config.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if value is not None and (not isinstance(token, str) or not token):
        raise ConfigError(f"{path}: {key} is {_shown(value)}; expected a token, or an object with its content.")
    return token  # type: ignore[return-value]


def _check_affixes(
    tokenizer: Tokenizer, config: Mapping[str, object], path: Path, bos_id: int | None, eos_id: int | None
) -> None:
    # Loaders differ in which of the two files they believe, and a BOS too many or too few costs quality
    # unnoticed.
    ids = tokenizer.encode("a").ids
    for key, index, position in (("add_bos_token", bos_id, 0), ("add_eos_token", eos_id, -1)):
        wanted = config.get(key)
        if index is None or not isinstance(wanted, bool):
            continue
        added = bool(ids) and ids[position] == index
        if added != wanted:
            raise ConfigError(
                f"{path}: {key} is {str(wanted).lower()}, but the post-processor of tokenizer.json "
                f"{'adds' if added else 'does not add'} token {index}; expected the two to agree. Set {key} "
                "to what the model was trained with and save the tokenizer again."
            )


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    try:
        named = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{where} is {_shown(value)}; expected text, or a list of named templates.") from error
    if not isinstance(named.get("default"), str):
        raise ConfigError(
            f"{where} holds templates named {', '.join(map(repr, named))}; expected one named 'default'. "
            f"Write the one to be used to {path.name} beside it."
        )
    return named["default"]


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, eos_id: int | None) -> tuple[int, ...]:
    ids = [] if eos_id is None else [eos_id]
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        for entry in value if isinstance(value, list) else [value]:
            index = _integer(entry)
            if index is None or index < 0 or tokenizer.id_to_token(index) is None:
                raise ConfigError(
                    f"{folder / name}: eos_token_id is {_shown(value)}; expected one id of tokenizer.json "
                    f"or a list of them, but {_shown(entry)} is not among its {tokenizer.get_vocab_size()}."
                )
            ids.append(index)
        break
    return tuple(dict.fromkeys(ids))
