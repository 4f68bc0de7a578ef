"""Text to token ids and back, over the `tokenizers` library, and chat prompts from Jinja templates."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from intaglio.errors import BundleError, EngineError, InputError
from intaglio.exporters.bundle import Bundle

# How vocabularies with byte fallback spell the token of one byte.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a bundle.

    `folder` holds `tokenizer.json` and, for chat models, `chat_template.jinja`; the special tokens are those
    that `bundle.json` names. Raises BundleError where `tokenizer.json` is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.folder = Path(folder)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.pad_token = pad_token
        self.bos_token_id = bos_token_id
        self.pad_token_id = pad_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = _load(self.folder / "tokenizer.json")
        template = self.folder / "chat_template.jinja"
        self.chat_template = _read_template(template) if template.is_file() else None

    @classmethod
    def of_bundle(cls, path: Path, bundle: Bundle) -> Tokenizer:
        """The tokenizer of the bundle at ``path``. Raises BundleError if it has none."""
        info = bundle.tokenizer
        if info is None:
            raise BundleError(
                f"{path}: holds no tokenizer, since its source had none; add tokenizer.json to the checkpoint and "
                "export again"
            )
        return cls(
            path / info.folder,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            pad_token=info.pad_token,
            bos_token_id=info.bos_token_id,
            pad_token_id=info.pad_token_id,
            eos_token_ids=info.eos_token_ids,
        )

    def __getstate__(self) -> dict[str, Any]:
        # The template is compiled again where it is needed.
        return {name: value for name, value in self.__dict__.items() if name != "_template"}

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. Logits may be wider: models pad their vocabulary."""
        return self._tokenizer.get_vocab_size()

    def ids_without_token(self, width: int) -> np.ndarray:
        """The ids below ``width`` that stand for nothing: padding of a model's vocabulary, gaps in a tokenizer's."""
        used = np.fromiter(self._tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        return np.setdiff1d(np.arange(width, dtype=np.int64), used)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` puts BOS or EOS around it where the model was trained with them. Special tokens
        that are spelled out in `text` become their ids either way. Raises InputError where `text` is not a
        string that UTF-8 can hold.
        """
        if not isinstance(text, str):
            raise InputError(f"the text to encode is {type(text).__name__}; expected str.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half of a surrogate pair ({text[error.start]!r}) at position {error.start}; "
                "expected valid Unicode. Decode the input as UTF-8 with errors='replace'."
            ) from error
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            # The library is not written in Python: what it calls a panic is no Exception.
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise BundleError(f"{self.folder / 'tokenizer.json'} cannot encode this text ({error})") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises InputError for an id that has no token.
        """
        return self._tokenizer.decode([self._known(index) for index in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder that takes ids one by one."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        enable_thinking: bool | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`, each with `role` and `content`.

        Encode it with `add_special_tokens=False`: the template has put them in already. A field that is None
        counts as absent. `enable_thinking` False asks templates that know it, as Qwen3's, for an answer without
        thoughts before it; None leaves it to the template. Raises InputError where the model has no template,
        where the messages are not plain JSON values, and where the template refuses them.
        """
        if self._template is None:
            raise InputError(
                f"this model has no chat template: {self.folder} holds no chat_template.jinja. Give it a "
                "plain prompt (without --chat), or put the template of the model there."
            )
        variables = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "enable_thinking": enable_thinking,
        }
        plain = _plain(messages)
        try:
            return self._template.render(
                messages=plain,
                # Templates tell "none given" from "not known"; transformers passes both as None.
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{name: value for name, value in variables.items() if value is not None},
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise InputError(
                f"the chat template of this model refused the messages: {error}. Check their roles and their order."
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template | None:
        if self.chat_template is None:
            return None
        try:
            return _environment().from_string(self.chat_template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(
                f"{self.folder / 'chat_template.jinja'} is not a Jinja template ({error}). Mend it, or give "
                "the model a plain prompt (without --chat)."
            ) from error

    def _known(self, index: int) -> int:
        index = operator.index(index)
        # The library takes 32 bits.
        if not 0 <= index < 2**32 or self._tokenizer.id_to_token(index) is None:
            raise InputError(
                f"token id {index} has no token; expected one of the {self.vocab_size} of this tokenizer. "
                "Where the model's vocabulary is padded, leave the padding out when sampling."
            )
        return index


class TextStream:
    """Turns ids that arrive one by one into text: all pieces together are what `decode` makes of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._owner = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special = {
            index
            for index, token in tokenizer._tokenizer.get_added_tokens_decoder().items()
            if token.special and skip_special_tokens
        }
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._held: list[int] = []
        self._text = ""
        self._ended = False

    def put(self, index: int) -> str:
        """Takes the next id and returns the text that it completes; "" while a character is incomplete.

        Raises InputError for an id that has no token or after `end`, EngineError where the decoder of this
        tokenizer rewrites text that was already returned.
        """
        if self._ended:
            raise InputError("this stream has ended; take a new one from Tokenizer.stream().")
        index = self._owner._known(index)
        self._ids.append(index)
        self._held.append(index)
        # Byte fallback decodes neighbouring byte tokens as one run, and one bad byte spoils all of it, so a
        # run is only certain when something else follows. Skipped special tokens do not interrupt a run.
        token = self._owner._tokenizer.id_to_token(index)
        assert token is not None  # _known has looked
        if _BYTE_TOKEN.fullmatch(token) or (len(self._held) > 1 and index in self._special):
            return ""
        try:
            piece = self._stream.step(self._owner._tokenizer, self._held) or ""
        except Exception as error:  # the library raises nothing more specific
            raise EngineError(
                f"token id {index} changes text that was already returned ({error}); this tokenizer cannot "
                "stream. Decode all ids at once."
            ) from error
        self._held = []
        self._text += piece
        return piece

    def end(self) -> str:
        """Ends the stream and returns the text held back, with U+FFFD where a character stayed incomplete."""
        if self._ended:
            return ""
        self._ended = True
        text = self._owner.decode(self._ids, self._skip_special_tokens)
        if not text.startswith(self._text):
            raise EngineError(
                "the text that was returned piece by piece is not what the ids decode to; this tokenizer "
                "cannot stream. Decode all ids at once."
            )
        return text[len(self._text) :]


_MAX_TEMPLATE = 1 << 20


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_TEMPLATE + 1)
        if len(raw) > _MAX_TEMPLATE:
            raise BundleError(f"{path} is longer than {_MAX_TEMPLATE} bytes, which no chat template is")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read as text ({error}); export again") from error


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise BundleError(f"{path} is missing; a text pipeline needs it. Export the bundle again.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise BundleError(
            f"{path} is not a tokenizer that the tokenizers library can read ({error}). Export the bundle again."
        ) from error
    # Lengths are the pipeline's business; a file that pads or cuts by itself would do so unseen.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# --- Chat templates: the environment that Hugging Face's templates are written for --------------------------


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks words to train on; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    # Sandboxed, because a template is code that comes with a downloaded model.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    return datetime.now().strftime(format)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not listed or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(
            f"messages is {type(messages).__name__}, or has entries that are no mappings; expected a "
            'list such as [{"role": "user", "content": "Hello"}].'
        )
    # Templates are written for fields that are absent, and would print the word None.
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        # A round trip leaves only plain values, which have no methods that the sandbox does not know.
        return json.loads(json.dumps(present))
    except (TypeError, ValueError) as error:
        raise InputError(f"messages hold something that is not plain JSON ({error}); expected text.") from error
