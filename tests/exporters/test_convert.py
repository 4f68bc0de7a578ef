"""Conversions: byte for byte there and back, rounded only where a type was asked for, refused by name otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import intaglio
from intaglio.errors import CancelledError, CheckpointError, ConfigError, InputError, WeightsError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.gguf_writer import GgufTensor, write_gguf
from intaglio.exporters.checkpoints.safetensors_writer import write_file
from intaglio.exporters.checkpoints.tensors import ArrayTensor, QuantizedLayout
from intaglio.exporters.convert import ConversionReport
from intaglio.exporters.tokenizer import tokenizer_from_directory, tokenizer_from_gguf
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes

WIDTH = 64


def weights(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The tiny checkpoint's, with a feed-forward width that blocks of 32 divide."""
    rng = np.random.default_rng(3)
    result = {}
    for name, array in tiny_checkpoint.tensors().items():
        shape = tuple(WIDTH if n == 48 else n for n in array.shape)
        result[name] = rng.normal(scale=0.3, size=shape).astype(dtype)
    return result


def folder(path: Path, dtype: Any = np.float32, **config: Any) -> Path:
    arrays = {name: ArrayTensor(name, a.shape, "x", a) for name, a in weights(dtype).items()}
    tiny_checkpoint.write(path, config={"intermediate_size": WIDTH, **config})
    write_file(path / "model.safetensors", arrays, {"format": "pt"})
    return path


