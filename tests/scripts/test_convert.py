"""``intaglio convert`` and ``intaglio inspect`` of what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from gguf_files import gguf_bytes
from klein import make_checkpoint as maker
from measure import intaglio as command_line

from intaglio.exporters.checkpoints import open_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("convert") / "source")


def test_convert_says_what_it_wrote(source: Path, tmp_path: Path) -> None:
    dry = command_line("convert", source, tmp_path / "a.gguf", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, ""), dry.stderr
    assert f"would write {tmp_path / 'a.gguf'}: 20 tensors (20 F32)" in dry.stderr
    assert not (tmp_path / "a.gguf").exists()
    done = command_line("convert", source, tmp_path / "a.gguf", "--type", "F16", "--json", "--no-tokenizer")
    assert done.returncode == 0, done.stderr
    assert "20 tensors (15 F32 to F16, 5 F32)" in done.stderr
    assert "rounded: 15 tensors, as --type F16 asks" in done.stderr
    assert "no tokenizer, as asked for" in done.stderr
    content = json.loads(done.stdout)
    assert (content["target_format"], len(content["tensors"])) == ("gguf", 20)
    again = command_line("convert", tmp_path / "a.gguf", tmp_path / "b", "--quiet")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    refused = command_line("convert", tmp_path / "a.gguf", tmp_path / "b")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "exists; --overwrite replaces it" in refused.stderr
    assert command_line("convert", tmp_path / "a.gguf", tmp_path / "b", "--overwrite").returncode == 0


def test_inspect_says_how_weights_are_stored(tmp_path: Path) -> None:
    import mlx.core as mx

    weights = mx.array(np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)).astype(mx.bfloat16)
    arrays = {"a.bias": mx.zeros((8,))}
    parts = mx.quantize(weights, bits=4, group_size=64)
    arrays |= dict(zip(("a.weight", "a.scales", "a.biases"), parts, strict=True))
    (tmp_path / "mlx").mkdir()
    mx.save_safetensors(str(tmp_path / "mlx" / "model.safetensors"), arrays, {"format": "mlx"})
    quantization = {"bits": 4, "group_size": 64, "gone": {"bits": 8, "group_size": 64}}
    (tmp_path / "mlx" / "config.json").write_text(json.dumps({"quantization": quantization}))
    content = json.loads(command_line("inspect", tmp_path / "mlx", "--json").stdout)
    assert content["metadata"] == {"format": "mlx"}
    (tensor,) = (t for t in content["tensors"] if t["name"] == "a.weight")
    assert tensor == {
        "name": "a.weight", "storage": "MLX4", "shape": [8, 256], "bytes": 8 * 128 + 8 * 4 * 4, "group_size": 64,
        "bits_per_weight": 4.5, "zero_point": 0, "scales": "bfloat16", "offsets": True,
    }  # fmt: skip
    assert "names 1 modules that are not quantized" in content["notes"][0]
    table = command_line("inspect", tmp_path / "mlx").stdout
    for text in ("MLX4", "4.5", "bfloat16", "notes", "first gone"):
        assert text in table, text


def test_inspect_reports_the_id_42_and_parts(tmp_path: Path) -> None:
    codes = np.full((4, 34), 0x55, np.uint8)
    codes[:, 32:] = [0x00, 0x24]
    for part in range(2):
        raw = gguf_bytes(
            {"general.architecture": "bonsai-image", "split.no": part, "split.count": 2},
            [(f"w{part}", (4, 128), 42, codes.tobytes())],
        )
        (tmp_path / f"m-0000{part + 1}-of-00002.gguf").write_bytes(raw)
    done = command_line("inspect", tmp_path / "m-00001-of-00002.gguf", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["files"] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert [t["storage"] for t in content["tensors"]] == ["TQ2_0_g128"] * 2
    assert content["tensors"][0]["bits_per_weight"] == 2.125
    assert any("type id 42 (1 tensors) is taken as TQ2_0_g128" in note for note in content["notes"])
    table = command_line("inspect", tmp_path / "m-00001-of-00002.gguf").stdout
    assert "2 files" in table
    assert "type id 42" in table


def test_picture_transformers(tmp_path: Path) -> None:
    maker.write_transformer(tmp_path / "dense", "diffusers")
    done = command_line("convert", tmp_path / "dense", tmp_path / "dit.gguf")
    assert done.returncode == 2
    assert "holds TQ2_0_g128 here; --pack-ternary packs it" in done.stderr
    done = command_line("convert", tmp_path / "dense", tmp_path / "dit.gguf", "--pack-ternary")
    assert done.returncode == 0, done.stderr
    assert "53 tensors (30 BF16 to TQ2_0_g128, 23 BF16)" in done.stderr
    done = command_line("convert", tmp_path / "dit.gguf", tmp_path / "packed.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert {tensor["storage"] for tensor in content["tensors"]} == {"MLX2", "BF16"}
    maker.write_transformer(tmp_path / "expected.safetensors", "mlx")
    assert (tmp_path / "packed.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    # Back again: what no tensor of a tiny model tells must be said.
    back = ("convert", tmp_path / "packed.safetensors", tmp_path / "back.gguf")
    done = command_line(*back)
    assert done.returncode == 2
    assert "has no axes_dims_rope" in done.stderr
    assert "--config axes_dims_rope=VALUE" in done.stderr
    said = ("patch_size=1", "axes_dims_rope=[16,16,16,16]", "rope_theta=2000", "eps=1e-6")
    done = command_line(*back, *(part for setting in said for part in ("--config", setting)))
    assert done.returncode == 0, done.stderr
    found, expected = (open_checkpoint(tmp_path / f"{name}.gguf") for name in ("back", "dit"))
    assert {**found.metadata, "general.name": "dit"}.keys() == expected.metadata.keys()
    assert found.metadata["bonsai-image.rope.theta"] == expected.metadata["bonsai-image.rope.theta"]
    done = command_line(*back, "--config", "eps=1e-6", "--config", "eps=1e-5")
    assert done.returncode == 2
    assert "--config eps is given twice" in done.stderr
