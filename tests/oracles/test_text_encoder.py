"""The stage ``text_encoder`` against transformers: every row of the conditioning, padding included, and its taps.

Bounds: relative L2 <= 5e-6 of every tap and the output, in float32. Measured: at most 8.1e-7.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from mlx_files import dequantized, quantize_folder
from run_graph import run_onnxruntime
from safetensors.torch import load_file, save_file
from sparse_checkpoint import write_sparse
from stage_runner import RUNNERS, check_golden, run_lowered, write_stage
from tiny_models import TINY_MODELS

from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.architecture import find_architecture, match_weights, model_tensors
from intaglio.exporters.bundle import WEIGHTS_FILE
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.graph import stage_parameters
from intaglio.runtimes.parity import compare

BOUND = 5e-6
MODELS = {tiny.name: tiny for tiny in TINY_MODELS}
# Mistral encodes the prompts of FLUX.2 dev; two have sliding windows.
NAMES = ["qwen3", "qwen3-yarn", "mistral-yarn", "qwen2-windows", "llama-tied"]
LAYERS = (2, 0, 3)
# Where rows of padding begin.
LENGTHS = [[9], [21, 4], [1, 21, 13]]


@dataclass
class Case:
    oracle: transformers.PreTrainedModel
    checkpoint: Path
    graph: Path


_CASES: dict[str, Case] = {}


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    if name not in _CASES:
        folder = tmp_path_factory.mktemp(name)
        oracle = MODELS[name].build(folder / "checkpoint")
        graph = write_stage(folder / "checkpoint", "text_encoder", folder / "stage", layers=LAYERS)
        _CASES[name] = Case(oracle, folder / "checkpoint", graph)
    return _CASES[name]


def over(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True)


def padded(lengths: Sequence[int], vocab_size: int, tokens: int = 21) -> dict[str, np.ndarray]:
    """Random tokens, of which each row has so many; the rest is padding on the right."""
    ids = np.random.default_rng(7).integers(0, vocab_size, (len(lengths), tokens))
    mask = (np.arange(tokens) < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": np.where(mask, ids, 5), "attention_mask": mask}


def run_oracle(oracle: transformers.PreTrainedModel, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
    with torch.no_grad():
        return [state.numpy() for state in oracle(**tensors, output_hidden_states=True).hidden_states]


def check(found: dict[str, np.ndarray], states: list[np.ndarray], layers: Sequence[int] = LAYERS) -> None:
    expected = {f"te_hidden_{i}": states[i] for i in {0, 1, *layers} if i <= max(layers)}
    expected["prompt_embeds"] = np.concatenate([states[i] for i in layers], axis=-1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = compare(name, found[name], value)
        assert difference.relative_l2 <= BOUND, difference


@over(*NAMES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_row_equals_transformers(case: Case, lengths: list[int], attention: str) -> None:
    feeds = padded(lengths, case.oracle.config.vocab_size)
    window = getattr(case.oracle.config, "sliding_window", None)
    if window is not None and attention == "eager":
        # Padding further than a window from the text sees nothing, of which eager attention makes the mean of all.
        feeds = {name: value[:, : min(lengths) + window - 1] for name, value in feeds.items()}
    case.oracle.set_attn_implementation(attention)
    check(run_onnxruntime(case.graph, feeds), run_oracle(case.oracle, feeds))


@over("qwen3", "qwen3-yarn")
@pytest.mark.parametrize("runner", ["lowered", "tract"])
def test_other_runtimes_agree_with_transformers(case: Case, runner: str) -> None:
    feeds = padded([7, 12], case.oracle.config.vocab_size, 12)
    check(RUNNERS[runner](case.graph, feeds), run_oracle(case.oracle, feeds))


@over("qwen3", "mistral-window")
@pytest.mark.parametrize("runner", ["onnxruntime", "lowered"])
def test_rows_that_see_nothing(case: Case, runner: str) -> None:
    """Padding on the left or further than a window from the text, and no text at all: torch's attention is zero."""
    feeds = padded([2, 21, 0], case.oracle.config.vocab_size)
    if case.oracle.config.sliding_window is None:
        feeds["attention_mask"] = 1 - feeds["attention_mask"] * [[1], [0], [1]]
        feeds["attention_mask"][2] = 0
    case.oracle.set_attn_implementation("sdpa")
    check(RUNNERS[runner](case.graph, feeds), run_oracle(case.oracle, feeds))


@pytest.mark.parametrize("layers", [(1,), (0,), (3, 3), (1, 2)])
def test_it_holds_the_layers_it_needs(tmp_path: Path, layers: tuple[int, ...]) -> None:
    oracle = MODELS["qwen3"].build(tmp_path / "checkpoint")
    graph = write_stage(tmp_path / "checkpoint", "text_encoder", tmp_path / "stage", layers=layers)
    feeds = padded([5, 21], oracle.config.vocab_size)
    check(run_onnxruntime(graph, feeds), run_oracle(oracle, feeds), layers)
    names = {n for n, v in ir.load(graph).graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)}
    stated = {name for name in oracle.state_dict() if not name.startswith(("lm_head", "model.norm"))}
    depth = max(layers)
    needed = {n for n in stated if "layers." not in n or int(n.split(".")[2]) < depth}
    assert names == needed | ({"model.norm.weight"} if depth == oracle.config.num_hidden_layers else set())


