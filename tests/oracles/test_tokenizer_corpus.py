"""Ids of published tokenizers on a corpus of 2,400 lines, against the libraries that they were made with.

Oracles: for SmolLM2 byte-level BPE in plain Python; for Qwen3 the `tokenizers` library on the published file;
for SentencePiece models the `sentencepiece` library, and `transformers` where the two agree.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from corpus import corpus
from reference_bpe import ReferenceBPE, split_smollm
from sentencepiece_file import field

from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf
from intaglio.runtimes.tokenizer import Tokenizer

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


@pytest.fixture(scope="module")
def lines() -> list[str]:
    found = corpus()
    assert len(found) >= 2000
    return found


def load(files: TokenizerFiles | None, folder: Path) -> Tokenizer:
    """The tokenizer as a bundle would hold it."""
    assert files is not None
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json.encode())
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(files.chat_template.encode())
    fields = asdict(files)
    del fields["tokenizer_json"], fields["chat_template"]
    return Tokenizer(folder, **fields)


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    stream = tokenizer.stream(skip_special_tokens)
    return "".join([*map(stream.put, ids), stream.end()])


def check(
    tokenizer: Tokenizer, lines: list[str], oracle: Callable[[str], list[int]], kept: Callable[[str], str]
) -> int:
    """Compares ids, the round trip and streaming on each line; `kept` is what the round trip makes of a line.
    Returns how many lines come back as they were."""
    same = 0
    for line in lines:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert ids == oracle(line), repr(line)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text == kept(line), repr(line)
        same += text == line
        for skip in (False, True):
            assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip), repr(line)
    return same


# --- SmolLM2 ------------------------------------------------------------------------------------------------


def test_smollm2(smollm2_metadata: dict[str, object], lines: list[str], tmp_path: Path) -> None:
    """Not lossless: 21 bytes have no token in this vocabulary and are left out, in the published one too."""
    tokenizer = load(tokenizer_from_gguf(smollm2_metadata, "smollm2.gguf"), tmp_path)
    reference = ReferenceBPE(smollm2_metadata, split_smollm)
    missing = {byte for byte, letter in reference.alphabet.items() if letter not in reference.vocab}

    def kept(line: str) -> str:
        return bytes(byte for byte in line.encode() if byte not in missing).decode("utf-8", "replace")

    same = check(tokenizer, lines, reference.encode, kept)
    assert same == sum(missing.isdisjoint(line.encode()) for line in lines)


# --- Qwen3 --------------------------------------------------------------------------------------------------


def nfc(line: str) -> str:
    return unicodedata.normalize("NFC", line)


@pytest.fixture(scope="module")
def published(qwen3_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def qwen3(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tokenizer_from_directory(qwen3_folder), tmp_path_factory.mktemp("qwen3"))


def test_qwen3_directory(qwen3: Tokenizer, published: tokenizers.Tokenizer, lines: list[str]) -> None:
    """Not lossless: text comes back in NFC."""
    tokenizer = qwen3
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|im_end|>", (151645,))
    assert tokenizer.encode("Hello world, 2026!") == [9707, 1879, 11, 220, 17, 15, 17, 21, 0]
    same = check(tokenizer, lines, lambda line: published.encode(line, add_special_tokens=False).ids, nfc)
    assert same == sum(line == nfc(line) for line in lines)


def test_qwen3_gguf(qwen3_folder: Path, published: tokenizers.Tokenizer, lines: list[str], tmp_path: Path) -> None:
    """The published file said in GGUF's keys, as its converter does it."""
    model = json.loads((qwen3_folder / "tokenizer.json").read_text("utf-8"))["model"]
    added = published.get_added_tokens_decoder()
    vocab = published.get_vocab()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [
            NORMAL if index not in added else CONTROL if added[index].special else USER_DEFINED
            for index in range(len(vocab))
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = load(tokenizer_from_gguf(metadata, "qwen3.gguf"), tmp_path)
    check(tokenizer, lines, lambda line: published.encode(line, add_special_tokens=False).ids, nfc)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Größe <b>&amp;</b> 'x' \"y\"\n\n  spaces  "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
        {"role": "user", "content": "你好 🙂"},
    ],
    [
        {"role": "user", "content": "Weather in Köln?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}],
        },
        {"role": "tool", "content": '{"sky": "<clear>"}'},
    ],
]


