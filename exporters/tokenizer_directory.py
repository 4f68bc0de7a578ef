"""The tokenizer of a Hugging Face directory: its `tokenizer.json`, or the SentencePiece model `tokenizer.model`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer

from intaglio.errors import CheckpointError, ConfigError
from intaglio.exporters.checkpoints.json_file import read_json
from intaglio.exporters.tokenizer_files import TokenizerFiles, integer, set_template, shown
from intaglio.exporters.tokenizer_model_file import read_model_file
from intaglio.exporters.tokenizer_sentencepiece import sentencepiece_tokenizer

# Of the files that may hold the tokens, the first that is there is read.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
# Vocabularies of 256k tokens with their merges take 33 MB.
_MAX_TOKENIZER_BYTES = 128 << 20


def tokenizer_from_directory(folder: Path) -> TokenizerFiles | None:
    """Reads the tokenizer of a Hugging Face directory; None where it has neither file.

    `tokenizer.json` is kept as it is, except that padding and truncation stored in it are switched off.
    Where there is none, `tokenizer.model` (SentencePiece BPE) is turned into one, with the tokens that
    `added_tokens_decoder` of `tokenizer_config.json`, or else `added_tokens.json`, add to it. BOS is put in
    front unless `add_bos_token` is false, EOS behind if `add_eos_token` is true; a true `legacy` puts the
    dummy prefix after each special token too.
    Special tokens come from `tokenizer_config.json`, then `special_tokens_map.json`, then `tokenizer.model`;
    the chat template from `chat_template.jinja`, then `tokenizer_config.json` (of several named templates the
    one named `default`); the ids that end generation from `generation_config.json`, else `config.json`, in
    addition to that of `eos_token`. `clean_up_tokenization_spaces` is not read: it would change text that was
    already streamed.

    Raises CheckpointError for a damaged file and ConfigError for values that make no sense or contradict each
    other.
    """
    path, model_path = (folder / name for name in TOKENIZER_FILES)
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path)
    special_path = folder / "special_tokens_map.json"
    special = _read_json(special_path)
    defaults: dict[str, str] = {}
    if path.is_file():
        text = _without_padding(path)
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(
                f"{path}: not a tokenizer that the tokenizers library can read ({error}). Get the file again, "
                "or update the library if the model is newer."
            ) from error
    elif model_path.is_file():
        path = model_path
        tokenizer, defaults = _from_model_file(model_path, config, config_path, special, special_path)
    else:
        return None

    found: dict[str, tuple[str | None, int | None]] = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = _special_token(config, key, config_path)
        where = config_path
        if token is None:
            token, where = _special_token(special, key, special_path), special_path
        if token is None and key not in config:
            token, where = defaults.get(key), path
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
    if path == model_path:
        _set_affixes(tokenizer, config, config_path, found)
        text = tokenizer.to_str()
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


def _from_model_file(
    path: Path, config: Mapping[str, object], config_path: Path, special: Mapping[str, object], special_path: Path
) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of `tokenizer.model` with all added tokens, and the special tokens it names itself."""
    found = read_model_file(path)
    pieces = found.model.pieces
    prefix: Literal["first", "always"] = "always" if _boolean(config, "legacy", False, config_path) else "first"
    add_dummy_prefix = _boolean(config, "add_prefix_space", found.model.add_dummy_prefix, config_path)
    model = replace(found.model, add_dummy_prefix=add_dummy_prefix)
    tokenizer = sentencepiece_tokenizer(model, str(path), prefix=prefix)
    for index, (token, where) in sorted(_added_tokens(config, config_path, special, special_path).items()):
        size = tokenizer.get_vocab_size()
        if index != size and (not 0 <= index < size or tokenizer.id_to_token(index) != token.content):
            raise ConfigError(
                f"{where}: the added token {token.content!r} has the id {index}; expected the id that it has in "
                f"{path.name}, or else ids without a gap from {len(pieces)} on."
            )
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.id_to_token(index) != token.content:
            raise ConfigError(f"{where}: the added token {token.content!r} is there twice; expected it once.")
    ids = {"bos_token": found.bos_id, "eos_token": found.eos_id, "pad_token": found.pad_id}
    return tokenizer, {key: pieces[index] for key, index in ids.items() if index is not None}


