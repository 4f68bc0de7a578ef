"""Export with adapters: merged values, branches beside codes, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from measure import intaglio as command_line
from mlx_files import quantized
from safetensors.numpy import save_file

import intaglio
from intaglio.errors import CheckpointError, ConfigError, InputError, WeightsError
from intaglio.exporters.bundle import read_bundle

LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
MODULES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYERS]


def write_adapter(folder: Path, modules: list[str] = MODULES, rank: int = 3, alpha: float = 5, seed: int = 1) -> Path:
    """As peft saves it; ``modules`` the tiny model does not have are square."""
    rng = np.random.default_rng(seed)
    weights, tensors = tiny_checkpoint.tensors(), {}
    for name in modules:
        rows, columns = weights.get(f"{name}.weight", np.zeros((32, 32))).shape
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            values = rng.normal(scale=0.2, size=shape).astype(np.float32)
            tensors[f"base_model.model.{name}.{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    return folder


def deltas(folder: Path) -> dict[str, np.ndarray]:
    """What an adapter adds to each weight, float64."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {name: t.astype(np.float64) for name, t in load_file(folder / "adapter_model.safetensors").items()}
    stems = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    return {
        f"{stem.removeprefix('base_model.model.')}.weight": config["lora_alpha"]
        / config["r"]
        * (tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"])
        for stem in stems
    }


def stored(bundle: Path, stage: str = "score") -> dict[str, np.ndarray]:
    graph = ir.load(bundle / f"{stage}.onnx").graph
    values = {name: value.const_value for name, value in graph.initializers.items()}
    return {name: tensor.numpy() for name, tensor in values.items() if isinstance(tensor, ir.ExternalTensor)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "checkpoint")


def test_dense_weights_are_merged(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound: 2e-7 of the largest weight, some roundings of float32."""
    monkeypatch.setattr("intaglio.exporters.weights._CHUNK_BYTES", 1000)  # some rows at a time
    a, b = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", MODULES[2:4], rank=2, seed=2)
    plain = intaglio.export(checkpoint, tmp_path / "plain")
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[(a, 0.75), (b, -2.0)])
    expected = {name: value.astype(np.float64) for name, value in tiny_checkpoint.tensors().items()}
    for folder, strength in ((a, 0.75), (b, -2.0)):
        for name, delta in deltas(folder).items():
            expected[name] += strength * delta
    for stage in ("score", "generate"):
        found = stored(tmp_path / "bundle", stage)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == np.float32
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-7 * np.abs(value).max())
    assert bundle.weights.sha256 != plain.weights.sha256
    assert bundle.stages == plain.stages
    assert bundle.language_model.quantization == plain.language_model.quantization


def test_what_the_bundle_says(checkpoint: Path, tmp_path: Path) -> None:
    import hashlib

    a = write_adapter(tmp_path / "a")
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[(a, 0.5)])
    assert read_bundle(tmp_path / "bundle") == bundle
    (info,) = bundle.adapters
    assert (info.name, info.strength, info.ranks, info.matched, info.total_modules) == ("a", 0.5, (3,), 6, 6)
    assert info.modules == {"language_model": 6}
    for file in info.files:
        assert file.sha256 == hashlib.sha256((a / file.name).read_bytes()).hexdigest()
    assert [file.name for file in info.files] == ["adapter_model.safetensors", "adapter_config.json"]
    assert intaglio.export(checkpoint, tmp_path / "none").adapters == ()
    planned = intaglio.export(checkpoint, tmp_path / "dry", lora=[a], dry_run=True)
    assert planned.adapters[0].matched == 6
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_merged_weight_is_rounded_once(tmp_path: Path, dtype: str) -> None:
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    weights = {name: t.astype(narrow) for name, t in tiny_checkpoint.tensors().items()}
    checkpoint = tiny_checkpoint.write(tmp_path / "checkpoint", weights=weights)
    a = write_adapter(tmp_path / "a")
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[a], dtype=dtype)
    found, wrong, count = stored(tmp_path / "bundle"), 0, 0
    for name, delta in deltas(a).items():
        expected = (weights[name].astype(np.float64) + delta).astype(np.float32).astype(narrow)
        wrong += np.count_nonzero(found[name] != expected)
        count += delta.size
    # Sums of float32 may fall on the other side of a tie; rounding twice is wrong in one value of some hundred.
    assert wrong <= count / 1000
    assert {q.bits for q in bundle.language_model.quantization} == {16}


def quantized_checkpoint(folder: Path) -> Path:
    """MLX's 4 bits in groups of 32, but for the norms."""
    weights: dict[str, np.ndarray] = {}
    for name, tensor in tiny_checkpoint.tensors().items():
        is_matrix = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        if not is_matrix:
            weights[name] = tensor
            continue
        parts = (name, *(name.replace(".weight", part) for part in (".scales", ".biases")))
        weights |= dict(zip(parts, map(np.array, quantized(tensor, 4, 32)), strict=True))
    return tiny_checkpoint.write(folder, weights=weights, config={"quantization": {"bits": 4, "group_size": 32}})


def test_codes_stay_and_a_branch_is_beside_them(tmp_path: Path) -> None:
    checkpoint = quantized_checkpoint(tmp_path / "checkpoint")
    a, b = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", MODULES[:1], rank=2, seed=2)
    intaglio.export(checkpoint, tmp_path / "plain")
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[(a, 0.5), (b, 3)])
    plain, found = stored(tmp_path / "plain"), stored(tmp_path / "bundle")
    # down_proj has a width that groups do not divide, so is dense.
    branches = {name for name in MODULES if "self_attn" in name}
    added = {f"{name}.{part}.weight" for name in branches for part in ("lora_A", "lora_B")}
    assert found.keys() == plain.keys() | added
    for name, value in plain.items():
        if "down_proj" not in name:
            np.testing.assert_array_equal(found[name], value)
    expected = {name: 0.5 * delta for name, delta in deltas(a).items()}
    for name, delta in deltas(b).items():
        expected[name] += 3 * delta
    for name in branches:
        down, up = (found[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        assert down.shape[0] == up.shape[1] == (5 if name == MODULES[0] else 3)
        np.testing.assert_allclose(up @ down, expected[f"{name}.weight"], rtol=0, atol=1e-6)
    assert "F32" in {q.storage for q in bundle.language_model.quantization}
    counts = sum(q.tensors for q in bundle.language_model.quantization)
    assert counts == len(tiny_checkpoint.tensors())


def test_what_stages_leave_out_is_no_error(checkpoint: Path, tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a")
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[a], stages=["encode"], hidden_states=[1])
    assert bundle.adapters[0].matched == 6
    names = {name for name in stored(tmp_path / "bundle", "encode") if "layers.1" in name}
    assert not names


def test_unknown_modules(checkpoint: Path, tmp_path: Path) -> None:
    some = write_adapter(tmp_path / "some", [*MODULES, "model.layers.7.self_attn.q_proj"])
    message = r"some: 1 of 7 modules are unknown to the model \(language_model\): base_model\.model\.model\.layers\.7\."
    with pytest.raises(WeightsError, match=message + r".*--allow-unused goes on without them"):
        intaglio.export(checkpoint, tmp_path / "bundle", lora=[some])
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[some], allow_unused=True)
    assert bundle.adapters[0].unused == ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",)
    assert (bundle.adapters[0].matched, bundle.adapters[0].total_modules) == (6, 7)
    none = write_adapter(tmp_path / "none", ["decoder.fc1", "decoder.fc2"])
    message = r"none of its 2 modules is one of the model's\. It has .*decoder\.fc1\.lora_A\.weight, .*; the model "
    for allow_unused in (False, True):
        with pytest.raises(
            WeightsError, match=message + r"\(language_model\) has model\.layers\.0\.self_attn\.q_proj, "
        ):
            intaglio.export(checkpoint, tmp_path / "bundle", lora=[none], allow_unused=allow_unused)


def test_an_embedding_is_no_linear_layer(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", [*MODULES, "model.embed_tokens"])
    with pytest.raises(WeightsError, match="1 of 7 modules are unknown"):
        intaglio.export(checkpoint, tmp_path / "bundle", lora=[adapter])


def test_names_without_the_head_and_in_kohyas_spelling(checkpoint: Path, tmp_path: Path) -> None:
    """``AutoModel`` has no ``model.`` before its layers; kohya's has underscores and an alpha for each module."""
    a = write_adapter(tmp_path / "a")
    from safetensors.numpy import load_file

    tensors = load_file(a / "adapter_model.safetensors")
    first = intaglio.export(checkpoint, tmp_path / "bundle", lora=[(a, 0.3)])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text((a / "adapter_config.json").read_text())
    headless = {name.replace("model.model.model.", "model.model."): t for name, t in tensors.items()}
    save_file(headless, tmp_path / "b" / "adapter_model.safetensors")
    assert "base_model.model.layers.0.self_attn.q_proj.lora_A.weight" in headless
    flat = {}
    for name, tensor in tensors.items():
        stem, _, part = name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".")
        module = "lora_te1_" + stem.replace(".", "_")
        flat[f"{module}.{'lora_down' if part == 'lora_A' else 'lora_up'}.weight"] = tensor
        flat[f"{module}.alpha"] = np.array(5.0, np.float32)
    save_file(flat, tmp_path / "c.safetensors")
    for other in (tmp_path / "b", tmp_path / "c.safetensors"):
        bundle = intaglio.export(checkpoint, tmp_path / "bundle", lora=[(other, 0.3)])
        assert bundle.weights.sha256 == first.weights.sha256


def test_bad_adapters(checkpoint: Path, tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a")
    for lora, message in (
        ([(a, float("nan"))], "the strength is nan"),
        ([(a, -1e39)], "the strength is -1e"),
        ([a, (a, 0.5)], "is given twice"),
    ):
        with pytest.raises(InputError, match=message):
            intaglio.export(checkpoint, tmp_path / "bundle", lora=lora)
    wrong: dict[str, Any] = {"vocab_size": 260, "intermediate_size": 64}
    weights = {
        name: np.zeros((64, 32), np.float32) if "gate" in name or "up_proj" in name
        else np.zeros((32, 64), np.float32) if "down" in name else t
        for name, t in tiny_checkpoint.tensors().items()
    }  # fmt: skip
    other = tiny_checkpoint.write(tmp_path / "other", config=wrong, weights=weights)
    message = (
        r"a: base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight is \[3, 48\]; it adds \[32, 48\] to "
    )
    with pytest.raises(WeightsError, match=message + r"model\.layers\.0\.mlp\.down_proj, which is \[32, 64\]"):
        intaglio.export(other, tmp_path / "bundle", lora=[a])
    with pytest.raises(CheckpointError, match="no such file"):
        intaglio.export(checkpoint, tmp_path / "bundle", lora=[tmp_path / "missing.safetensors"])
    with pytest.raises(ConfigError, match="is an adapter, not a model; export the model with --lora"):
        intaglio.export(a / "adapter_model.safetensors", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_merged_weight_beyond_the_dtype_is_named(checkpoint: Path, tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a", alpha=5e6)
    with pytest.raises(WeightsError, match=r"q_proj\.weight: its largest magnitude is .* beyond float16's 65504"):
        intaglio.export(checkpoint, tmp_path / "bundle", lora=[a], dtype="float16")


def test_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a:b", [*MODULES, "model.layers.7.mlp.up_proj"])
    done = command_line("export", checkpoint, tmp_path / "bundle", "--lora", f"{a}:0.8")
    assert done.returncode == 2 and "--allow-unused" in done.stderr
    done = command_line("export", checkpoint, tmp_path / "bundle", "--lora", f"{a}:0.8", "--allow-unused")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "LoRA a:b:0.8: 6 of 7 modules (language_model), rank 3\n" in done.stderr
    assert "LoRA a:b: not used: base_model.model.model.layers.7.mlp.up_proj.lora_A.weight\n" in done.stderr
    done = command_line("export", checkpoint, tmp_path / "bundle", "--lora", a, "--allow-unused")
    assert "LoRA a:b:1: 6 of 7 modules" in done.stderr
    done = command_line("export", checkpoint, tmp_path / "bundle", "--lora", f"{a}:much")
    assert done.returncode == 2 and "the strength is 'much', expected a number" in done.stderr
    shown = command_line("inspect", tmp_path / "bundle").stdout
    assert "adapters" in shown and "a:b" in shown
    shown = json.loads(command_line("inspect", a, "--json").stdout)
    assert shown["adapter"] | {"module names": ""} == {
        "spelling": "peft",
        "modules": 7,
        "ranks": [3],
        "scales (alpha / rank)": [1.666667],
        "values": sum(t["bytes"] for t in shown["tensors"]) // 4,
        "module names": "",
    }
    assert "spelling" in command_line("inspect", a / "adapter_model.safetensors").stdout
