"""Text for training: documents, chats with a loss mask, and captions, tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import ConfigError, DataError
from intaglio.exporters.tokenizer import tokenizer_from_directory
from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.fields import field_of, text_of
from intaglio.trainer.data.making import Arrays, Example, RandomSource, stacked
from intaglio.trainer.data.packing import IGNORED
from intaglio.trainer.data.records import Record

# Files in which tokenizers were published before tokenizer.json.
_OTHER_TOKENIZERS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


def check_tokenizer(folder: Path) -> None:
    """Raises ConfigError where ``folder`` has no ``tokenizer.json``, which says what it has instead."""
    if (folder / "tokenizer.json").is_file():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; expected one with tokenizer.json")
    if found := [name for name in _OTHER_TOKENIZERS if (folder / name).is_file()]:
        raise ConfigError(
            f"{folder}: has {' and '.join(found)}, and no tokenizer.json, which is what is read. Let transformers "
            f"write one (AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)), and name that FOLDER "
            "as tokenizer"
        )
    raise ConfigError(f"{folder}: has no tokenizer.json; expected the folder of a tokenizer that is published so")


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with ``tokenizer.json``, and its special tokens and template as published beside it.

    Raises ConfigError where there is none.
    """
    check_tokenizer(folder)
    files = tokenizer_from_directory(folder)
    assert files is not None, "its file is there"
    tokenizer = Tokenizer(
        folder,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        pad_token=files.pad_token,
        bos_token_id=files.bos_token_id,
        pad_token_id=files.pad_token_id,
        eos_token_ids=files.eos_token_ids,
    )
    # Older folders have the template in tokenizer_config.json.
    tokenizer.chat_template = files.chat_template
    return tokenizer


@dataclass(frozen=True)
class DocumentTransform:
    """``ids`` and ``learned`` of the text of ``field``, with BOS as the tokenizer puts it and EOS behind.

    ``eos`` False leaves that to the tokenizer. With ``padded_to`` a batch has a document a row, cut and padded.
    """

    tokenizer: Tokenizer
    field: str
    eos: bool = True
    padded_to: int | None = None

    def __call__(self, record: Record, random: RandomSource) -> Example:
        ids = self.tokenizer.encode(text_of(record, self.field))
        if self.eos:
            ids = with_eos(ids, self.tokenizer)
        return {"ids": np.array(ids, np.int32), "learned": np.ones(len(ids), bool)}

    def collate(self, examples: Sequence[Example]) -> Arrays:
        assert self.padded_to is not None, "documents are packed, not collated"
        return padded(examples, self.padded_to, pad_id(self.tokenizer))


@dataclass(frozen=True)
class ChatTransform:
    """``ids`` of a conversation, of which the assistant's answers are ``learned``.

    A record has ``messages`` (role and content each, through the tokenizer's chat template), or a prompt and a
    completion, which is followed by EOS. Prompt and answer are tokenized apart, as when the answer is generated.
    """

    tokenizer: Tokenizer
    messages: str | None = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    padded_to: int | None = None

    def __call__(self, record: Record, random: RandomSource) -> Example:
        pieces = self._plain(record) if self.messages is None else self._chat(field_of(record, self.messages))
        ids = [np.array(ids, np.int32) for ids, _ in pieces]
        learned = [np.full(len(ids), is_answer) for ids, is_answer in pieces]
        example = {"ids": np.concatenate(ids), "learned": np.concatenate(learned)}
        if self.padded_to is not None and not example["learned"][1 : self.padded_to + 1].any():
            raise DataError(f"no answer begins within {self.padded_to} tokens; there is nothing to learn")
        return example

    def collate(self, examples: Sequence[Example]) -> Arrays:
        assert self.padded_to is not None, "conversations are packed, not collated"
        return padded(examples, self.padded_to, pad_id(self.tokenizer))

    def _plain(self, record: Record) -> list[tuple[list[int], bool]]:
        prompt, completion = text_of(record, self.prompt), text_of(record, self.completion)
        answer = with_eos(self.tokenizer.encode(completion, add_special_tokens=False), self.tokenizer)
        return [(self.tokenizer.encode(prompt), False), (answer, True)]

    def _chat(self, messages: Any) -> list[tuple[list[int], bool]]:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(f"field {self.messages!r} is {messages!r:.80}; expected a list of messages")
        whole = self.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        pieces, done = [], 0
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            begin = self.tokenizer.apply_chat_template(messages[:i])
            end = self.tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
            if not (whole.startswith(end) and end.startswith(begin) and len(begin) >= done):
                raise DataError(
                    f"the chat template changes what stands before message {i + 1}, so the answer cannot be told from "
                    "the prompt. Give each answer its own record"
                )
            pieces += [(whole[done : len(begin)], False), (whole[len(begin) : len(end)], True)]
            done = len(end)
        if not pieces:
            raise DataError("has no message of the role assistant; there is nothing to learn")
        pieces.append((whole[done:], False))
        return [(self.tokenizer.encode(text, add_special_tokens=False), learned) for text, learned in pieces if text]