def _added_tokens(
    config: Mapping[str, object], config_path: Path, special: Mapping[str, object], special_path: Path
) -> dict[int, tuple[AddedToken, Path]]:
    listed = config.get("added_tokens_decoder")
    if listed is None:
        path = config_path.with_name("added_tokens.json")
        named = _read_json(path)
        if not all(token and _is_id(index) for token, index in named.items()):
            raise ConfigError(f"{path}: holds {shown(named)}; expected an id for each token.")
        # This file does not say which of its tokens are special.
        names = _special_names(config, config_path) | _special_names(special, special_path)
        return {
            index: (AddedToken(token, normalized=False, special=token in names), path)  # type: ignore[misc]
            for token, index in named.items()
        }
    result = {}
    try:
        for index, entry in listed.items():  # type: ignore[attr-defined]
            if not isinstance(entry["content"], str) or not entry["content"]:
                raise TypeError
            flags = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
            result[int(index)] = AddedToken(entry["content"], normalized=False, **flags), config_path
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{config_path}: added_tokens_decoder is {shown(listed)}; expected an object that gives for each id "
            "an object with the content of its token."
        ) from error
    return result


def _is_id(value: object) -> bool:
    index = integer(value)
    return index is not None and index >= 0


def _special_names(config: Mapping[str, object], path: Path) -> set[str]:
    names = {_special_token(config, f"{name}_token", path) for name in ("bos", "eos", "pad", "unk")}
    more = config.get("additional_special_tokens") or []
    if not isinstance(more, list):
        raise ConfigError(f"{path}: additional_special_tokens is {shown(more)}; expected a list of tokens.")
    names.update(_special_token({"entry": entry}, "entry", path) for entry in more)
    return {name for name in names if name is not None}


def _boolean(config: Mapping[str, object], key: str, absent: bool, path: Path) -> bool:
    value = config.get(key)
    if value is None:
        return absent
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {key} is {shown(value)}; expected true or false.")
    return value


def _set_affixes(
    tokenizer: Tokenizer,
    config: Mapping[str, object],
    path: Path,
    found: Mapping[str, tuple[str | None, int | None]],
) -> None:
    used = []
    for name, absent in (("bos", True), ("eos", False)):
        index = found[f"{name}_token"][1]
        wanted = _boolean(config, f"add_{name}_token", absent, path)
        if wanted and index is None and f"add_{name}_token" in config:
            raise ConfigError(f"{path}: add_{name}_token is true, but no {name}_token is named; expected both.")
        used.append(index if wanted else None)
    tokens = {index: token for token, index in found.values() if token is not None and index is not None}
    set_template(tokenizer, tokens, *used)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error}). Get the file again.") from error


def _read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}


def _without_padding(path: Path) -> str:
    # Some published files pad every text to a fixed length, or cut it, because that is how the model was last
    # used.
    content = read_json(path, _MAX_TOKENIZER_BYTES)
    stored = [key for key in ("padding", "truncation") if content.get(key) is not None]
    if not stored:
        return _read_text(path)
    return json.dumps(content | dict.fromkeys(stored), ensure_ascii=False)


def _special_token(config: Mapping[str, object], key: str, path: Path) -> str | None:
    value = config.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if value is not None and (not isinstance(token, str) or not token):
        raise ConfigError(f"{path}: {key} is {shown(value)}; expected a token, or an object with its content.")
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
        raise ConfigError(f"{where} is {shown(value)}; expected text, or a list of named templates.") from error
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
            index = integer(entry)
            if index is None or index < 0 or tokenizer.id_to_token(index) is None:
                raise ConfigError(
                    f"{folder / name}: eos_token_id is {shown(value)}; expected one id of tokenizer.json "
                    f"or a list of them, but {shown(entry)} is not among its {tokenizer.get_vocab_size()}."
                )
            ids.append(index)
        break
    return tuple(dict.fromkeys(ids))