def test_qwen3_chat(qwen3: Tokenizer) -> None:
    import transformers

    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(qwen3.folder / "tokenizer.json"), eos_token=qwen3.eos_token
    )
    for messages in CONVERSATIONS:
        for add_generation_prompt in (True, False):
            expected = oracle.apply_chat_template(
                messages,
                chat_template=qwen3.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
            assert qwen3.apply_chat_template(messages, add_generation_prompt) == expected


# --- SentencePiece: Mistral's first and third vocabulary ----------------------------------------------------


class ReferencePieces:
    """The `sentencepiece` library, and around it what it leaves to its callers: special tokens in text.

    The dummy prefix stands before the text only, and not before a special or user-defined token there.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        content = path.read_bytes()
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        # Of a field that is there twice the last counts: normalizer_spec.add_dummy_prefix = false.
        self.inside = sentencepiece.SentencePieceProcessor(model_proto=content + field(3, field(3, 0)))
        ids = range(self.processor.vocab_size())
        pieces = {self.processor.id_to_piece(index): index for index in ids}
        self.special = {
            piece: index
            for piece, index in pieces.items()
            if self.processor.is_control(index) or self.processor.is_unknown(index)
        }
        self.user_defined = tuple(piece for piece in pieces if piece.startswith("[REFERENCE_DOC_"))
        longest_first = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, line: str) -> list[int]:
        ids: list[int] = []
        for position, part in enumerate(self.pattern.split(line)):
            if position % 2:
                ids.append(self.special[part])
            else:
                prefixed = position == 0 and not part.startswith(self.user_defined)
                ids += (self.processor if prefixed else self.inside).encode(part)
        return ids


@pytest.fixture(scope="module")
def pieces(mistral_folder: Path) -> ReferencePieces:
    return ReferencePieces(mistral_folder / "tokenizer.model")


@pytest.fixture(scope="module")
def mistral(mistral_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tokenizer_from_directory(mistral_folder), tmp_path_factory.mktemp("mistral"))


def test_mistral_fields(mistral: Tokenizer) -> None:
    assert (mistral.bos_token, mistral.eos_token, mistral.eos_token_ids) == ("<s>", "</s>", (2,))
    assert mistral.encode("Hello world")[0] == 1
    assert mistral.encode("Hello world", add_special_tokens=False) in ([22557, 1526], [23325, 2294])


def test_mistral(mistral: Tokenizer, pieces: ReferencePieces, lines: list[str]) -> None:
    """Not lossless: `▁` in text is a space."""
    same = check(mistral, lines, pieces.encode, lambda line: line.replace("▁", " "))
    assert same == sum("▁" not in line for line in lines)
    plain = [line for line in lines if not pieces.pattern.search(line)]
    assert len(plain) > 2000
    for line in plain:
        ids = mistral.encode(line, add_special_tokens=False)
        if not line.startswith(pieces.user_defined):
            assert ids == pieces.processor.encode(line), repr(line)
        assert mistral.decode(ids) == pieces.processor.decode(ids), repr(line)


def test_mistral_against_transformers(mistral_folder: Path, mistral: Tokenizer, lines: list[str]) -> None:
    """transformers puts no dummy prefix before text that begins with a space, and joins the spaces of a run,
    whose pieces have one score, in another order than `sentencepiece`. Everywhere else the two agree."""
    import transformers

    oracle = transformers.LlamaTokenizer.from_pretrained(mistral_folder)
    compared = 0
    for line in lines:
        spaced = line.replace("▁", " ")
        if spaced.startswith(" ") or "  " in spaced:
            continue
        compared += 1
        ids = mistral.encode(line, add_special_tokens=False)
        assert ids == oracle.encode(line, add_special_tokens=False), repr(line)
    assert compared > 1500


def test_mistral_gguf(mistral_folder: Path, pieces: ReferencePieces) -> None:
    """The model file said in GGUF's keys comes to the same `tokenizer.json`."""
    processor = pieces.processor
    ids = range(processor.vocab_size())
    kinds = {6: processor.is_byte, 5: processor.is_unused, 3: processor.is_control, 2: processor.is_unknown}
    types = [next((kind for kind, test in kinds.items() if test(index)), NORMAL) for index in ids]
    tokens = [processor.id_to_piece(index) for index in ids]
    types = [USER_DEFINED if token in pieces.user_defined else kind for token, kind in zip(tokens, types, strict=True)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [processor.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert tokenizer_from_gguf(metadata, "mistral.gguf") == tokenizer_from_directory(mistral_folder)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_mistral_streams_anything(mistral: Tokenizer, skip_special_tokens: bool) -> None:
    """Ids in no order: characters break off, special tokens stand inside them, spaces begin and end the text."""
    generator = random.Random(17)
    some = mistral.encode("  a 你🙂é\n <s> [INST] x▁▁ ", add_special_tokens=False)
    pool = [*range(1100), *range(mistral.vocab_size - 400, mistral.vocab_size), *range(3, 30), *some * 30]
    for _ in range(1500):
        ids = generator.choices(pool, k=generator.randint(0, 25))
        assert streamed(mistral, ids, skip_special_tokens) == mistral.decode(ids, skip_special_tokens), ids
