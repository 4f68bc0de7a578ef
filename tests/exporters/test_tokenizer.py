"""Tokenizers from GGUF metadata and from Hugging Face directories,
against transformers and a reference in Python.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_bpe import GPT2_SPLIT, ReferenceBPE, bytes_to_unicode, split_smollm
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from intaglio.errors import CheckpointError, ConfigError
from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata: dict[str, object]) -> TokenizerFiles:
    return tokenizer_from_gguf(smollm2_metadata, "smollm2.gguf")


@pytest.fixture(scope="module")
def smollm2_transformers(smollm2_gguf: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


# --- The real SmolLM2 ---------------------------------------------------------------------------------------


def test_smollm2_fields(smollm2: TokenizerFiles, smollm2_metadata: dict[str, object]) -> None:
    assert smollm2.chat_template == smollm2_metadata["tokenizer.chat_template"]
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.pad_token, smollm2.pad_token_id) == ("<|im_end|>", 2)
    assert (smollm2.eos_token, smollm2.eos_token_ids) == ("<|im_end|>", (2,))
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.get_vocab_size() == 49152
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special and not token.normalized for token in added.values())


def test_smollm2_known_ids(smollm2: TokenizerFiles) -> None:
    ids = Tokenizer.from_str(smollm2.tokenizer_json).encode("Hello world, 2026!").ids
    assert ids == [19556, 905, 28, 216, 34, 32, 34, 38, 17]


def test_smollm2_against_reference(
    smollm2: TokenizerFiles, smollm2_metadata: dict[str, object], texts: list[str]
) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    reference = ReferenceBPE(smollm2_metadata, split_smollm)
    for text in texts:
        assert tokenizer.encode(text).ids == reference.encode(text), repr(text)


def test_smollm2_against_transformers(smollm2: TokenizerFiles, smollm2_transformers: Any, texts: list[str]) -> None:
    """transformers does not know the pre-tokenizer `smollm` (5.24 falls back to GPT-2's without a word), so
    it is given the published one here; the rest of its conversion is its own: vocabulary, merges, special
    tokens, template."""
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    backend = smollm2_transformers.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids == smollm2_transformers.encode(text), repr(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == smollm2_transformers.decode(
                ids, skip_special_tokens=skip
            )


# --- Each pre-tokenizer, on a small vocabulary trained here -------------------------------------------------


@pytest.fixture(scope="module")
def tiny(texts: list[str]) -> dict[str, Any]:
    """GGUF metadata with 300-odd merges, which reach across digits,
    letters and spaces where the split lets them.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    digits = [" ".join(str(number) for number in range(start, start + 40)) for start in range(0, 4000, 40)]
    plain = [text for text in texts if "<|" not in text]  # special tokens are not to be learnt as words
    trained.train_from_iterator(plain + digits, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    extra = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": vocab + extra,
        "tokenizer.ggml.token_type": np.array([NORMAL] * len(vocab) + [CONTROL] * len(extra), np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


def build(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(changed(metadata, **changes), "tiny.gguf").tokenizer_json)


def changed(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with `tokenizer.ggml.NAME` keys replaced, or removed where the value is None."""
    result = dict(metadata)
    for key, value in changes.items():
        result.pop(f"tokenizer.ggml.{key}", None)
        if value is not None:
            result[f"tokenizer.ggml.{key}"] = value
    return result


@pytest.mark.parametrize(("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
def test_against_transformers(tiny: dict[str, Any], texts: list[str], pre: str, name: str) -> None:
    import transformers

    oracle = getattr(transformers, name)(
        vocab={token: index for index, token in enumerate(tiny["tokenizer.ggml.tokens"])},
        merges=[tuple(merge.split(" ")) for merge in tiny["tokenizer.ggml.merges"]],
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer = build(tiny, pre=pre)
    for text in texts:
        assert tokenizer.encode(text).ids == oracle.encode(text), repr(text)


def test_llama_bpe_against_transformers(tiny: dict[str, Any], texts: list[str]) -> None:
    """Meta publishes Llama 3 as tiktoken ranks, which transformers converts to the published
    `tokenizer.json`; here it converts the ranks of the small vocabulary. The converter derives its own
    merges, and ours are set to those."""
    convert = importlib.import_module("transformers.convert_slow_tokenizer")  # transformers has a function of the name

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    words = tiny["tokenizer.ggml.tokens"][:-3]
    ranks = {bytes(letters[letter] for letter in token): index for index, token in enumerate(words)}

    class FromRanks(convert.TikTokenConverter):  # type: ignore[name-defined]
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    converter = FromRanks("unused", extra_special_tokens=dict.fromkeys(tiny["tokenizer.ggml.tokens"][-3:]))
    oracle = converter.converted()
    _, merges = converter.extract_vocab_merges_from_model("unused")
    tokenizer = build(tiny, pre="llama-bpe", merges=[" ".join(merge) for merge in merges])
    for text in texts:
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).ids == expected, repr(text)


def test_published_splits(texts: list[str]) -> None:
    """The words themselves, not only the ids that come of them."""
    convert = importlib.import_module("transformers.convert_slow_tokenizer")  # transformers has a function of the name
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = inspect.signature(convert.TikTokenConverter.__init__).parameters["pattern"].default
    import regex

    alphabet = bytes_to_unicode()
    splits: dict[str, Callable[[str], Iterator[str] | list[str]]] = {
        "qwen2": lambda text: regex.findall(PRETOKENIZE_REGEX, text),
        "llama-bpe": lambda text: regex.findall(llama3, text),
        "gpt-2": lambda text: regex.findall(GPT2_SPLIT, text),
        "smollm": split_smollm,
    }
    tokens = sorted(alphabet.values())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }
    for pre, split in splits.items():
        tokenizer = build(metadata, pre=pre)
        for text in texts:
            found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            expected = ["".join(alphabet[byte] for byte in word.encode("utf-8")) for word in split(text)]
            assert found == expected, (pre, text)


def test_pre_tokenizers_differ(tiny: dict[str, Any]) -> None:
    text = "in 2026,  12345 cafe\u0301 DON'T\n\nx"
    assert len({tuple(build(tiny, pre=pre).encode(text).ids) for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2")}) == 4


def test_only_qwen2_normalizes(tiny: dict[str, Any]) -> None:
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        tokenizer = build(tiny, pre=pre)
        assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_only_llama_bpe_ignores_merges(tiny: dict[str, Any]) -> None:
    tokens = [*tiny["tokenizer.ggml.tokens"], "Ġzqxjk"]
    types = [*tiny["tokenizer.ggml.token_type"], NORMAL]
    for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2"):
        ids = build(tiny, pre=pre, tokens=tokens, token_type=types).encode(" zqxjk").ids
        assert (ids == [len(tokens) - 1]) == (pre == "llama-bpe")


# --- Special tokens and affixes -----------------------------------------------------------------------------


def test_token_types(tiny: dict[str, Any]) -> None:
    tokens = [*tiny["tokenizer.ggml.tokens"], "<think>", "<unk>", "[PAD9]"]
    types = [*tiny["tokenizer.ggml.token_type"], USER_DEFINED, UNKNOWN, UNUSED]
    tokenizer = build(tiny, pre="qwen2", tokens=tokens, token_type=types)
    ids = tokenizer.encode("<think><unk>").ids
    assert ids == [len(tokens) - 3, len(tokens) - 2]
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think><unk>"
    # An unused entry is no token that text can name, but it counts.
    assert len(tokens) - 1 not in tokenizer.encode("[PAD9]").ids
    assert tokenizer.get_vocab_size() == len(tokens)


def test_added_tokens_are_matched_before_normalizing(tiny: dict[str, Any]) -> None:
    tokens = [*tiny["tokenizer.ggml.tokens"], "<cafe\u0301 x>"]
    types = [*tiny["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = build(tiny, pre="qwen2", tokens=tokens, token_type=types)
    assert tokenizer.encode("<cafe\u0301 x>").ids == [len(tokens) - 1]
    assert tokenizer.decode([len(tokens) - 1]) == "<cafe\u0301 x>"


def test_ids_that_end_generation(tiny: dict[str, Any]) -> None:
    last = len(tiny["tokenizer.ggml.tokens"]) - 1
    ids = {"eos_token_id": np.uint32(last), "eot_token_id": last - 2, "eom_token_id": last - 1}
    files = tokenizer_from_gguf(changed(tiny, pre="qwen2", **ids), "tiny.gguf")
    assert (files.eos_token, files.eos_token_ids) == ("<|im_end|>", (last, last - 2, last - 1))
    assert all(type(index) is int for index in files.eos_token_ids)
    assert (files.bos_token, files.bos_token_id, files.pad_token, files.pad_token_id) == (None,) * 4
    assert files.chat_template is None
    ids = {"eos_token_id": last, "eot_token_id": last}
    assert tokenizer_from_gguf(changed(tiny, pre="qwen2", **ids), "tiny.gguf").eos_token_ids == (last,)
    assert tokenizer_from_gguf(changed(tiny, pre="qwen2"), "tiny.gguf").eos_token_ids == ()


def test_a_token_that_ends_generation_is_special(tiny: dict[str, Any]) -> None:
    count = len(tiny["tokenizer.ggml.tokens"])
    types = [NORMAL] * count
    assert len(build(tiny, pre="qwen2", token_type=types).encode("<|im_end|>").ids) > 1
    tokenizer = build(tiny, pre="qwen2", token_type=types, eot_token_id=count - 1)
    assert tokenizer.encode("<|im_end|>").ids == [count - 1]
    assert tokenizer.decode([count - 1]) == ""


@pytest.mark.parametrize(("pre", "implied"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
@pytest.mark.parametrize("bos", [None, False, True])
@pytest.mark.parametrize("eos", [None, True])
def test_affixes(tiny: dict[str, Any], pre: str, implied: bool, bos: bool | None, eos: bool | None) -> None:
    last = len(tiny["tokenizer.ggml.tokens"]) - 1
    tokenizer = build(tiny, pre=pre, bos_token_id=last - 1, eos_token_id=last, add_bos_token=bos, add_eos_token=eos)
    plain = tokenizer.encode("abc", add_special_tokens=False).ids
    first = [last - 1] if (implied if bos is None else bos) else []
    end = [last] if eos else []
    assert tokenizer.encode("abc").ids == first + plain + end
    assert tokenizer.encode("abc", "abc").ids == (first + plain + end) * 2


def test_affix_token_with_template_syntax(tiny: dict[str, Any]) -> None:
    tokens = [*tiny["tokenizer.ggml.tokens"], "<a:1 $B>"]
    types = [*tiny["tokenizer.ggml.token_type"], CONTROL]
    tokenizer = build(
        tiny, pre="gpt-2", tokens=tokens, token_type=types, bos_token_id=len(tokens) - 1, add_bos_token=True
    )
    assert tokenizer.encode("").ids == [len(tokens) - 1]


# --- Metadata that cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ["ggml.model", "missing", "gpt2"]),
        ({"model": "t5"}, ["ggml.model", "'t5'", "gpt2, llama"]),
        ({"model": ["gpt2"]}, ["ggml.model", "['gpt2']"]),
        ({"pre": None}, ["ggml.pre", "missing", "gpt-2, llama-bpe, qwen2, smollm"]),
        ({"pre": "default"}, ["ggml.pre", "'default'", "gpt-2, llama-bpe, qwen2, smollm"]),
        ({"tokens": None}, ["ggml.tokens", "missing"]),
        ({"tokens": "abc"}, ["ggml.tokens", "'abc'", "array of strings"]),
        ({"tokens": ["a", 7]}, ["entry 1 of tokenizer.ggml.tokens", "7", "a string"]),
        ({"tokens": ["a", "b", "a"]}, ["ggml.tokens", "'a' twice", "0 and 2"]),
        ({"token_type": None}, ["ggml.token_type", "missing"]),
        ({"token_type": [1, 1]}, ["ggml.token_type", "2 entries", "expected 5"]),
        ({"token_type": [1, 1, 1, 9, 1]}, ["entry 3 of tokenizer.ggml.token_type", "9", "1 (normal) to 6"]),
        ({"token_type": [1, 1, 1, 0, 1]}, ["entry 3 of tokenizer.ggml.token_type", "0"]),
        ({"token_type": [1.0] * 5}, ["ggml.token_type", "5 integers"]),
        ({"merges": None}, ["ggml.merges", "missing"]),
        ({"merges": ["a b", "ab"]}, ["entry 1 of tokenizer.ggml.merges", "'ab'", "two tokens"]),
        ({"merges": ["a b c"]}, ["entry 0 of tokenizer.ggml.merges", "'a b c'", "two tokens"]),
        ({"merges": [" b"]}, ["entry 0 of tokenizer.ggml.merges", "' b'", "two tokens"]),
        ({"merges": ["a x"]}, ["entry 0 of tokenizer.ggml.merges", "'a x'", "'x' is not among the 5"]),
        ({"merges": ["b a"]}, ["entry 0 of tokenizer.ggml.merges", "'ba' is not among the 5"]),
        ({"merges": ["a b", "a b"]}, ["entry 1 of tokenizer.ggml.merges", "entry 0"]),
        ({"bos_token_id": 5}, ["ggml.bos_token_id", "5", "0 to 4"]),
        ({"eos_token_id": -1}, ["ggml.eos_token_id", "-1", "0 to 4"]),
        ({"padding_token_id": 4294967295}, ["ggml.padding_token_id", "4294967295", "0 to 4"]),
        ({"unknown_token_id": "<unk>"}, ["ggml.unknown_token_id", "'<unk>'", "0 to 4"]),
        ({"eot_token_id": True}, ["ggml.eot_token_id", "True", "0 to 4"]),
        ({"eom_token_id": 1.0}, ["ggml.eom_token_id", "1.0", "0 to 4"]),
        ({"add_bos_token": 1}, ["ggml.add_bos_token", "1", "true or false"]),
        ({"add_bos_token": True}, ["ggml.add_bos_token is true", "bos_token_id is missing"]),
        ({"add_eos_token": True}, ["ggml.add_eos_token is true", "eos_token_id is missing"]),
        ({"pre": "llama-bpe"}, ["ggml.pre implies", "bos_token_id is missing"]),
        ({"add_space_prefix": True}, ["ggml.add_space_prefix", "true"]),
        ({"tokens": ["a", "b", "ab", "c", ""], "token_type": [1, 1, 1, 1, 3]}, ["entry 4", "empty", "is 3"]),
    ],
)
def test_metadata_errors(changes: dict[str, Any], words: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "c", "d"],
        "tokenizer.ggml.token_type": [NORMAL] * 5,
        "tokenizer.ggml.merges": ["a b"],
    }
    tokenizer_from_gguf(metadata, "tiny.gguf")
    with pytest.raises(ConfigError) as error:
        tokenizer_from_gguf(changed(metadata, **changes), "tiny.gguf")
    for word in ["tiny.gguf", *words]:
        assert word in str(error.value)


def test_chat_template_must_be_text(tiny: dict[str, Any]) -> None:
    metadata = changed(tiny, pre="qwen2") | {"tokenizer.chat_template": 3}
    with pytest.raises(ConfigError, match=r"tokenizer.chat_template is 3; expected text"):
        tokenizer_from_gguf(metadata, "tiny.gguf")


# --- Hugging Face directories -------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tokenizer of four words that pads to 8 and cuts at 4, as some published files do."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "é": 3, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def read(folder: Path) -> TokenizerFiles:
    files = tokenizer_from_directory(folder)
    assert files is not None
    return files


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_directory(tmp_path) is None


def test_directory_with_nothing_else(directory: Path) -> None:
    files = read(directory)
    assert files == TokenizerFiles(
        (directory / "tokenizer.json").read_text("utf-8"), None, None, None, None, None, None, ()
    )


def test_directory_padding_is_switched_off(directory: Path) -> None:
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path))
    assert len(tokenizer.encode("a").ids) == 8
    stored = json.loads(path.read_text("utf-8"))
    files = read(directory)
    found = json.loads(files.tokenizer_json)
    assert list(found) == list(stored)
    assert found == stored | {"padding": None, "truncation": None}
    assert Tokenizer.from_str(files.tokenizer_json).encode("a é a a a a").ids == [0, 2, 3, 2, 2, 2, 2]


def test_directory_special_tokens(directory: Path) -> None:
    write(
        directory,
        "special_tokens_map.json",
        {"bos_token": {"content": "</s>"}, "pad_token": {"content": "a"}},
    )
    write(
        directory,
        "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}},
    )
    files = read(directory)
    assert (files.bos_token, files.bos_token_id) == ("<s>", 0)
    assert (files.eos_token, files.eos_token_ids) == ("</s>", (1,))
    assert (files.pad_token, files.pad_token_id) == ("a", 2)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (1,)),
        (None, 3, (1, 3)),
        (4, 3, (1, 4)),
        ([4, 1, 2], 3, (1, 4, 2)),
        ("null", [3, 4], (1, 3, 4)),
    ],
)
def test_directory_eos_ids(directory: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    write(directory, "tokenizer_config.json", {"eos_token": "</s>"})
    if generation is not None:
        write(
            directory,
            "generation_config.json",
            {"eos_token_id": None if generation == "null" else generation},
        )
    if config is not None:
        write(directory, "config.json", {"eos_token_id": config})
    assert read(directory).eos_token_ids == expected


def test_directory_chat_template(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "plain"})
    assert read(directory).chat_template == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    write(directory, "tokenizer_config.json", {"chat_template": named})
    assert read(directory).chat_template == "usual"
    (directory / "chat_template.jinja").write_bytes("from the file é\r\n".encode())
    assert read(directory).chat_template == "from the file é\r\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "tokenizer_config.json",
            {"eos_token": "<eos>"},
            ["tokenizer_config.json", "eos_token", "'<eos>'", "5"],
        ),
        (
            "special_tokens_map.json",
            {"pad_token": "<pad>"},
            ["special_tokens_map.json", "pad_token", "'<pad>'"],
        ),
        ("tokenizer_config.json", {"bos_token": 3}, ["tokenizer_config.json", "bos_token is 3", "a token"]),
        (
            "tokenizer_config.json",
            {"bos_token": {"id": 3}},
            ["tokenizer_config.json", "bos_token is {'id': 3}"],
        ),
        ("tokenizer_config.json", {"chat_template": 3}, ["chat_template is 3", "named templates"]),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "rag", "template": "x"}]},
            ["'rag'", "'default'", "chat_template.jinja"],
        ),
        (
            "tokenizer_config.json",
            {"bos_token": "<s>", "add_bos_token": False},
            ["add_bos_token is false", "adds"],
        ),
        (
            "tokenizer_config.json",
            {"eos_token": "</s>", "add_eos_token": True},
            ["add_eos_token is true", "not add"],
        ),
        (
            "generation_config.json",
            {"eos_token_id": 99},
            ["generation_config.json", "eos_token_id is 99", "among its 5"],
        ),
        ("config.json", {"eos_token_id": [1, -1]}, ["config.json", "eos_token_id is [1, -1]", "-1 is not"]),
        ("config.json", {"eos_token_id": "</s>"}, ["config.json", "eos_token_id is '</s>'"]),
    ],
)
def test_directory_errors(directory: Path, name: str, content: object, words: list[str]) -> None:
    write(directory, name, content)
    with pytest.raises(ConfigError) as error:
        read(directory)
    for word in words:
        assert word in str(error.value)


def test_directory_affixes_that_agree(directory: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    write(directory, "tokenizer_config.json", config)
    assert read(directory).bos_token_id == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b'{"a": 1, "a": 2}'])
def test_directory_damaged(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read(directory)


def test_directory_not_a_tokenizer(directory: Path) -> None:
    write(directory, "tokenizer.json", {"version": "1.0", "model": {"type": "Unheard"}})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        read(directory)


def test_directory_saved_by_transformers(
    smollm2: TokenizerFiles, smollm2_transformers: Any, texts: list[str], tmp_path: Path
) -> None:
    smollm2_transformers.save_pretrained(tmp_path)
    files = read(tmp_path)
    assert files.chat_template == smollm2.chat_template
    assert (files.bos_token, files.eos_token, files.pad_token) == (
        smollm2.bos_token,
        smollm2.eos_token,
        "<|im_end|>",
    )
    assert (files.bos_token_id, files.eos_token_ids, files.pad_token_id) == (1, (2,), 2)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    for text in texts[:40]:
        assert tokenizer.encode(text).ids == smollm2_transformers.encode(text)
