"""SmolLM2-135M as published, against transformers and the gguf package reading the same file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from measure import intaglio as command_line
from smollm2_bundle import SmolLM2

import intaglio
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, unpack_codes
from intaglio.runtimes.parity import compare
from intaglio.runtimes.probe import probe
from intaglio.runtimes.text_generation import TextGenerationPipeline

PROMPTS = {
    "English": "The capital of France is",
    "French": "Il était une fois, dans un petit village au bord de la mer,",
    "German": "Die Geschichte der Stadt Berlin beginnt im",
    "code": "def fibonacci(n: int) -> int:\n    ",
    "numbers": "1, 1, 2, 3, 5, 8, 13,",
}


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def pipeline(smollm2: SmolLM2) -> TextGenerationPipeline:
    return intaglio.load(smollm2.path)


@pytest.mark.parametrize("language", PROMPTS)
def test_logits_and_64_greedy_tokens(
    language: str, pipeline: TextGenerationPipeline, oracle: transformers.PreTrainedModel
) -> None:
    """Measured: relative L2 about 6e-7.

    One forward pass of the oracle over prompt and continuation says what it would have written at every step: if each
    of our tokens is its first choice, given the same tokens before, its greedy text is ours.
    """
    output = pipeline(PROMPTS[language], max_new_tokens=64)
    prompt = pipeline.tokenizer.encode(PROMPTS[language])
    ids = np.array([prompt + list(output.token_ids)])
    assert len(output.token_ids) == 64 or output.finish_reason == "stop"
    with torch.no_grad():
        expected = oracle(torch.from_numpy(ids)).logits[0].numpy()
    assert tuple(expected[len(prompt) - 1 : -1].argmax(axis=-1)) == output.token_ids
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
    }
    found = pipeline.engine.load("score").run(feeds)["logits"][0]
    assert compare("logits", found, expected).relative_l2 <= 1e-4


@pytest.fixture(scope="module")
def in_float16(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> TextGenerationPipeline:
    path = tmp_path_factory.mktemp("bundles") / "float16"
    intaglio.export(smollm2_gguf, path, dtype="float16", taps=True)
    intaglio.compile(path)
    return intaglio.load(path)


def test_greedy_text_in_float16(pipeline: TextGenerationPipeline, in_float16: TextGenerationPipeline) -> None:
    """Bound: 60 of 64 tokens on average, both until the texts part and as first choices along the float32 text.

    Measured: every token, both ways; logits differ by a relative L2 of at most 1.6e-3, the closest two choices of
    the five texts are 0.028 apart, and the largest difference of a logit is 0.08. One text ends early, in both.
    """
    together, chosen = [], []
    for prompt in PROMPTS.values():
        text = pipeline(prompt, max_new_tokens=64).token_ids
        other = in_float16(prompt, max_new_tokens=64).token_ids
        parted = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
        together.append(parted / len(text))
        tokens = pipeline.tokenizer.encode(prompt)
        ids = np.array([[*tokens, *text]])
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1])[None],
        }
        wide, half = (p.engine.load("score").run(feeds, ["logits"])["logits"][0] for p in (pipeline, in_float16))
        chosen.append(np.mean(half[len(tokens) - 1 : -1].argmax(axis=-1) == text))
        assert 1e-5 < compare("logits", half, wide).relative_l2 <= 5e-3
    print(f"until they part {64 * np.mean(together):.1f} of 64, first choices {64 * np.mean(chosen):.1f} of 64")
    assert np.mean(together) >= 60 / 64
    assert np.mean(chosen) >= 60 / 64


def test_the_probe_finds_the_large_residual(in_float16: TextGenerationPipeline) -> None:
    """SmolLM2 keeps one huge activation from layer 11 on: it comes to two fifths of float16's maximum."""
    report = probe(in_float16.engine.bundle_path)
    assert not report.above_half
    largest = max(report.ranges, key=lambda r: r.max_abs)
    assert largest.max_abs == pytest.approx(27300, rel=0.02), largest


def test_a_batch_of_prompts_writes_what_each_writes_alone(pipeline: TextGenerationPipeline) -> None:
    prompts = list(PROMPTS.values())[:3]
    together = pipeline.batch(prompts, max_new_tokens=12)
    assert [o.token_ids for o in together] == [pipeline(p, max_new_tokens=12).token_ids for p in prompts]


def test_stream_is_the_text(pipeline: TextGenerationPipeline) -> None:
    prompt = "日本語で数を数えます：一、二、三、"
    assert "".join(pipeline.stream(prompt, max_new_tokens=24)) == pipeline(prompt, max_new_tokens=24).text