def values(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in float32."""
    found = {}
    for name, tensor in open_checkpoint(path).tensors.items():
        rows = tensor.read()
        if isinstance(rows, GroupedQuantRows):
            assert tensor.layout is not None
            rows = dequantize(rows, tensor.layout.format)
        found[name] = rows.astype(np.float32)
    return found


def storages(report: ConversionReport) -> set[str]:
    return {tensor.storage for tensor in report.tensors}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["F32", "F16", "BF16"])
def test_dense_weights_there_and_back(tmp_path: Path, dtype: Any) -> None:
    source = folder(tmp_path / "a", dtype)
    report = intaglio.convert(source, tmp_path / "b.gguf")
    assert (report.source_format, report.target_format, report.architecture) == ("safetensors", "gguf", "llama")
    assert report.rounded == ()
    names = {tensor.source: tensor.name for tensor in report.tensors}
    assert names["model.layers.1.self_attn.q_proj.weight"] == "blk.1.attn_q.weight"
    assert names["model.embed_tokens.weight"] == "token_embd.weight"
    back = intaglio.convert(tmp_path / "b.gguf", tmp_path / "c")
    assert back.rounded == ()
    assert back.notes == ()
    expected, found = weights(dtype), open_checkpoint(tmp_path / "c").tensors
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        tensor = found[name]
        assert tensor.storage == ("F32" if array.ndim == 1 else open_checkpoint(source).tensors[name].storage)
        np.testing.assert_array_equal(np.asarray(tensor.read()).astype(np.float32), array.astype(np.float32))
    intaglio.convert(tmp_path / "c", tmp_path / "d.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes()
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    for key, value in tiny_checkpoint.CONFIG.items():
        if key not in ("intermediate_size", "bos_token_id"):
            assert config[key] == value, key
    assert (
        config["torch_dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[found[name].storage] or True
    )


def test_the_rows_of_q_and_k_change_their_order(tmp_path: Path) -> None:
    intaglio.convert(folder(tmp_path / "a"), tmp_path / "b.gguf")
    stored, expected = values(tmp_path / "b.gguf"), weights()
    q = expected["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
    np.testing.assert_array_equal(stored["blk.0.attn_q.weight"], q)
    np.testing.assert_array_equal(stored["blk.0.attn_v.weight"], expected["model.layers.0.self_attn.v_proj.weight"])


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_type_that_is_asked_for_rounds_and_says_so(tmp_path: Path, storage: str) -> None:
    report = intaglio.convert(folder(tmp_path / "a"), tmp_path / "b.gguf", storage=storage)
    assert storages(report) == {storage, "F32"}
    assert {t.storage for t in report.rounded} == {storage}
    assert len(report.rounded) == 15
    found, expected = values(tmp_path / "b.gguf"), weights()
    assert 0 < np.abs(found["token_embd.weight"] - expected["model.embed_tokens.weight"]).max() < 0.2


def test_types_in_folders(tmp_path: Path) -> None:
    source = folder(tmp_path / "a")
    report = intaglio.convert(source, tmp_path / "b", storage="BF16")
    assert (storages(report), len(report.rounded)) == ({"BF16"}, 20)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    report = intaglio.convert(tmp_path / "b", tmp_path / "c", storage="F32")
    assert (storages(report), report.rounded) == ({"F32"}, ())
    for name, array in weights().items():
        np.testing.assert_array_equal(values(tmp_path / "c")[name], array.astype(ml_dtypes.bfloat16).astype(np.float32))
    intaglio.convert(source, tmp_path / "q.gguf", storage="Q4_1")
    report = intaglio.convert(tmp_path / "q.gguf", tmp_path / "d", storage="F16")
    assert storages(report) == {"F16"}
    assert "quantization" not in json.loads((tmp_path / "d" / "config.json").read_text())
    report = intaglio.convert(tmp_path / "q.gguf", tmp_path / "e.gguf", storage="F32")
    assert storages(report) == {"F32"}
    quantized, unpacked = values(tmp_path / "q.gguf"), values(tmp_path / "e.gguf")
    for name, array in quantized.items():
        np.testing.assert_array_equal(unpacked[name], array)


def test_within_a_format_everything_is_copied(tmp_path: Path) -> None:
    source = folder(tmp_path / "a")
    (source / "notes.bin").write_bytes(b"x")
    report = intaglio.convert(source, tmp_path / "b", shard_bytes=20_000)
    assert report.notes == ("not copied: notes.bin",)
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (source / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    configs = [json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "b")]
    assert configs[0] == configs[1]
    intaglio.convert(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    intaglio.convert(source, tmp_path / "d.gguf", storage="Q4_0")
    intaglio.convert(tmp_path / "d.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "d.gguf").read_bytes() == (tmp_path / "e.gguf").read_bytes()


def test_a_dry_run_writes_nothing_and_says_the_same(tmp_path: Path) -> None:
    source = folder(tmp_path / "a")
    for target in ("b.gguf", "b"):
        dry = intaglio.convert(source, tmp_path / target, storage="F16", dry_run=True)
        assert os.listdir(tmp_path) == ["a"] or sorted(os.listdir(tmp_path)) == ["a", "b.gguf"]
        assert not (tmp_path / target).exists()
        assert intaglio.convert(source, tmp_path / target, storage="F16") == dry


# --- quantized ------------------------------------------------------------------------------------------------


def ternary_gguf(path: Path, storage: str = "TQ2_0_g128", scale: float = 0.5) -> Path:
    """A llama file whose matrices are ternary in groups of 128 or 256."""
    rng = np.random.default_rng(0)
    config = tiny_checkpoint.CONFIG
    width = 256
    group = 256 if storage == "TQ2_0" else 128
    layout = QuantizedLayout(GroupedQuantFormat(2, group, 1), np.dtype(np.float16), False)

    def matrix(rows: int) -> ArrayTensor:
        codes = pack_codes(rng.integers(0, 3, (rows, width), np.uint8), 2)
        scales = np.full((rows, width // group), scale, np.float16)
        scales[-1, -1] *= 2
        return ArrayTensor("m", (rows, width), "t", GroupedQuantRows(codes, scales, np.zeros((), np.float16)), layout)

    vector = ArrayTensor("v", (width,), "F32", np.ones(width, np.float32))
    tensors = [GgufTensor("token_embd.weight", matrix(260), storage), GgufTensor("output_norm.weight", vector)]
    rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
    tensors += [GgufTensor(f"blk.0.{key}.weight", matrix(n), storage) for key, n in {**rows, "ffn_down": 256}.items()]
    tensors += [GgufTensor(f"blk.0.{key}.weight", vector) for key in ("attn_norm", "ffn_norm")]
    metadata = {
        "general.architecture": "llama", "general.name": "x", "llama.vocab_size": 260, "llama.embedding_length": width,
        "llama.feed_forward_length": 256, "llama.block_count": 1, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": config["rope_theta"], "llama.context_length": 64,
    }  # fmt: skip
    write_gguf(path, metadata, tensors)
    return path


@pytest.mark.parametrize("storage", ["TQ2_0_g128", "TQ2_0", "TQ1_0"])
def test_ternary_gguf_to_mlx_and_back(tmp_path: Path, storage: str) -> None:
    import mlx.core as mx

    source = ternary_gguf(tmp_path / "a.gguf", storage if storage != "TQ1_0" else "TQ2_0")
    if storage == "TQ1_0":
        intaglio.convert(source, tmp_path / "a1.gguf", storage="TQ1_0")
        source = tmp_path / "a1.gguf"
    report = intaglio.convert(source, tmp_path / "b")
    assert report.rounded == ()
    assert storages(report) == {"MLX2", "F32"}
    assert "no tokenizer" in report.notes
    assert "metadata without a place in a folder, not carried over: general.name" in " ".join(report.notes)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 128, "bits": 2, "mode": "affine"}
    arrays = mx.load(str(tmp_path / "b" / "model.safetensors"))
    module = "model.layers.0.mlp.down_proj"
    theirs = mx.dequantize(
        arrays[f"{module}.weight"], arrays[f"{module}.scales"], arrays[f"{module}.biases"], group_size=128, bits=2
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(theirs.astype(mx.float32)), values(source)["blk.0.ffn_down.weight"])
    back = intaglio.convert(tmp_path / "b", tmp_path / "c.gguf")
    assert storages(back) == {"TQ2_0_g128", "F32"}
    before, after = values(source), values(tmp_path / "c.gguf")
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, name)


def test_a_bias_that_the_scales_type_does_not_hold_is_refused(tmp_path: Path) -> None:
    tensors = {**open_checkpoint(ternary_gguf(tmp_path / "a.gguf")).tensors}
    metadata = open_checkpoint(tmp_path / "a.gguf").metadata
    rng = np.random.default_rng(1)
    scales = np.ones((256, 8), np.float16)
    scales[7, 2] = 600  # times 128 is above float16's largest
    rows = GroupedQuantRows(rng.integers(0, 256, (256, 256), np.uint8), scales, np.zeros((), np.float16))
    layout = QuantizedLayout(GroupedQuantFormat(8, 32, 128), np.dtype(np.float16), False)
    wide = ArrayTensor("x", (256, 256), "q", rows, layout)
    planned = [GgufTensor(name, tensor) for name, tensor in tensors.items() if name != "blk.0.ffn_down.weight"]
    write_gguf(tmp_path / "b.gguf", metadata, [*planned, GgufTensor("blk.0.ffn_down.weight", wide, "Q8_0")])
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=r"mlp.down_proj.weight: row 7, group 2 of Q8_0 has the scale 600.0"):
            intaglio.convert(tmp_path / "b.gguf", tmp_path / "c", dry_run=dry_run)
        assert sorted(os.listdir(tmp_path)) == ["a.gguf", "b.gguf"]
    report = intaglio.convert(tmp_path / "b.gguf", tmp_path / "c", storage="F32")
    assert {t.source_storage for t in report.tensors if t.storage == "F32"} == {"F32", "TQ2_0_g128", "Q8_0"}
    assert report.rounded == ()  # no offsets, so float32 holds every product


def test_mlx_weights_that_no_gguf_type_holds_are_refused(tmp_path: Path) -> None:
    from mlx_files import quantize_folder

    source = quantize_folder(folder(tmp_path / "a"), tmp_path / "mlx", 6, 32)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=r"MLX6 fits no type of GGUF exactly.*\n.*Q8_0: row \d+, group \d+"):
            intaglio.convert(source, tmp_path / "b.gguf", dry_run=dry_run)
    assert sorted(os.listdir(tmp_path)) == ["a", "mlx"]
    for storage in ("F32", "F16"):
        report = intaglio.convert(source, tmp_path / f"{storage}.gguf", storage=storage)
        assert {t.storage for t in report.rounded} == {storage}
    again = intaglio.convert(source, tmp_path / "again")
    assert again.rounded == ()
    assert (source / "model.safetensors").stat().st_size > 0
    before, after = values(source), values(tmp_path / "again")
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    dense = intaglio.convert(source, tmp_path / "dense", storage="F32")
    assert storages(dense) == {"F32"}
    assert "quantization" not in (tmp_path / "dense" / "config.json").read_text()
    assert (tmp_path / "again" / "config.json").read_text().count("quantization") == 2


def test_modules_of_different_widths_keep_their_settings(tmp_path: Path) -> None:
    from mlx_files import quantize_folder

    overrides = {"model.layers.0.mlp.up_proj": {"bits": 2, "group_size": 32}, "model.embed_tokens": False}
    source = quantize_folder(folder(tmp_path / "a"), tmp_path / "mlx", 4, 32, overrides=overrides)
    intaglio.convert(source, tmp_path / "b.gguf")
    tensors = open_checkpoint(tmp_path / "b.gguf").tensors
    assert tensors["blk.0.ffn_up.weight"].storage == tensors["blk.1.ffn_up.weight"].storage == "Q4_1"
    assert tensors["token_embd.weight"].storage == "F32"
    np.testing.assert_array_equal(
        values(tmp_path / "b.gguf")["blk.0.ffn_up.weight"], values(source)["model.layers.0.mlp.up_proj.weight"]
    )


def test_modules_of_gguf_files_keep_their_types(tmp_path: Path) -> None:
    source = ternary_gguf(tmp_path / "a.gguf")
    checkpoint = open_checkpoint(source)
    rng = np.random.default_rng(2)
    extra = ArrayTensor("x", (256, 256), "F32", rng.normal(size=(256, 256)).astype(np.float32))
    tensors = [GgufTensor(name, tensor) for name, tensor in checkpoint.tensors.items() if name != "blk.0.ffn_up.weight"]
    write_gguf(tmp_path / "b.gguf", checkpoint.metadata, [*tensors, GgufTensor("blk.0.ffn_up.weight", extra, "Q5_1")])
    intaglio.convert(tmp_path / "b.gguf", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    own = {"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}}
    assert config["quantization"] == {"group_size": 128, "bits": 2, "mode": "affine", **own}
    np.testing.assert_array_equal(
        values(tmp_path / "c")["model.layers.0.mlp.up_proj.weight"], values(tmp_path / "b.gguf")["blk.0.ffn_up.weight"]
    )
    report = intaglio.convert(tmp_path / "c", tmp_path / "d.gguf")
    assert {t.name: t.storage for t in report.tensors}["blk.0.ffn_up.weight"] == "Q5_1"
    assert "TQ2_0_g128 is written with the type id 42" in " ".join(report.notes)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    arrays = weights()
    arrays["model.norm.weight"] = np.ones(32, np.int32)
    source = tiny_checkpoint.write(tmp_path / "a", config={"intermediate_size": WIDTH}, weights=arrays)
    for run in (intaglio.convert, intaglio.export):
        with pytest.raises(WeightsError, match=r"in a type that is not read:\n  model.norm.weight is I32"):
            run(source, tmp_path / "b.gguf")  # type: ignore[operator]


# --- tokenizers -----------------------------------------------------------------------------------------------


def bpe(pre: str, *, bos: bool = False) -> Tokenizer:
    """A byte-level tokenizer as the family of that name publishes it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab", "12"])}
    merges = [("a", "b"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}.get(pre)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits is None, trim_offsets=False)
    if digits:
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )  # fmt: skip
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    if bos:
        template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 258)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
