"""Chats with a loss mask, documents with padding, and the settings of a recipe."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_data as data

from intaglio.errors import ConfigError, DataError
from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.settings import build_source, parse_settings
from intaglio.trainer.data.text import open_tokenizer

_CHAT = [
    {"role": "user", "content": "ink or paper"},
    {"role": "assistant", "content": "paper"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "press\n print"},
]


def _batch(build: Callable[..., Loader], root: Path, record: dict[str, Any], **examples: Any) -> dict[str, Any]:
    data.write_jsonl(root / "a.jsonl", [record])
    table = {"format": "jsonl", "files": ["a.jsonl"], "batch_size": 1, "examples": examples}
    return {name: tensor[0].tolist() for name, tensor in next(iter(build(root, table))).items()}


def test_only_answers_of_a_chat_are_learned(build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path) -> None:
    batch = _batch(build, tmp_path, {"messages": _CHAT}, kind="chat", length=80)
    pieces = [
        ("<user>ink or paper<eos><assistant>", False),
        ("paper<eos>", True),
        ("<user>and then<eos><assistant>", False),
        ("press\n print<eos>", True),
    ]
    ids = [(index, learned) for text, learned in pieces for index in tokenizer.encode(text)]
    count = len(ids)
    assert batch["input_ids"] == [index for index, _ in ids] + [tokenizer.pad_token_id] * (80 - count)
    expected = [index if learned else -100 for index, learned in ids[1:]]
    assert batch["labels"] == expected + [-100] * (80 - count + 1)
    assert sum(label != -100 for label in batch["labels"]) == sum(learned for _, learned in ids)


def test_prompt_and_completion(build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = {"question": "ink or", "answer": " paper"}
    examples = {"kind": "chat", "messages": "", "prompt": "question", "completion": "answer", "length": 20}
    batch = _batch(build, tmp_path, record, **examples)
    prompt, answer = tokenizer.encode("ink or"), [*tokenizer.encode(" paper"), *tokenizer.eos_token_ids[:1]]
    assert batch["input_ids"][: len(prompt + answer)] == prompt + answer
    assert [label for label in batch["labels"] if label != -100] == answer
    assert batch["labels"][: len(prompt) - 1] == [-100] * (len(prompt) - 1)
    with pytest.raises(DataError, match="line 1: no answer begins within 2 tokens; there is nothing to learn"):
        _batch(build, tmp_path, record, **{**examples, "length": 2})


def test_chats_are_packed_apart(build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path) -> None:
    data.write_jsonl(tmp_path / "a.jsonl", [{"messages": _CHAT[:2]}, {"messages": _CHAT[2:]}] * 9)
    examples = {"kind": "chat", "length": 64, "packing": True}
    table = {"format": "jsonl", "files": ["a.jsonl"], "batch_size": 1, "examples": examples, "shuffle": False}
    batch = {name: tensor[0].tolist() for name, tensor in next(iter(build(tmp_path, table))).items()}
    first = tokenizer.encode("<user>ink or paper<eos><assistant>paper<eos>")
    assert batch["input_ids"][: len(first)] == first
    assert batch["position_ids"][: len(first) + 1] == [*range(len(first)), 0]
    answer = tokenizer.encode("paper<eos>")
    assert [label for label in batch["labels"][: len(first)] if label != -100] == answer


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "text"}, "expected a list of messages"),
        ({"messages": _CHAT[:1]}, "no message of the role assistant"),
        ({"text": "a"}, "has no field 'messages'; it has 'text'"),
    ],
)
def test_chats_that_cannot_be_learned(
    record: dict[str, Any], message: str, build: Callable[..., Loader], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        _batch(build, tmp_path, record, kind="chat", length=20)


def test_a_template_that_rewrites_answers(tmp_path: Path) -> None:
    folder = data.write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>"
        "{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    data.write_jsonl(tmp_path / "a.jsonl", [{"messages": _CHAT}])
    table = {"format": "jsonl", "files": ["a.jsonl"], "batch_size": 1, "examples": {"kind": "chat", "length": 20}}
    source = build_source(parse_settings(table), seed=0, root=tmp_path, tokenizer=open_tokenizer(folder))
    with pytest.raises(DataError, match="the chat template changes what stands before message 2"):
        list(source)


def test_documents_may_have_a_row_each(build: Callable[..., Loader], tokenizer: Tokenizer, tmp_path: Path) -> None:
    examples = {"kind": "text", "length": 8, "packing": False}
    batch = _batch(build, tmp_path, {"text": "ink"}, **examples)
    ids = [*tokenizer.encode("ink"), *tokenizer.eos_token_ids[:1]]
    assert batch["input_ids"] == ids + [tokenizer.pad_token_id] * (8 - len(ids))
    assert batch["labels"] == ids[1:] + [-100] * (9 - len(ids))
    text = " ".join(data.texts(5))
    batch = _batch(build, tmp_path, {"text": text}, **examples)
    assert batch["input_ids"] == tokenizer.encode(text)[:8]
    assert batch["labels"] == tokenizer.encode(text)[1:9]


def test_a_tokenizer_goes_to_workers_whole(tokenizer: Tokenizer) -> None:
    tokenizer.apply_chat_template(_CHAT)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.apply_chat_template(_CHAT) == tokenizer.apply_chat_template(_CHAT)
    assert copy.encode("ink é🙂") == tokenizer.encode("ink é🙂")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batchsize": 4}, r"^\[data\]: data\.batchsize is unknown; did you mean batch_size\?$"),
        ({"zzz": 4}, r"data\.zzz is unknown; known are batch_size, shuffle, workers, .*, format$"),
        ({"format": "xml"}, r"^\[data\]: data\.format is 'xml'; expected one of 'jsonl', .*'tokens'$"),
        ({"batch_size": 0}, r"data\.batch_size is 0; expected a number of at least 1$"),
        ({"batch_size": "four"}, r"data\.batch_size is 'four'; expected a whole number$"),
        ({"files": []}, r"data\.files is \[\]; expected at least 1 of them$"),
        ({"examples": {"length": 4}}, r"data\.examples\.kind is missing; expected one of 'text', 'chat', "),
        ({"examples": 4}, r"data\.examples is 4; expected a table$"),
        (
            {"examples": {"kind": "text", "length": 4, "segment": 1}},
            r"examples\.segment is unknown; did you mean segments\?$",
        ),
        (
            {"examples": {"kind": "pictures", "size": "big"}},
            r"examples\.size is 'big'; expected a whole number or a list$",
        ),
        (
            {"examples": {"kind": "pictures", "size": 4, "augmentation": {"crops": 1}}},
            r"augmentation\.crops .*mean crop\?$",
        ),
        (
            {"examples": {"kind": "pictures", "size": 4, "caption": "text"}},
            r"data\.examples: caption_length is missing",
        ),
    ],
)
def test_settings_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    table = {"format": "jsonl", "files": ["a.jsonl"], "batch_size": 4, "examples": data.TEXT}
    with pytest.raises(ConfigError, match=message):
        parse_settings({**table, **change})


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    data.write_jsonl(tmp_path / "a.jsonl", [{"text": "ink"}])
    table = {"format": "jsonl", "files": ["a.jsonl"], "batch_size": 4, "examples": data.TEXT}
    with pytest.raises(ConfigError, match="the data has text and no tokenizer is given"):
        build_source(parse_settings(table), seed=0, root=tmp_path)


def test_a_folder_without_tokenizer_json_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; expected the folder"):
        open_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"none: there is no such folder"):
        open_tokenizer(tmp_path / "none")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"has vocab\.json and merges\.txt, and no tokenizer\.json.*save_pretrained"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"has tokenizer\.model and vocab\.json"):
        open_tokenizer(tmp_path)