@over("qwen3")
def test_graph_is_valid_and_the_golden_one(case: Case, request: pytest.FixtureRequest) -> None:
    onnx.checker.check_model(str(case.graph), full_check=True)
    graph = ir.load(case.graph).graph
    width = len(LAYERS) * case.oracle.config.hidden_size
    assert [str(value.name) for value in graph.inputs] == ["input_ids", "attention_mask"]
    assert list(graph.outputs[0].shape or ()) == [ir.SymbolicDim("batch"), ir.SymbolicDim("text_tokens"), width]
    check_golden(case.graph, "qwen3.text_encoder", write=request.config.getoption("--write-goldens"))


@over("qwen3")
def test_a_model_saved_without_its_head_is_the_same(case: Case, tmp_path: Path) -> None:
    """As the text encoders of diffusers directories may be: the class Qwen3Model, whose names lack ``model.``."""
    case.oracle.model.save_pretrained(tmp_path / "bare")
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    graph = write_stage(tmp_path / "bare", "text_encoder", tmp_path / "stage", layers=LAYERS)
    assert graph.read_bytes() == case.graph.read_bytes()
    assert graph.with_name(WEIGHTS_FILE).read_bytes() == case.graph.with_name(WEIGHTS_FILE).read_bytes()
    with pytest.raises(WeightsError, match=r"1 of .* missing:\n  lm_head\.weight"):
        write_stage(tmp_path / "bare", "generate", tmp_path / "stage")


# --- files without a config.json ----------------------------------------------------------------------------

UNTOLD: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("bare", [False, True])
def test_an_mlx_file_alone(tmp_path: Path, bare: bool) -> None:
    """4 bits in groups of 64, embeddings too; geometry from the shapes, the rest given."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    oracle = transformers.Qwen3ForCausalLM(config).float().eval().requires_grad_(False)
    for parameter in oracle.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else parameter.normal_(1.0, 0.3)
    oracle.save_pretrained(tmp_path / "dense")
    file = quantize_folder(tmp_path / "dense", tmp_path / "mlx", 4, 64) / "model.safetensors"
    for name, parameter in oracle.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.from_numpy(dequantized(file, name.removesuffix(".weight"), 4, 64)))
        else:
            parameter.copy_(load_file(file)[name])
    (file.parent / "config.json").unlink()
    if bare:
        save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"hidden_act.*--config"):
        write_stage(file, "text_encoder", tmp_path / "stage", layers=LAYERS)
    graph = write_stage(file, "text_encoder", tmp_path / "stage", layers=LAYERS, config=UNTOLD)
    feeds = padded([5, 21], 97)
    states = run_oracle(oracle, feeds)
    check(run_onnxruntime(graph, feeds), states)
    check(run_lowered(graph, feeds), states)


def sparse_file(file: Path, config: transformers.Qwen3Config, prefix: str, *, packed: bool) -> None:
    """The tensors of a model of full size: a true header over a hole. ``packed`` as MLX packs 4 bits."""
    with torch.device("meta"):
        model = transformers.Qwen3Model(config)
    shapes = {f"{prefix}{name}": parameter.shape for name, parameter in model.named_parameters()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    write_sparse(file, shapes, packed=matrices if packed else ())


def qwen3_config(hidden_size: int, intermediate_size: int) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(2560, 9728), (4096, 12288)], ids=["4B", "8B"])
def test_published_models_are_recognised(tmp_path: Path, hidden_size: int, intermediate_size: int, prefix: str) -> None:
    file = tmp_path / "model.safetensors"
    sparse_file(file, qwen3_config(hidden_size, intermediate_size), prefix, packed=True)
    checkpoint = open_checkpoint(file)
    architecture, keys = find_architecture(checkpoint)
    config = architecture.read_config(keys)
    assert (architecture.name, config.hidden_size, config.intermediate_size) == (
        "qwen3",
        hidden_size,
        intermediate_size,
    )
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (1e6, 1e-6, 40960)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (36, 32, 8)
    model, tensors = architecture.build(config), model_tensors(checkpoint, architecture, config)
    stage = architecture.stages(config, (9, 18, 27), ir.DataType.FLOAT)["text_encoder"]
    weights, unused = match_weights(model, stage_parameters(model, stage), tensors, lambda name: False, "model")
    # 27 layers of 7 matrices and 4 norms, and the embeddings; 9 layers and the last norm are not needed.
    assert (len(weights), len(unused)) == (27 * 11 + 1, 9 * 11 + 1)
    layouts = [tensor.layout for tensor in weights.values() if tensor.layout]
    assert len(layouts) == 27 * 7 + 1
    assert {(layout.format.bits, layout.format.group_size) for layout in layouts} == {(4, 64)}


def test_other_geometry_is_told_apart(tmp_path: Path) -> None:
    sparse_file(tmp_path / "model.safetensors", qwen3_config(2560, 9600), "model.", packed=False)
    architecture, keys = find_architecture(open_checkpoint(tmp_path / "model.safetensors"))
    assert keys.values["intermediate_size"] == 9600
    with pytest.raises(ConfigError, match=r"has no hidden_act"):
        architecture.read_config(keys)