@pytest.mark.parametrize("bos", [False, True])
def test_tokenizers_there_and_back(tmp_path: Path, pre: str, bos: bool, texts: list[str]) -> None:
    source = tmp_path / "a"
    arrays = {**weights(), "model.embed_tokens.weight": np.ones((270, 32), np.float32)}
    tiny_checkpoint.write(source, config={"intermediate_size": WIDTH, "vocab_size": 270, "eos_token_id": [259, 258]},
                          weights=arrays)  # fmt: skip
    tokenizer = bpe(pre, bos=bos)
    added = json.loads(tokenizer.to_str())
    added["added_tokens"][2]["normalized"] = False
    (source / "tokenizer.json").write_text(json.dumps(added))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(tokens))
    intaglio.convert(source, tmp_path / "b.gguf")
    metadata = open_checkpoint(tmp_path / "b.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.add_bos_token"] is bos
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (259, 258)
    assert metadata["tokenizer.ggml.tokens"][260:] == ["<tool>", *(f"[PAD{i}]" for i in range(261, 270))]
    assert metadata["tokenizer.ggml.token_type"].tolist()[256:] == [1, 1, 3, 3, 4, *[5] * 9]
    intaglio.convert(tmp_path / "b.gguf", tmp_path / "c")
    files = tokenizer_from_directory(tmp_path / "c")
    assert files is not None
    assert files.chat_template == "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<s>", "</s>", (259, 258))
    again = Tokenizer.from_str(files.tokenizer_json)
    for text in [*texts, "12 ab 123 <tool> <s>", "e\u0301"]:
        assert again.encode(text).ids == tokenizer.encode(text).ids, text
    intaglio.convert(tmp_path / "c", tmp_path / "d.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "d.gguf").read_bytes()
    assert tokenizer_from_gguf(metadata, "x").tokenizer_json == files.tokenizer_json


def _word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))