@dataclass(frozen=True)
class Captions:
    """``input_ids`` and ``attention_mask`` int64 ``[length]`` of a caption, padded on the right.

    With ``chat`` it goes through the chat template, as the prompts of a picture pipeline do. ``dropout`` is the
    probability of an empty caption, for guidance. Of a list of captions one is drawn. A caption that is too long is
    an error unless ``truncate`` is set.
    """

    tokenizer: Tokenizer
    field: str
    length: int
    dropout: float = 0.0
    chat: bool = True
    truncate: bool = False

    def __call__(self, record: Record, drawn: np.random.Generator) -> Example:
        value = field_of(record, self.field)
        which, dropped = drawn.random(2)
        if isinstance(value, list) and value:
            value = value[int(which * len(value))]
        if not isinstance(value, str):
            raise DataError(f"field {self.field!r} is a {type(value).__name__}; expected a caption")
        ids = self._encoded("" if dropped < self.dropout else value)
        if len(ids) > self.length and not self.truncate:
            raise DataError(
                f"the caption has {len(ids)} tokens with its template, and caption_length is {self.length}; shorten "
                "it, or set truncate"
            )
        ids = ids[: self.length]
        input_ids = np.full(self.length, pad_id(self.tokenizer), np.int64)
        input_ids[: len(ids)] = ids
        return {"input_ids": input_ids, "attention_mask": (np.arange(self.length) < len(ids)).astype(np.int64)}

    def _encoded(self, caption: str) -> list[int]:
        if not self.chat:
            return self.tokenizer.encode(caption)
        # As prompt_ids of the picture pipelines.
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": caption}], enable_thinking=False)
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class TokenTransform:
    """``input_ids`` and ``labels`` of a window of stored tokens, which must lie below ``vocab_size``."""

    vocab_size: int | None

    def __call__(self, record: Record, random: RandomSource) -> Example:
        tokens = record["tokens"].astype(np.int64)
        if self.vocab_size is not None and (largest := int(tokens.max())) >= self.vocab_size:
            place = int(tokens.argmax())
            raise DataError(
                f"token {place} of these is {largest}; expected ids below {self.vocab_size}, the size of the "
                "vocabulary. Were they made by another tokenizer?"
            )
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def collate(self, examples: Sequence[Example]) -> Arrays:
        return stacked(examples)


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids with EOS at the end. Raises ConfigError where the tokenizer has none."""
    if not tokenizer.eos_token_ids:
        raise ConfigError(f"{tokenizer.folder}: names no EOS token, which ends a document; set eos = false")
    eos = tokenizer.eos_token_ids[0]
    return ids if ids and ids[-1] == eos else [*ids, eos]


def pad_id(tokenizer: Tokenizer) -> int:
    """The id to pad with; EOS where the tokenizer has none. Raises ConfigError where it has neither."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if not tokenizer.eos_token_ids:
        raise ConfigError(f"{tokenizer.folder}: names neither a token to pad with nor EOS; name one in its files")
    return tokenizer.eos_token_ids[0]


def padded(examples: Sequence[Example], length: int, pad: int) -> Arrays:
    """``input_ids`` and ``labels`` int64 ``[B, length]``, cut and padded on the right. Padding is not learned."""
    input_ids = np.full((len(examples), length), pad, np.int64)
    labels = np.full((len(examples), length), IGNORED, np.int64)
    for row, example in enumerate(examples):
        ids, learned = example["ids"][: length + 1].astype(np.int64), example["learned"][: length + 1]
        count = len(ids) - 1
        input_ids[row, : min(len(ids), length)] = ids[:length]
        labels[row, :count] = np.where(learned[1:], ids[1:], IGNORED)
    return {"input_ids": input_ids, "labels": labels}
