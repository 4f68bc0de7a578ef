"""Configurations of the decoder families: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import intaglio
from intaglio.errors import ConfigError
from intaglio.exporters.architectures import llama, mistral, qwen2, qwen3
from intaglio.exporters.checkpoints.gguf_decoder import decoder_config
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor
from intaglio.exporters.config import (
    ConfigKeys,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeFreqs,
    YarnScaling,
    context_length,
    rope_parameters,
)

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "sliding_window": None,
}


def keys(**changes: Any) -> ConfigKeys:
    return ConfigKeys({**BASE, **changes}, "config.json")


def without(name: str, **changes: Any) -> ConfigKeys:
    return ConfigKeys({key: value for key, value in {**BASE, **changes}.items() if key != name}, "config.json")


LINEAR = {"factor": 3.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope_type", "parameters", "expected"),
    [
        ("default", {}, None),
        ("linear", LINEAR, LinearScaling("linear", 3.0)),
        ("dynamic", LINEAR, DynamicScaling("dynamic", 3.0, 128)),
        ("yarn", YARN, YarnScaling("yarn", 4.0, 32, 0.1 * np.log(4) + 1, 32.0, 1.0, True)),
        ("yarn", {**YARN, "attention_factor": 1.25}, YarnScaling("yarn", 4.0, 32, 1.25, 32.0, 1.0, True)),
        ("llama3", LLAMA3, Llama3Scaling("llama3", 4.0, 32, 1.0, 4.0)),
    ],
)
def test_both_spellings_of_rope_scaling_are_read(rope_type: str, parameters: dict[str, Any], expected: Any) -> None:
    new = without("rope_theta", rope_parameters={"rope_type": rope_type, "rope_theta": 5000.0, **parameters})
    beside = keys(rope_parameters={"rope_type": rope_type, **parameters})
    old = keys(rope_scaling={"rope_type": rope_type, **parameters})
    older = keys(rope_scaling={"type": rope_type, **parameters})
    both = keys(rope_scaling={"type": rope_type, "rope_type": rope_type, **parameters})
    for spelled in (new, beside, old, older, both):
        assert rope_parameters(spelled, 8) == (5000.0, expected)


@pytest.mark.parametrize("rope_type", ["longrope", "su", "mrope", "proportional", "ntk"])
def test_unknown_rope_types_are_refused_by_name(rope_type: str) -> None:
    for key in ("type", "rope_type"):
        with pytest.raises(ConfigError, match=rf"rope_scaling\.{key} is '{rope_type}'.*llama3"):
            rope_parameters(keys(rope_scaling={key: rope_type, "factor": 2.0}), 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, r"has no rope_scaling\.factor.*--config rope_scaling='\{\"factor\""),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"rope_scaling\.factor is 0\.5"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, r"rope_scaling\.factor is '4'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, r"rope_scaling\.alpha is 1\.0"),
        ({"rope_scaling": {"type": "dynamic", **YARN}}, r"original_max_position_embeddings is 32"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "has no rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7}}, "mscale_all_dim go together"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}}, "beta_fast is 0.5"),
        ({"rope_scaling": {"type": "yarn", **YARN, "finetuned": True}}, "finetuned is True"),
        ({"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 64}, "is 64.* must agree"),
        ({"rope_scaling": {"type": "llama3", **YARN}}, "has no rope_scaling.low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, r"rope_scaling\.factor is 2\.0"),
        ({"rope_scaling": {"factor": 2.0}}, r"rope_scaling\.factor is 2\.0"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "type is 'yarn'.*must agree"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0, expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta is 5000.0, but"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}}, "both there and differ"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_wrong_rope_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}"):
        rope_parameters(keys(**changes), 8)


def test_rope_theta_has_no_default() -> None:
    for changes in ({}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": {"type": "linear", **LINEAR}}):
        with pytest.raises(ConfigError, match="has no rope_theta"):
            rope_parameters(without("rope_theta", **changes), 8)


def test_scaling_that_names_the_unscaled_length_stretches_the_context() -> None:
    assert context_length(128, None) == 128
    assert context_length(128, DynamicScaling("dynamic", 4.0, 128)) == 512
    assert context_length(32, YarnScaling("yarn", 4.0, 32, 1.0, 32.0, 1.0, True)) == 128
    assert context_length(4096, YarnScaling("yarn", 4.0, 32, 1.0, 32.0, 1.0, True)) == 4096
    # These publish the stretched length, or nothing that tells.
    assert context_length(128, Llama3Scaling("llama3", 4.0, 32, 1.0, 4.0)) == 128
    assert context_length(128, LinearScaling("linear", 4.0)) == 128


def test_llama_has_no_sliding_window() -> None:
    with pytest.raises(ConfigError, match="sliding_window is 16"):
        llama.LlamaConfig.from_keys(keys(sliding_window=16))


def test_mistral_wants_a_sliding_window_or_null() -> None:
    assert mistral.MistralConfig.from_keys(keys()).sliding_window is None
    assert mistral.MistralConfig.from_keys(keys(sliding_window=16)).sliding_window == 16
    with pytest.raises(ConfigError, match="has no sliding_window"):
        mistral.MistralConfig.from_keys(without("sliding_window"))
    with pytest.raises(ConfigError, match="layer_types"):
        mistral.MistralConfig.from_keys(keys(layer_types=["full_attention"] * 3))
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ConfigError, match="sliding_window is"):
            mistral.MistralConfig.from_keys(keys(sliding_window=wrong))


@pytest.mark.parametrize("family", [mistral.MistralConfig, qwen2.Qwen2Config, qwen3.Qwen3Config])
def test_key_value_heads_have_no_default_but_null(family: Any) -> None:
    assert family.from_keys(keys(num_key_value_heads=None)).num_key_value_heads == 6
    with pytest.raises(ConfigError, match="has no num_key_value_heads"):
        family.from_keys(without("num_key_value_heads"))
    with pytest.raises(ConfigError, match="num_key_value_heads is 4, which does not divide 6"):
        family.from_keys(keys(num_key_value_heads=4))


def test_qwen3_wants_a_head_dim() -> None:
    assert qwen2.Qwen2Config.from_keys(without("head_dim")).head_dim == 8
    with pytest.raises(ConfigError, match="has no head_dim"):
        qwen3.Qwen3Config.from_keys(without("head_dim"))


@pytest.mark.parametrize("family", [qwen2.Qwen2Config, qwen3.Qwen3Config])
def test_qwen_layers_slide_as_the_config_says(family: Any) -> None:
    full, sliding = "full_attention", "sliding_attention"
    # Published configs name a window that is switched off.
    off = family.from_keys(keys(sliding_window=16, max_window_layers=1))
    assert (off.sliding_window, off.layer_types) == (None, (full, full, full))
    on = {"use_sliding_window": True, "sliding_window": 16}
    found = family.from_keys(keys(**on, max_window_layers=1))
    assert (found.sliding_window, found.layer_types) == (16, (full, sliding, sliding))
    found = family.from_keys(keys(**on, layer_types=[sliding, full, full], max_window_layers=1))
    assert found.layer_types == (sliding, full, full)
    with pytest.raises(ConfigError, match="has no max_window_layers"):
        family.from_keys(keys(**on))
    with pytest.raises(ConfigError, match="no sliding window is in use"):
        family.from_keys(keys(layer_types=[sliding, full, full]))
    for wrong in ([full, full], [full, full, "chunked_attention"], "full_attention"):
        with pytest.raises(ConfigError, match="layer_types is"):
            family.from_keys(keys(**on, layer_types=wrong))


def gguf(architecture: str = "llama", factors: np.ndarray | None = None, **changes: Any) -> Checkpoint:
    """A GGUF file's header."""
    stated = {
        "vocab_size": 97,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "block_count": 3,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "context_length": 128,
        **changes,
    }
    metadata = {f"{architecture}.{key}": value for key, value in stated.items() if value is not None}
    metadata["general.architecture"] = architecture
    tensors = {} if factors is None else {"rope_freqs.weight": Vector("rope_freqs.weight", factors)}
    return Checkpoint(Path("model.gguf"), "gguf", tensors, (), metadata=metadata)


