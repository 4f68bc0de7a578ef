"""Encoding, decoding, streaming and chat templates, against transformers."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from intaglio.errors import BundleError, EngineError, InputError
from intaglio.exporters.tokenizer import tokenizer_from_gguf
from intaglio.runtimes.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe <b>&amp;</b> 'quoted' \"twice\"\n\n  spaces  "},
    {"role": "assistant", "content": "你好 🙂"},
    {"role": "user", "content": ""},
]


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    files = tokenizer_from_gguf(smollm2_metadata, "smollm2.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "tokenizer.json").write_text(files.tokenizer_json, "utf-8")
    assert files.chat_template is not None
    (folder / "chat_template.jinja").write_bytes(files.chat_template.encode())
    return Tokenizer(
        folder,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        pad_token=files.pad_token,
        bos_token_id=files.bos_token_id,
        pad_token_id=files.pad_token_id,
        eos_token_ids=files.eos_token_ids,
    )


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, with BOS in front and padding stored in the file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(4)
    folder = tmp_path_factory.mktemp("byte-level")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, bos_token="<s>", eos_token="</s>", bos_token_id=256, eos_token_ids=(257,))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The shape of LLaMA's SentencePiece tokenizers: rare characters fall apart into byte tokens."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdeé",
        "▁a",
        "▁b",
        "你",
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    folder = tmp_path_factory.mktemp("byte-fallback")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def with_template(tokenizer: Tokenizer, folder: Path, template: str, **fields: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes((tokenizer.folder / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_bytes(template.encode())
    return Tokenizer(folder, **fields)


# --- Encoding and decoding ----------------------------------------------------------------------------------


def test_smollm2_known_ids(smollm2: Tokenizer) -> None:
    ids = [19556, 905, 28, 216, 34, 32, 34, 38, 17]
    assert smollm2.encode("Hello world, 2026!") == ids
    assert smollm2.decode(ids) == "Hello world, 2026!"
    assert smollm2.vocab_size == 49152


def test_add_special_tokens(byte_level: Tokenizer) -> None:
    plain = byte_level.encode("abc", add_special_tokens=False)
    assert len(plain) == 3
    assert byte_level.encode("abc") == [256, *plain]
    assert byte_level.decode([256, *plain, 257]) == "abc"
    assert byte_level.decode([256, *plain, 257], skip_special_tokens=False) == "<s>abc</s>"


def test_stored_padding_and_truncation_have_no_effect(byte_level: Tokenizer) -> None:
    stored = json.loads((byte_level.folder / "tokenizer.json").read_text("utf-8"))
    assert stored["padding"]
    assert stored["truncation"]
    assert len(byte_level.encode("abcdefgh")) == 9


def test_round_trip(byte_level: Tokenizer, byte_fallback: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert byte_level.decode(byte_level.encode(text)) == text
        # Here a leading space is the mark of a word, and the special tokens are other ones.
        assert byte_fallback.decode(byte_fallback.encode(text)) == text


def test_fields(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert (byte_level.bos_token, byte_level.bos_token_id, byte_level.eos_token_ids) == ("<s>", 256, (257,))
    assert (byte_level.eos_token, byte_level.pad_token, byte_level.pad_token_id) == ("</s>", None, None)
    assert (byte_fallback.bos_token, byte_fallback.eos_token_ids, byte_fallback.chat_template) == (
        None,
        (),
        None,
    )


@pytest.mark.parametrize("index", [-1, 258, 10**6, 2**40])
def test_ids_without_a_token(byte_level: Tokenizer, index: int) -> None:
    with pytest.raises(InputError, match=f"token id {index} has no token; expected one of the 258"):
        byte_level.decode([1, index])
    with pytest.raises(InputError, match=f"token id {index} has no token"):
        byte_level.stream().put(index)


@pytest.mark.parametrize(("text", "words"), [(b"abc", "bytes"), ("ab\ud83d", "surrogate pair .* at position 2")])
def test_text_that_cannot_be_encoded(byte_level: Tokenizer, text: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        byte_level.encode(text)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(tmp_path)


# --- Streaming ----------------------------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.put(index) for index in ids), stream.end()]


@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_text(byte_level: Tokenizer, byte_fallback: Tokenizer, texts: list[str], skip: bool) -> None:
    for tokenizer in (byte_level, byte_fallback):
        for text in texts:
            ids = tokenizer.encode(text)
            assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip), repr(text)


@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_anything(byte_level: Tokenizer, byte_fallback: Tokenizer, skip: bool) -> None:
    """Ids in no order, so that characters break off, special tokens stand inside them,
    and bytes are not UTF-8.
    """
    generator = random.Random(7)
    for tokenizer in (byte_level, byte_fallback):
        some = tokenizer.encode("你好é👍 ab\ufffd\n") * 4
        pool = [
            *range(tokenizer.vocab_size),
            *some * 4,
            *range(3),
            *range(tokenizer.vocab_size - 8, tokenizer.vocab_size),
        ]
        for _ in range(1500):
            ids = generator.choices(pool, k=generator.randint(0, 25))
            assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip), ids


def test_smollm2_stream(smollm2: Tokenizer, texts: list[str]) -> None:
    generator = random.Random(11)
    drawn = [[generator.randrange(49152) for _ in range(40)] for _ in range(200)]
    for ids in [smollm2.encode(text) for text in texts] + drawn:
        assert "".join(pieces(smollm2, ids, True)) == smollm2.decode(ids), ids


def test_stream_waits_for_whole_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("aé👍z", add_special_tokens=False)
    assert pieces(byte_level, ids, True) == ["a", "", "é", "", "", "", "👍", "z", ""]
    assert pieces(byte_level, ids[:6], True) == ["a", "", "é", "", "", "", "\ufffd"]


def test_stream_waits_for_runs_of_byte_tokens(byte_fallback: Tokenizer) -> None:
    # One bad byte spoils the whole run: had "A" been returned at once, the text could not be what decode
    # makes.
    a, bad, letter = 3 + 0x41, 3 + 0xE4, byte_fallback.encode("a")[0]
    assert pieces(byte_fallback, [letter, a, letter], True) == ["a", "", "A a", ""]
    assert pieces(byte_fallback, [letter, a, bad, letter], True) == ["a", "", "", "\ufffd\ufffd a", ""]
    assert pieces(byte_fallback, [letter, a, 1, bad], True) == ["a", "", "", "", "\ufffd\ufffd"]


def test_stream_keeps_the_space_between_words(byte_fallback: Tokenizer) -> None:
    assert pieces(byte_fallback, byte_fallback.encode("a b a"), True) == ["a", " b", " a", ""]


def test_stream_ends_once(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    assert stream.end() == ""
    assert stream.end() == ""
    with pytest.raises(InputError, match="this stream has ended"):
        stream.put(1)


@pytest.mark.parametrize("replacement", ["don't ever", "x"])
def test_stream_of_a_decoder_that_rewrites(tmp_path: Path, replacement: str) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"we ": 0, "do ": 1, "not": 2}, unk_token="we "))
    words.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("do not", replacement)])
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([0, 1, 2]) == f"we {replacement}"
    stream = tokenizer.stream()
    with pytest.raises(EngineError, match="cannot stream"):  # noqa: PT012 - either call may notice
        for index in (0, 1, 2):
            stream.put(index)
        stream.end()


# --- Chat templates -----------------------------------------------------------------------------------------


def transformers_prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    import transformers

    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer.folder / "tokenizer.json"),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    return oracle.apply_chat_template(
        messages,
        chat_template=tokenizer.chat_template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[1:]])
def test_smollm2_chat(smollm2: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    prompt = smollm2.apply_chat_template(messages, add_generation_prompt)
    assert prompt == transformers_prompt(smollm2, messages, add_generation_prompt)
    ids = smollm2.encode(prompt, add_special_tokens=False)
    assert ids.count(2) == prompt.count("<|im_end|>")


TEMPLATES = {
    "llama": (
        "{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] %}"
        "{% set messages = messages[1:] %}{% else %}{% set sys = false %}{% endif %}"
        "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and sys %}{{ '<<SYS>>' ~ sys ~ '<</SYS>>' }}{% endif %}"
        "{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # In the manner of Mistral's: alternating roles are demanded, tool calls and results are JSON.
    "mistral": (
        "{{- bos_token }}\n{%- set loop_messages = messages %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n{%- endif %}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if message.role in ['user', 'tool'] and loop.index0 % 2 or message.role == 'system' %}\n"
        "        {{- raise_exception('After the optional system message, roles must alternate') }}\n    {%- endif %}\n"
        "    {%- if message.role == 'user' %}\n"
        "        {{- '[INST] ' + (system + '\\n\\n' if system is defined and loop.last else '') }}\n"
        "        {{- message.content + '[/INST]' }}\n"
        "    {%- elif message.role == 'tool' %}\n"
        "        {{- '[TOOL_RESULTS] ' + {'content': message.content} | tojson + '[/TOOL_RESULTS]' }}\n"
        "    {%- elif message.tool_calls is defined and message.tool_calls | length > 0 %}\n"
        "        {{- '[TOOL_CALLS] [' }}\n        {%- for call in message.tool_calls %}\n"
        "            {{- call.function | tojson }}{{ ', ' if not loop.last else ']' + eos_token }}\n"
        "        {%- endfor %}\n"
        "    {%- else %}\n        {{- ' ' + message.content | trim + eos_token }}\n    {%- endif %}\n{%- endfor %}\n"
    ),
    "blocks on lines of their own": (
        "{%- set ns = namespace(n=0) %}\n{% for message in messages %}\n"
        "    {% if message.role == 'system' %}\nsystem: {{ message.content }}\n"
        "    {% continue %}\n    {% endif %}\n"
        "    {% set ns.n = ns.n + 1 %}\n{{ ns.n }} {{ message.role }}: {{ message.content }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}\n"
    ),
    "tojson": (
        "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}\n"
        "{{ '<&é>' | tojson(ensure_ascii=true) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"
    ),
    "absent values": (
        "{{ bos_token }}|{{ pad_token }}|{{ tools is defined }}|{{ tools is none }}|{{ documents is none }}|"
        "{{ nothing is defined }}|{% for m in messages %}{{ m.tool_calls is defined }}{{ m.content }}"
        "{% endfor %}"
    ),
    "generation": (
        "{% set x = 1 %}{% for m in messages %}{% generation %}\n{% set x = 2 %}{{ m.content }}"
        "{% endgeneration %}\n{{ x }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_against_transformers(
    byte_level: Tokenizer, tmp_path: Path, name: str, add_generation_prompt: bool
) -> None:
    tokenizer = with_template(byte_level, tmp_path, TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    found = tokenizer.apply_chat_template(CHAT, add_generation_prompt)
    assert found == transformers_prompt(tokenizer, CHAT, add_generation_prompt)
    assert found


CONVERSATIONS: list[list[dict[str, Any]]] = [
    CHAT[1:2],
    CHAT,
    [
        {"role": "user", "content": "Weather in Köln?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}},
                {"function": {"name": "time", "arguments": {"zone": None, "exact": True}}},
            ],
        },
        {"role": "tool", "content": '{"sky": "<clear>"}'},
        {"role": "assistant", "content": " Clear. "},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_conversations_against_transformers(
    byte_level: Tokenizer, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    tokenizer = with_template(byte_level, tmp_path, TEMPLATES["mistral"], bos_token="<s>", eos_token="</s>")
    found = tokenizer.apply_chat_template(messages)
    assert found == transformers_prompt(tokenizer, messages, True)
    assert found.startswith("<s>[INST] ")
    with pytest.raises(InputError, match="refused the messages: After the optional system message"):
        tokenizer.apply_chat_template([*messages[:1], *messages[:1], *messages])


def test_fields_that_are_none_count_as_absent(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = with_template(byte_level, tmp_path, TEMPLATES["absent values"], bos_token="<s>", eos_token="</s>")
    messages = [{"role": "assistant", "content": "x", "tool_calls": None}, {"role": "user", "content": None}]
    found = tokenizer.apply_chat_template(messages)
    assert found == "<s>||True|True|True|False|FalsexFalse"
    assert found == transformers_prompt(tokenizer, messages, True)


def test_strftime_now(byte_level: Tokenizer, tmp_path: Path) -> None:
    tokenizer = with_template(byte_level, tmp_path, "{{ strftime_now('%Y') }}")
    before = datetime.now().year
    assert int(tokenizer.apply_chat_template(CHAT)) in (before, datetime.now().year)


def test_no_template(byte_level: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"no chat template.*without --chat"):
        byte_level.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content + none }}", "refused the messages"),
        ("{{ messages[9].content.upper() }}", "refused the messages"),
        ("{{ 1 // 0 }}", "refused the messages"),
        ("{% for %}", "not a Jinja template"),
        # The sandbox
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
        ("{{ cycler.__init__.__globals__.os }}", "refused the messages"),
    ],
)
def test_templates_that_fail(byte_level: Tokenizer, tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        with_template(byte_level, tmp_path, template).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hello", "messages is str"),
        ({"role": "user", "content": "x"}, "messages is dict"),
        (None, "messages is NoneType"),
        (["Hello"], "messages is list, or has entries that are no mappings"),
        ([{"role": "user", "content": object()}], "not plain JSON"),
    ],
)
def test_messages_that_are_none(byte_level: Tokenizer, tmp_path: Path, messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        with_template(byte_level, tmp_path, "x").apply_chat_template(messages)