def test_chat_answers(smollm2: SmolLM2) -> None:
    done = command_line("run", smollm2.path, "What is the capital of France?", "--chat")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"


def test_score(pipeline: TextGenerationPipeline, oracle: transformers.PreTrainedModel) -> None:
    text = "In the beginning God created the heaven and the earth. And the earth was without form, and void."
    score = pipeline.score(text)
    ids = torch.tensor([score.token_ids])
    with torch.no_grad():
        loss = oracle(ids, labels=ids).loss.item()
    assert np.log(score.perplexity) == pytest.approx(loss, rel=1e-5)


def test_codes_and_scales_are_those_of_the_file(smollm2: SmolLM2, smollm2_gguf: Path) -> None:
    """Every quantized weight: unpacked and with its rows in the file's order, equal to the file's blocks."""
    graph = ir.load(smollm2.path / "score.onnx").graph
    stored = {name: value.const_value for name, value in graph.initializers.items()}
    tensors = {t.name: t for t in gguf.GGUFReader(smollm2_gguf).tensors}
    checked = 0
    for file_name, name in _tensor_names().items():
        tensor = tensors[file_name]
        codes = stored[f"{name}.codes"].numpy()
        scales, offsets = stored[f"{name}.scales"].numpy(), stored[f"{name}.offsets"].numpy()
        order = _file_order(name, codes.shape[0])
        blocks = tensor.data.reshape(codes.shape[0], -1, {"Q4_1": 20, "Q8_0": 34}[tensor.tensor_type.name])
        if tensor.tensor_type.name == "Q4_1":
            file_scales, file_offsets = (
                blocks[..., :2].copy().view("<f2"),
                blocks[..., 2:4].copy().view("<f2"),
            )
            file_codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
            found, quantization = unpack_codes(codes, 4), GroupedQuantFormat(4, 32, 0)
            np.testing.assert_array_equal(offsets[order], file_offsets[..., 0])
        else:
            file_scales = blocks[..., :2].copy().view("<f2")
            file_codes = blocks[..., 2:].copy().view(np.int8).astype(np.int16) + 128
            found, quantization = unpack_codes(codes, 8), GroupedQuantFormat(8, 32, 128)
            assert offsets.shape == ()
        np.testing.assert_array_equal(found[order], file_codes.reshape(found.shape))
        np.testing.assert_array_equal(scales[order], file_scales[..., 0])
        if checked % 40 == 0:
            mine = dequantize(GroupedQuantRows(codes, scales, offsets), quantization)[order]
            np.testing.assert_array_equal(mine, gguf.dequantize(tensor.data, tensor.tensor_type))
        checked += 1
    assert checked == 211


def _tensor_names() -> dict[str, str]:
    """GGUF names of the quantized tensors to transformers' names, by the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    names = ["model.embed_tokens"] + [f"model.layers.{i}.{part}" for i in range(30) for part in parts]
    return {f"{table.get_name(name)}.weight": f"{name}.weight" for name in names}


def _file_order(name: str, rows: int) -> np.ndarray:
    """The rows of a tensor in the file's order, by the permutation of llama.cpp's converter."""
    heads = 9 if "q_proj" in name else 3 if "k_proj" in name else None
    order = np.arange(rows)
    return order if heads is None else order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def test_tract_runs_the_score_graph(smollm2: SmolLM2) -> None:
    """Against the portable graph in onnxruntime (function bodies) and against the engine. Measured: about 4e-7."""
    report = intaglio.parity(smollm2.path, against="tract", tokens=6, bound=1e-5)
    assert report.first_divergent is None, report.first_divergent
    report = intaglio.parity(smollm2.path, against="onnxruntime", tokens=6, bound=1e-5)
    assert report.first_divergent is None, report.first_divergent


@pytest.mark.parametrize("stage", ["generate", "score"])
def test_quantized_graphs_are_valid_onnx(smollm2: SmolLM2, stage: str) -> None:
    onnx.checker.check_model(str(smollm2.path / f"{stage}.onnx"), full_check=True)


def test_peak_memory_of_export_and_run(smollm2: SmolLM2) -> None:
    assert smollm2.export.peak_rss_mib <= 450
    done = command_line("run", smollm2.path, PROMPTS["English"], "--max-new-tokens", 64)
    assert done.returncode == 0, done.stderr
    assert done.peak_rss_mib <= 350
