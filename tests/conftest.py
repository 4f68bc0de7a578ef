"""Fixtures that several folders share: the real checkpoint, its metadata, and text to encode."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetched import fetched

# Triton decides when it is imported, which torch may do at any time. Tests that compile run a process of their own.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Engines are cached in a folder of this run, so that no earlier run can stand in for a build."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTAGLIO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: 98 MB, fetched once."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """The published `tokenizer.json` and `tokenizer_config.json` of Qwen3."""
    fetched("qwen3-tokenizer-config")
    return fetched("qwen3-tokenizer").parent


@pytest.fixture(scope="session", params=["mistral-v1", "mistral-v3"])
def mistral_folder(request: pytest.FixtureRequest) -> Path:
    """A published SentencePiece BPE `tokenizer.model` with byte fallback, and nothing else."""
    return fetched(f"{request.param}-tokenizer").parent


@pytest.fixture(scope="session")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a tiny FLUX.2-klein, compiled, with its checkpoint beside it; for reading only."""
    from klein_bundle import write_klein
    from klein_pipeline import TEXT_LENGTH

    return write_klein(tmp_path_factory.mktemp("klein"), text_length=TEXT_LENGTH, stages=None)


def gguf_metadata(path: Path) -> dict[str, object]:
    """The key-value part of a GGUF file as plain Python values, read by the `gguf` package."""
    import gguf

    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if key[0].islower()}


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> dict[str, object]:
    return gguf_metadata(smollm2_gguf)


_WRITTEN = [
    "",
    " ",
    "Hello world, 2026!",
    "I'm sure they'LL say it's we've DON'T you'd 'sit 'Round ’tis",
    "The capital of France is Paris.\n\nThe capital of Japan is",
    "def f(x: int) -> str:\n    if x >= 10_000:\n\treturn f'{x:>08.3f}'  # ok?\n\n\n        pass\r\n",
    "<html lang=\"en\"><body>&nbsp;</body></html> {'a': [1, 22, 333, 4444, 55555]} a+=b**2; //!?",
    "  leading,   inner    and trailing   ",
    "a  2 b   33\t\t4\n5 \n 6\r\n7 \u00a08\u20289\u30000",
    "3.14159 1,234,567.89 2026-01-31 0x1F ½ ² ٣٤٥ १२३ Ⅷ 一二三 ①②③",
    "Grüße aus Köln, naïve façade, Ångström, Straße, İstanbul, ŁÓDŹ",
    "Cafe\u0301 A\u030angstro\u0308m \u1112\u1161\u11ab \ufb01 \u212b",  # not in NFC
    "Привет, как дела? Ελληνικά κείμενο. שלום עולם. مرحبا بالعالم، كيف الحال؟",
    "你好，世界！今天天气怎么样？日本語のテキストです。カタカナ。안녕하세요 세계",
    "नमस्ते दुनिया, สวัสดีชาวโลก, வணக்கம் உலகம், გამარჯობა, ሰላም",
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁳󠁣󠁴󠁿 ❤️‍🔥 text🙂text 𝕬𝖇𝖈 𒀀 \U0001f9d1\u200d\U0001f680",
    "control \x00 \x01 \x04 \x7f \x85 \ufeff \u200b \ufffd end",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<|im_start|><|im_end|>|im_end|> <|im_ end|> <|IM_END|>",
    "supercalifragilisticexpialidocious" * 3,
]

_POOLS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ'’",
    "0123456789٣४Ⅷ½²",
    " \t\n\r\u00a0\u3000",
    "   ",
    ".,;:!?()[]{}<>/\\|@#$%^&*-_=+~`\"'",
    "äöüßéèñçøåŁŻ\u0301\u0308",
    "АБВгдежз ΑΒΓαβγ אבגד ابتث",
    "的一是不了人我在有他这中大来上",
    "のにはをたがでてと한국어문장नमतेसวัสดี",
    "😀🎉🚀👍🏽\u200d❤\ufe0f🇫🇷",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Text in many scripts, code, digits, emoji, runs of whitespace, special tokens; partly random,
    always the same.
    """
    generator = random.Random(20260131)
    drawn = []
    for _ in range(300):
        parts = []
        for _ in range(generator.randint(1, 12)):
            pool = generator.choice(_POOLS)
            parts.append("".join(generator.choice(pool) for _ in range(generator.randint(1, 8))))
            if generator.random() < 0.05:
                parts.append(generator.choice(["<|im_end|>", "<|im_start|>", "<|endoftext|>"]))
        drawn.append("".join(parts))
    return _WRITTEN + drawn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-goldens", action="store_true", help="rewrite the graphs' golden texts")