def _changed(**changes: Any) -> Tokenizer:
    tokenizer = bpe("gpt-2")
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    return tokenizer


def _from_json(change: Callable[[Any], Any]) -> Tokenizer:
    content = json.loads(bpe("gpt-2").to_str())
    change(content)
    return Tokenizer.from_str(json.dumps(content))


# Adds nothing to one text, and a token between two.
_PAIR = {
    "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}},
             {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [259], "tokens": ["</s>"]}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (_word_level, "its model is WordLevel, not byte-level BPE"),
        (lambda: _changed(decoder=decoders.Fuse()), "its model is BPE, not byte-level BPE"),
        (lambda: _changed(normalizer=normalizers.Lowercase()), r"gpt-2 \(differs in normalizer"),
        (lambda: _changed(pre_tokenizer=pre_tokenizers.Whitespace()), r"gpt-2 \(differs in pre_tokenizer\)"),
        (lambda: _changed(pre_tokenizer=pre_tokenizers.ByteLevel()), r"gpt-2 \(differs in pre_tokenizer"),
        (lambda: _changed(post_processor=processors.TemplateProcessing(
            single="<tool> $A", pair="$A $B", special_tokens=[("<tool>", 260)])), "GGUF can add only bos and eos"),
        (lambda: _from_json(lambda c: c["model"].update(ignore_merges=True)), r"gpt-2 \(differs in ignore_merges\)"),
        (lambda: _from_json(lambda c: c["added_tokens"][0].update(lstrip=True)), r"gpt-2 \(differs in added_tokens\)"),
        (lambda: _from_json(lambda c: c["model"].update(end_of_word_suffix="x")), "end_of_word_suffix is 'x', which"),
        (lambda: _from_json(lambda c: c.update(post_processor=_PAIR)), r"gpt-2 \(differs in post_processor\)"),
    ],
)  # fmt: skip
def test_tokenizers_that_gguf_cannot_describe_are_refused(tmp_path: Path, tokenizer: Any, message: str) -> None:
    source = folder(tmp_path / "a", vocab_size=261, eos_token_id=None, bos_token_id=None)
    arrays = {**weights(), "model.embed_tokens.weight": np.ones((261, 32), np.float32)}
    write_file(source / "model.safetensors", {n: ArrayTensor(n, a.shape, "x", a) for n, a in arrays.items()})
    tokenizer().save(str(source / "tokenizer.json"))
    with pytest.raises(ConfigError, match=rf"tokenizer.json: .*{message}.*--no-tokenizer"):
        intaglio.convert(source, tmp_path / "b.gguf")
    assert intaglio.convert(source, tmp_path / "b.gguf", tokenizer=False).notes[0] == "no tokenizer, as asked for"