class Vector(CheckpointTensor):
    def __init__(self, name: str, values: np.ndarray) -> None:
        super().__init__(name, values.shape, "F32")
        object.__setattr__(self, "values", values)

    @property
    def row_bytes(self) -> int:
        return 4 * self.shape[0]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[None][start:stop]  # type: ignore[attr-defined,no-any-return]


SCALING = "rope.scaling."


def test_gguf_rope_scaling_is_read() -> None:
    def read(**changes: Any) -> Any:
        return rope_parameters(decoder_config(gguf(**changes)), 8)

    assert read() == (5000.0, None)
    assert read(**{f"{SCALING}type": "none", f"{SCALING}finetuned": True}) == (5000.0, None)
    linear = {f"{SCALING}type": "linear", f"{SCALING}factor": 3.0, f"{SCALING}original_context_length": 32}
    assert read(**linear) == (5000.0, LinearScaling("linear", 3.0))
    yarn = {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32}
    assert read(**yarn) == (5000.0, YarnScaling("yarn", 4.0, 32, 0.1 * np.log(4) + 1, 32.0, 1.0, True))
    assert read(**yarn, **{f"{SCALING}yarn_beta_fast": 8.0})[1].beta_fast == 8.0
    factors = np.array([1, 2, 4, 8], np.float32)
    assert read(factors=factors) == (5000.0, RopeFreqs("rope_freqs", (1.0, 2.0, 4.0, 8.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{SCALING}type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({f"{SCALING}type": "linear"}, "has no llama.rope.scaling.factor"),
        ({f"{SCALING}type": np.array([1, 2])}, "llama.rope.scaling.type is array"),
        ({"rope.dimension_sections": np.array([8, 8, 0])}, "llama.rope.dimension_sections is set"),
        ({f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}, "has no llama.rope.scaling.original_context_length"),
        ({f"{SCALING}factor": 4.0}, "llama.rope.scaling.factor is 4.0"),
        ({f"{SCALING}type": "linear", f"{SCALING}factor": 4.0, f"{SCALING}alpha": 2.0}, "scaling.alpha is 2.0"),
        ({f"{SCALING}type": "yarn", f"{SCALING}yarn_attn_factor": 1.0}, "scaling.yarn_attn_factor is 1.0"),
        ({f"{SCALING}type": "yarn", f"{SCALING}yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"attention.sliding_window": 64}, "llama.attention.sliding_window is set"),
        ({"rope.scale_linear": 4.0}, "llama.rope.scale_linear is set"),
        ({"rope.freq_base": None}, "has no llama.rope.freq_base"),
        ({"factors": np.ones(3, np.float32)}, "rope_freqs.weight is .* expected 4 numbers"),
        ({"factors": np.zeros(4, np.float32)}, "rope_freqs.weight is .* expected 4 numbers"),
        ({"factors": np.ones(4, np.float32), "architecture": "qwen2"}, "rope_freqs.weight, which qwen2"),
        (
            {"factors": np.ones(4, np.float32), f"{SCALING}type": "linear", f"{SCALING}factor": 4.0},
            "llama.rope.scaling.type is there beside rope_freqs.weight",
        ),
    ],
)
def test_gguf_scaling_that_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.gguf: .*{message}"):
        rope_parameters(decoder_config(gguf(**changes)), 8)


def test_overrides_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    settings = {key: value for key, value in BASE.items() if key != "sliding_window"}
    with pytest.raises(ConfigError, match=r"--config max_window_layers: llama does not read it; read are .*rope_theta"):
        intaglio.export(tmp_path, tmp_path / "bundle", config={**settings, "max_window_layers": 1})
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor"):
        intaglio.export(tmp_path, tmp_path / "bundle", config={**settings, "rope_scaling": {"rope_type": "linear"}})
