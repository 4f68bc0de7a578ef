"""SentencePiece BPE from `tokenizer.model` and from GGUF metadata, against the `sentencepiece` library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece_file import (
    BYTE,
    CONTROL,
    NORMAL,
    START,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    field,
    model_file,
    piece_field,
)
from tokenizers import Tokenizer

from intaglio.errors import CheckpointError, ConfigError
from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf

# "▁the" is formed of "▁t" and "he", "▁▁▁" of "▁▁" and "▁"; "abthe" never, for want of a step.
PIECES: list[Piece] = [
    *START,
    *[(text, -float(rank), NORMAL) for rank, text in enumerate(["ab", "he", "▁t", "▁the", "aa", "aab", "abthe"], 1)],
    *[("▁" * count, -1e9, NORMAL) for count in (2, 3, 4)],
    *[(letter, -1e6, NORMAL) for letter in "▁abthec你"],
]
IDS = {text: index for index, (text, _, _) in enumerate(PIECES)}


def read(folder: Path, content: bytes | None = None) -> TokenizerFiles:
    (folder / "tokenizer.model").write_bytes(model_file(PIECES) if content is None else content)
    files = tokenizer_from_directory(folder)
    assert files is not None
    return files


def plain(files: TokenizerFiles, text: str) -> list[str]:
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    return [tokenizer.id_to_token(index) for index in tokenizer.encode(text, add_special_tokens=False).ids]


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def metadata(pieces: list[Piece], **changes: Any) -> dict[str, Any]:
    """GGUF metadata of `pieces`, with `tokenizer.ggml.NAME` keys replaced, or removed where the value is None."""
    found = {
        "model": "llama",
        "tokens": [text for text, _, _ in pieces],
        "scores": np.array([score for _, score, _ in pieces], np.float32),
        "token_type": np.array([kind for _, _, kind in pieces], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    found |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


# --- Encoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("the", ["▁the"]),
        (" the", ["▁", "▁the"]),
        ("aab", ["▁", "aab"]),
        ("aaab", ["▁", "aa", "ab"]),
        ("abthe", ["▁", "ab", "t", "he"]),
        ("  a", ["▁▁▁", "a"]),
        ("a       b", ["▁", "a", "▁▁▁▁", "▁▁▁", "b"]),
        ("▁a", ["▁▁", "a"]),
        ("é你\n", ["▁", "<0xC3>", "<0xA9>", "你", "<0x0A>"]),
        ("<0x41>", ["▁", "<0x3C>", "<0x30>", "<0x78>", "<0x34>", "<0x31>", "<0x3E>"]),
        ("a<s>b", ["▁", "a", "<s>", "b"]),
        ("<s>the", ["<s>", "t", "he"]),
        ("<s> the", ["<s>", "▁the"]),
    ],
)
def test_known_tokens(tmp_path: Path, text: str, tokens: list[str]) -> None:
    assert plain(read(tmp_path), text) == tokens
    files = tokenizer_from_gguf(metadata(PIECES), "tiny.gguf")
    assert plain(files, text) == tokens


def drawn_pieces(generator: random.Random, letters: str) -> list[Piece]:
    """A vocabulary that no trainer would make: scores in no order, words that nothing leads to, tied runs."""
    words: list[str] = []
    pool = list(letters)
    for _ in range(generator.randint(1, 50)):
        word = generator.choice(pool) + generator.choice(pool)
        if len(word) <= 12:
            words.append(word)
            pool.append(word)
        words.append("".join(generator.choices(letters, k=generator.randint(2, 6))))
    words += ["▁" * count for count in range(2, generator.randint(2, 9)) if generator.random() < 0.8]
    words = sorted(set(words))
    generator.shuffle(words)
    tied = generator.random() < 0.5
    pieces = []
    for rank, word in enumerate(words):
        score = -1e9 if tied and set(word) == {"▁"} else -float(rank)
        user_defined = generator.random() < 0.03 and not word.startswith("▁")
        pieces.append((word, score, USER_DEFINED if user_defined else NORMAL))
    return [*START, *pieces, *((letter, -1e6, NORMAL) for letter in letters)]


def test_against_sentencepiece(tmp_path: Path) -> None:
    """400 vocabularies, 30 texts each. Text that begins with a user-defined piece is left out: SentencePiece
    puts the dummy prefix before it, chat models that have such pieces expect none."""
    import sentencepiece

    generator = random.Random(5)
    for _ in range(400):
        letters = generator.choice(["ab▁", "abc▁", "a▁", "aé你▁"])
        pieces = drawn_pieces(generator, letters)
        prefix = generator.random() < 0.7
        content = model_file(pieces, add_dummy_prefix=prefix)
        oracle = sentencepiece.SentencePieceProcessor(model_proto=content)
        tokenizer = Tokenizer.from_str(read(tmp_path, content).tokenizer_json)
        user_defined = tuple(text.replace("▁", " ") for text, _, kind in pieces if kind == USER_DEFINED)
        for _ in range(30):
            runs = [generator.choice(letters + "▁z ") * generator.choice([1, 1, 1, 2, 7]) for _ in range(12)]
            text = "".join(runs[: generator.randint(0, 12)]).replace("▁", " ")
            if prefix and text.startswith(user_defined):
                continue
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert ids == oracle.encode(text), (text, pieces[len(START) :])
            assert tokenizer.decode(ids) == oracle.decode(ids) == text


def test_without_byte_fallback(tmp_path: Path) -> None:
    import sentencepiece

    content = model_file([piece for piece in PIECES if piece[2] != BYTE], byte_fallback=False)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=content)
    files = read(tmp_path, content)
    for text in ("xyz a\n\nb é", "é", "a", "xx the xx"):
        ids = Tokenizer.from_str(files.tokenizer_json).encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text)
    assert plain(files, "axyzb") == ["▁", "a", "<unk>", "b"]


def test_unused_pieces_that_are_never_formed_are_kept(tmp_path: Path) -> None:
    files = read(tmp_path, model_file([*PIECES, ("hehehe", -9.0, UNUSED)]))
    assert Tokenizer.from_str(files.tokenizer_json).get_vocab_size() == len(PIECES) + 1
    assert plain(files, "hehehe") == ["▁", "he", "he", "he"]


def test_pieces_that_contradict(tmp_path: Path) -> None:
    cases: list[tuple[list[Piece], list[str]]] = [
        ([("b", 0.0, NORMAL)], ["'b' twice", str(len(PIECES))]),
        ([("", 0.0, NORMAL)], [f"piece {len(PIECES)} is empty"]),
        ([("x", float("nan"), NORMAL)], ["'x'", "score nan"]),
        ([("x", float("-inf"), NORMAL)], ["'x'", "score -inf"]),
        ([("x" * 10001, 0.0, NORMAL)], ["pieces of up to 10001 characters", "expected words"]),
        ([("<0xZZ>", 0.0, BYTE)], ["'<0xZZ>'", "'<0x00>' to '<0xFF>'"]),
        ([("<0xab>", 0.0, BYTE)], ["'<0xab>'"]),
        ([("▁x", 0.0, USER_DEFINED)], ["user-defined", "'▁x'", "dummy prefix"]),
        ([(" x", 0.0, USER_DEFINED)], ["user-defined", "' x'", "dummy prefix"]),
        ([("<unk2>", 0.0, UNKNOWN)], ["2 pieces are of the type unknown"]),
        ([("ba", -9.0, UNUSED)], ["'ba' is unused"]),
        ([("x", -9.0, UNUSED)], ["'x' is unused"]),
        ([("cc", -2.0, NORMAL)], ["'he'", "'cc'", "one score, -2"]),
        ([("xb", -9.0, NORMAL)], ["'xb'", "'x' is not a piece"]),
    ]
    for more, words in cases:
        for build in (
            lambda pieces: read(tmp_path, model_file(pieces)),
            lambda pieces: tokenizer_from_gguf(metadata(pieces), "tokenizer.model"),
        ):
            with pytest.raises(ConfigError) as error:
                build([*PIECES, *more])
            for word in ["tokenizer.model", *words]:
                assert word in str(error.value)
    with pytest.raises(ConfigError, match="255 pieces stand for bytes; expected 256"):
        read(tmp_path, model_file([piece for piece in PIECES if piece[0] != "<0x41>"]))
    with pytest.raises(ConfigError, match=r"256 pieces stand for bytes.*byte_fallback is false"):
        read(tmp_path, model_file(PIECES, byte_fallback=False))
    with pytest.raises(ConfigError, match="0 pieces are of the type unknown"):
        read(tmp_path, model_file(PIECES[1:]))


# --- The model file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": 1}, "type Unigram; only BPE"),
        ({"model_type": 3}, "type Word; only BPE"),
        ({"model_type": 9}, "type 9; only BPE"),
        ({"normalizer": field(1, b"nmt_nfkc") + field(2, b"\x01")}, r"rewrites characters \(nmt_nfkc\)"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true"),
        ({"normalizer": field(5, 0)}, "escape_whitespaces is false"),
        ({"trainer": field(24, 1)}, "treat_whitespace_as_suffix is true"),
    ],
)
def test_models_that_are_not_read(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer\.model: .*{words}"):
        read(tmp_path, model_file(PIECES, **changes))


def test_denormalizers_and_absent_specs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="denormalizer rewrites"):
        read(tmp_path, model_file(PIECES) + field(5, field(2, b"\x01")))
    # Without a trainer's word the type is Unigram.
    with pytest.raises(ConfigError, match="type Unigram"):
        read(tmp_path, b"".join(map(piece_field, PIECES)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds 0 pieces"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a SentencePiece model"),
        (b"\xff" * 100, "not a SentencePiece model"),
        (model_file(PIECES)[:-1], "cut off"),
        (model_file([]), "holds 0 pieces"),
        (field(1, b"") * ((1 << 19) + 1), "holds 524289 pieces; expected 1 to 524288"),
        (model_file(PIECES) + field(1, b"\xff"), f"piece {len(PIECES)} is damaged"),
        (model_file(PIECES) + field(1, field(1, b"\xc3")), f"piece {len(PIECES)} is damaged"),
        (model_file([*PIECES, ("x", 0.0, 7)]), f"piece {len(PIECES)} is of type 7"),
        (model_file([*PIECES, ("x", 0.0, 0)]), f"piece {len(PIECES)} is of type 0"),
        (model_file(PIECES, trainer=field(42, 10**6)), "eos_id is 1000000"),
        (b"\0" * ((8 << 20) + 1), "larger than 8 MiB"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{words}"):
        read(tmp_path, content)


def test_damage_of_any_kind(tmp_path: Path) -> None:
    """Cut off anywhere or with wrong bytes, a file is refused by name, or read where the damage says nothing."""
    content = model_file(PIECES)
    generator = random.Random(13)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(content[: generator.choice([len(content), generator.randrange(len(content))])])
        for _ in range(generator.randint(0, 3)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            read(tmp_path, bytes(damaged))
        except (CheckpointError, ConfigError) as error:
            outcomes.add((type(error), "tokenizer.model: " in str(error)))
        else:
            outcomes.add((None, True))
    assert outcomes == {(CheckpointError, True), (ConfigError, True), (None, True)}


# --- The directory around it --------------------------------------------------------------------------------


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    files = read(tmp_path)
    (tmp_path / "tokenizer.json").write_text(files.tokenizer_json, "utf-8")
    assert read(tmp_path, b"damaged").tokenizer_json == files.tokenizer_json


def test_special_tokens_of_the_model_file(tmp_path: Path) -> None:
    files = read(tmp_path)
    assert (files.bos_token, files.bos_token_id) == ("<s>", 1)
    assert (files.eos_token, files.eos_token_ids) == ("</s>", (2,))
    assert (files.pad_token, files.pad_token_id, files.chat_template) == (None, None, None)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    assert tokenizer.encode("the").ids == [1, IDS["▁the"]]
    assert {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special} == {0, 1, 2}
    files = read(tmp_path, model_file(PIECES, trainer=field(41, -1) + field(42, -1) + field(43, 2)))
    assert (files.bos_token, files.eos_token_ids, files.pad_token_id) == (None, (), 2)
    assert Tokenizer.from_str(files.tokenizer_json).encode("the").ids == [IDS["▁the"]]


def test_special_tokens_of_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"bos_token": None, "eos_token": "<s>", "chat_template": "x"})
    files = read(tmp_path)
    assert (files.bos_token, files.eos_token, files.eos_token_ids, files.chat_template) == (None, "<s>", (1,), "x")
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<eos>"})
    with pytest.raises(ConfigError, match=r"eos_token is '<eos>', which is not in tokenizer\.model"):
        read(tmp_path)


@pytest.mark.parametrize("bos", [None, False, True])
@pytest.mark.parametrize("eos", [None, False, True])
def test_affixes(tmp_path: Path, bos: bool | None, eos: bool | None) -> None:
    write(tmp_path, "tokenizer_config.json", {"add_bos_token": bos, "add_eos_token": eos})
    first, last = ([] if bos is False else [1]), ([2] if eos else [])
    expected = [*first, IDS["▁the"], *last]
    assert Tokenizer.from_str(read(tmp_path).tokenizer_json).encode("the").ids == expected
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    files = tokenizer_from_gguf(metadata(PIECES, **flags), "tiny.gguf")
    assert Tokenizer.from_str(files.tokenizer_json).encode("the").ids == expected


def test_dummy_prefix(tmp_path: Path) -> None:
    text = "the<s>the<s> the"
    assert plain(read(tmp_path), text) == ["▁the", "<s>", "t", "he", "<s>", "▁the"]
    write(tmp_path, "tokenizer_config.json", {"legacy": True})
    assert plain(read(tmp_path), text) == ["▁the", "<s>", "▁the", "<s>", "▁", "▁the"]
    write(tmp_path, "tokenizer_config.json", {"add_prefix_space": False})
    without = read(tmp_path)
    assert plain(without, text) == ["t", "he", "<s>", "t", "he", "<s>", "▁the"]
    assert without.tokenizer_json == read(tmp_path, model_file(PIECES, add_dummy_prefix=False)).tokenizer_json
    files = tokenizer_from_gguf(metadata(PIECES, add_space_prefix=False), "tiny.gguf")
    assert plain(files, text) == plain(without, text)


ADDED = {
    "0": {"content": "<unk>", "special": True},
    str(len(PIECES)): {"content": "<|im_start|>", "special": True, "rstrip": True},
    str(len(PIECES) + 1): {"content": "<think>", "special": False},
}


def test_added_tokens(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": ADDED, "eos_token": "<|im_start|>"})
    files = read(tmp_path)
    assert files.eos_token_ids == (len(PIECES),)
    assert plain(files, "a<|im_start|>  b<think>b") == ["▁", "a", "<|im_start|>", "b", "<think>", "b"]
    assert Tokenizer.from_str(files.tokenizer_json).decode([len(PIECES), len(PIECES) + 1]) == "<think>"


def test_added_tokens_of_old_directories(tmp_path: Path) -> None:
    write(tmp_path, "added_tokens.json", {"<think>": len(PIECES) + 1, "<|im_start|>": len(PIECES)})
    write(tmp_path, "special_tokens_map.json", {"additional_special_tokens": [{"content": "<|im_start|>"}]})
    files = read(tmp_path)
    assert plain(files, "a<|im_start|>b<think>b") == ["▁", "a", "<|im_start|>", "b", "<think>", "b"]
    assert Tokenizer.from_str(files.tokenizer_json).decode([len(PIECES), len(PIECES) + 1]) == "<think>"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": {str(len(PIECES) + 1): {"content": "x"}}}, f"without a gap from {len(PIECES)}"),
        ({"added_tokens_decoder": {"1": {"content": "x"}}}, "'x' has the id 1"),
        ({"added_tokens_decoder": {str(len(PIECES)): {"content": "<s>"}}}, "'<s>' is there twice"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"1": "x"}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"-1": {"content": "x"}}}, "'x' has the id -1"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is"),
        ({"legacy": "yes"}, "legacy is 'yes'"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"add_bos_token": True, "bos_token": None}, "add_bos_token is true, but no bos_token"),
    ],
)
def test_configuration_errors(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: .*{words}"):
        read(tmp_path)


@pytest.mark.parametrize("content", [{"x": "1"}, {"x": -1}, {"x": True}, {"": len(PIECES)}])
def test_added_tokens_that_make_no_sense(tmp_path: Path, content: object) -> None:
    write(tmp_path, "added_tokens.json", content)
    with pytest.raises(ConfigError, match=r"added_tokens\.json: holds .*expected an id for each token"):
        read(tmp_path)


# --- GGUF ---------------------------------------------------------------------------------------------------


def test_gguf_is_what_the_model_file_is(tmp_path: Path) -> None:
    pieces = [*PIECES, ("<|user|>", 0.0, USER_DEFINED), ("[INST]", 0.0, CONTROL)]
    files = tokenizer_from_gguf(metadata(pieces), "tiny.gguf")
    assert files == read(tmp_path, model_file(pieces))
    assert plain(files, "a<|user|>b[INST]") == ["▁", "a", "<|user|>", "b", "[INST]"]


def test_gguf_without_byte_tokens(tmp_path: Path) -> None:
    files = tokenizer_from_gguf(metadata([piece for piece in PIECES if piece[2] != BYTE]), "tiny.gguf")
    assert plain(files, "axyzb") == ["▁", "a", "<unk>", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "ggml.scores is missing"),
        ({"scores": [0.0]}, f"ggml.scores has 1 entries; expected {len(PIECES)}"),
        ({"scores": [0] * len(PIECES)}, r"ggml.scores is \[0, 0.*expected an array"),
        ({"scores": [0.0] * len(PIECES)}, "have one score, 0"),
        ({"bos_token_id": None}, r"ggml\.model implies that tokenizer\.ggml\.add_bos_token is true, but"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is there"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1"),
    ],
)
def test_gguf_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiny\.gguf: .*{words}"):
        tokenizer_from_gguf(metadata(PIECES, **changes), "tiny.gguf")