# --- refusals -------------------------------------------------------------------------------------------------


def test_settings_that_gguf_cannot_say_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    for config, message in [
        ({"rope_scaling": dynamic}, "rope scaling 'dynamic' has no keys in GGUF files of llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32,
                           "attention_factor": 1.5}}, "rope_scaling is .* and would be read back as"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16},
         "sliding_window is 16, which readers of GGUF files of llama ignore"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has quantization_config that is not MLX's"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            intaglio.convert(folder(tmp_path / "a", **config), tmp_path / "b.gguf")
    assert os.listdir(tmp_path) == ["a"]


def test_mistral_becomes_llama(tmp_path: Path) -> None:
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    source = folder(tmp_path / "a", **config)
    text = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(text | {"sliding_window": None, "initializer_range": 0.1}))
    report = intaglio.convert(source, tmp_path / "b.gguf")
    assert report.notes == ("config.json keys without a place in GGUF, not carried over: initializer_range",)
    intaglio.convert(folder(tmp_path / "llama"), tmp_path / "c.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_tensors_that_would_be_lost_are_refused_or_listed(tmp_path: Path) -> None:
    arrays = weights()
    more = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    source = tiny_checkpoint.write(tmp_path / "a", config={"intermediate_size": WIDTH}, weights=more)
    report = intaglio.convert(source, tmp_path / "b.gguf")
    assert report.notes == ("tensors that the model does not need, not carried over: lm_head.weight",)
    tiny_checkpoint.write(source, config={"intermediate_size": WIDTH}, weights={**arrays, "adapter": np.ones(3)})
    with pytest.raises(WeightsError, match=r"unknown to the architecture \(a conversion would lose them\):\n  adapter"):
        intaglio.convert(source, tmp_path / "c.gguf")
    tiny_checkpoint.write(source, config={"intermediate_size": WIDTH}, weights={
        name: array.astype(np.float64) for name, array in arrays.items()})  # fmt: skip
    with pytest.raises(CheckpointError, match="is F64, which GGUF"):
        intaglio.convert(source, tmp_path / "c.gguf")
    intaglio.convert(source, tmp_path / "d", storage="F32")
    intaglio.convert(source, tmp_path / "e")
    assert {t.storage for t in open_checkpoint(tmp_path / "e").tensors.values()} == {"F64"}


def test_what_overflows_is_refused(tmp_path: Path) -> None:
    arrays = weights()
    arrays["model.embed_tokens.weight"][3, 5] = 1e6
    source = tiny_checkpoint.write(tmp_path / "a", config={"intermediate_size": WIDTH}, weights=arrays)
    for target in ("b.gguf", "b"):
        for dry_run in (True, False):
            with pytest.raises(CheckpointError, match=r"1000000\.0, which overflows F16"):
                intaglio.convert(source, tmp_path / target, storage="F16", dry_run=dry_run)
    assert os.listdir(tmp_path) == ["a"]


def test_targets_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    source = folder(tmp_path / "a")
    with pytest.raises(InputError, match="holds the checkpoint that is read"):
        intaglio.convert(source, source, overwrite=True)
    with pytest.raises(InputError, match="holds the checkpoint that is read"):
        intaglio.convert(source / "model.safetensors", tmp_path, overwrite=True)
    with pytest.raises(InputError, match=r"name NAME.gguf or a folder"):
        intaglio.convert(source, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="--type 'Q4_0': a folder can be written as F32, F16, BF16"):
        intaglio.convert(source, tmp_path / "b", storage="Q4_0")
    with pytest.raises(InputError, match="--type 'Q4_K': a GGUF file can be written as F32, F16, BF16, Q4_0"):
        intaglio.convert(source, tmp_path / "b.gguf", storage="Q4_K")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    (tmp_path / "dir.gguf").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "b.gguf").write_text("x")
    for target, overwrite, message in [
        ("other", False, "exists; --overwrite replaces it"), ("other", True, "is no model's folder"),
        ("dir.gguf", True, "is a folder"), ("file", True, "is a file"), ("b.gguf", False, "exists; --overwrite"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            intaglio.convert(source, tmp_path / target, overwrite=overwrite)
    intaglio.convert(source, tmp_path / "b.gguf", overwrite=True)
    for _ in range(2):
        intaglio.convert(tmp_path / "b.gguf", tmp_path / "c", overwrite=True)
    assert (tmp_path / "other" / "precious").read_text() == (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("target", ["b.gguf", "b"])
def test_a_stopped_conversion_leaves_nothing(tmp_path: Path, target: str) -> None:
    source = folder(tmp_path / "a")
    with pytest.raises(CancelledError):
        intaglio.convert(source, tmp_path / target, progress=lambda event: event.done < 1000)
    assert os.listdir(tmp_path) == ["a"]
