"""Export: what ends up in a bundle, and what bad input and a kill leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from safetensors.numpy import save_file

import intaglio
from intaglio.errors import (
    BundleError,
    CancelledError,
    CheckpointError,
    ConfigError,
    InputError,
    OutputError,
    WeightsError,
)
from intaglio.exporters.bundle import read_bundle


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "checkpoint")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def nothing_left(folder: Path) -> bool:
    return not any(folder.glob(".*"))


def test_weights_are_the_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "bundle")
    expected = tiny_checkpoint.tensors()
    for stage in ("generate", "score"):
        graph = ir.load(tmp_path / "bundle" / f"{stage}.onnx").graph
        stored = {
            n: v.const_value for n, v in graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)
        }
        assert stored.keys() == expected.keys()
        for name, tensor in stored.items():
            assert tensor.offset is not None
            assert tensor.offset % 4096 == 0
            np.testing.assert_array_equal(tensor.numpy(), expected[name])


def test_two_exports_are_byte_for_byte_the_same(checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "a")
    intaglio.export(checkpoint, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_changed_weight_changes_the_hash(checkpoint: Path, tmp_path: Path) -> None:
    first = intaglio.export(checkpoint, tmp_path / "bundle")
    weights = tiny_checkpoint.tensors()
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] += 1
    tiny_checkpoint.write(checkpoint, weights=weights)
    second = intaglio.export(checkpoint, tmp_path / "bundle")
    assert first.weights.sha256 != second.weights.sha256
    assert first.stages == second.stages


def test_bfloat16_and_float16_are_widened_exactly(tmp_path: Path) -> None:
    import ml_dtypes

    for dtype in (np.float16, ml_dtypes.bfloat16):
        weights = {n: t.astype(dtype) for n, t in tiny_checkpoint.tensors().items()}
        folder = tiny_checkpoint.write(tmp_path / np.dtype(dtype).name, weights=weights)
        bundle = intaglio.export(folder, tmp_path / "bundle")
        assert bundle.language_model.quantization[0].bits == 16
        graph = ir.load(tmp_path / "bundle" / "score.onnx").graph
        for name, expected in weights.items():
            np.testing.assert_array_equal(graph.initializers[name].const_value.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_rounded_to_the_dtype(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    bundle = intaglio.export(checkpoint, tmp_path / "bundle", dtype=dtype)
    assert bundle.dtype == read_bundle(tmp_path / "bundle").dtype == dtype
    wide = tiny_checkpoint.tensors()
    assert bundle.weights.bytes < 0.6 * sum(t.nbytes for t in wide.values()) + 4096 * len(wide)
    graph = ir.load(tmp_path / "bundle" / "score.onnx").graph
    for name, tensor in wide.items():
        expected = tensor.astype(getattr(ml_dtypes, dtype, dtype))
        stored = graph.initializers[name].const_value
        assert stored.dtype.numpy() == expected.dtype
        np.testing.assert_array_equal(stored.numpy(), expected)


@pytest.mark.parametrize("at", [0, 5000])  # in the first chunk that is read and in a later one
def test_a_weight_beyond_the_dtype_is_named(
    checkpoint: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from intaglio.exporters import weights as writer

    monkeypatch.setattr(writer, "_CHUNK_BYTES", 4096)
    intaglio.export(checkpoint, tmp_path / "bundle")
    before = contents(tmp_path / "bundle")
    tensors = tiny_checkpoint.tensors()
    flat = tensors["model.embed_tokens.weight"].reshape(-1)
    flat[at], flat[at + 2500] = 65521, -1.5e6  # the larger one is in a later chunk
    tiny_checkpoint.write(checkpoint, weights=tensors)
    name = r"model\.embed_tokens\.weight"
    with pytest.raises(
        WeightsError, match=name + r": its largest magnitude is 1\.5e\+06, beyond float16's 65504; .*--dtype bfloat16"
    ):
        intaglio.export(checkpoint, tmp_path / "bundle", dtype="float16")
    assert contents(tmp_path / "bundle") == before
    assert nothing_left(tmp_path)
    intaglio.export(checkpoint, tmp_path / "bundle", dtype="bfloat16")
    flat[at] = 3.4e38  # beyond bfloat16 too, since it rounds up
    tiny_checkpoint.write(checkpoint, weights=tensors)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(WeightsError, match=name + r": its largest magnitude is 3\.4e\+38, .*--dtype float32"):
            intaglio.export(checkpoint, tmp_path / "bundle", dtype=dtype)


def test_the_largest_float16_is_not_beyond_it(checkpoint: Path, tmp_path: Path) -> None:
    weights = tiny_checkpoint.tensors()
    weights["model.norm.weight"][:2] = 65519.0, np.inf  # rounds down; infinite in the source stays so
    tiny_checkpoint.write(checkpoint, weights=weights)
    intaglio.export(checkpoint, tmp_path / "bundle", dtype="float16")
    stored = ir.load(tmp_path / "bundle" / "score.onnx").graph.initializers["model.norm.weight"].const_value
    assert stored.numpy()[:2].tolist() == [65504.0, np.inf]


def test_what_becomes_zero_is_counted(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intaglio.exporters.weights._CHUNK_BYTES", 4096)  # the tensor comes in two chunks
    weights = tiny_checkpoint.tensors()
    weights["model.layers.0.mlp.up_proj.weight"][3, :5] = 1e-8, -1e-9, 2.9e-8, 6e-8, 0.0  # the fourth is subnormal
    weights["model.layers.0.mlp.up_proj.weight"][40, 7] = 1e-8
    tiny_checkpoint.write(checkpoint, weights=weights)
    assert intaglio.export(checkpoint, tmp_path / "bundle").weights.flushed_to_zero == 0
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", dtype="float16")
    assert bundle.weights.flushed_to_zero == read_bundle(tmp_path / "bundle").weights.flushed_to_zero == 4
    assert intaglio.export(checkpoint, tmp_path / "bundle", dtype="bfloat16").weights.flushed_to_zero == 0


def test_stages_can_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", stages=["score"], hidden_states=[0, 2])
    assert list(bundle.stages) == ["score"]
    assert [o.name for o in bundle.stages["score"].outputs] == ["logits", "hidden_states.0", "hidden_states.2"]
    assert not (tmp_path / "bundle" / "generate.onnx").exists()


def test_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    bundle = intaglio.export(checkpoint, tmp_path / "bundle", dry_run=True)
    assert bundle.weights.bytes > 0
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_config_can_be_set(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", config={"rope_theta": None})
    with pytest.raises(ConfigError, match=r"config\.json: has no rope_theta.*--config rope_theta=VALUE"):
        intaglio.export(folder, tmp_path / "bundle")
    bundle = intaglio.export(folder, tmp_path / "bundle", config={"rope_theta": 500.0})
    assert bundle.language_model.config["rope_theta"] == 500.0
    with pytest.raises(ConfigError, match="rope_thet: llama does not read it; read are attention_bias"):
        intaglio.export(folder, tmp_path / "bundle", config={"rope_theta": 1.0, "rope_thet": 500.0})


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
REQUIRED += ["hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_needed_key_is_never_made_up(key: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", config={key: None})
    with pytest.raises(ConfigError, match=rf"config\.json: has no {key}"):
        intaglio.export(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; built is only 'silu'"),
        ({"rope_scaling": {"type": "nonsense", "factor": 2.0}}, "nonsense"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected an integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number from 1e-20"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*built are .*LlamaFor"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"num_hidden_layers": 10**9}, "layers, the checkpoint has 2"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776, expected an integer from 1 to 2147483647"),
        ({"head_dim": 2**30}, "head_dim is 1073741824, expected at most 65536"),
        ({"rope_theta": 10**400}, "rope_theta is an integer of many digits"),
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300"),
        ({"architectures": [{"a": 1}]}, "architectures is .* expected a list of class names"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config"),
    ],
)
def test_configs_that_are_not_built_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", config=changes)
    with pytest.raises((ConfigError, WeightsError), match=message):
        intaglio.export(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_all_missing_tensors_and_wrong_shapes_are_listed_at_once(tmp_path: Path) -> None:
    weights = tiny_checkpoint.tensors()
    del weights["model.norm.weight"], weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 32), np.float32)
    weights["model.layers.0.self_attn.rotary.weight"] = np.zeros(3, np.float32)
    for layer in range(2):
        del weights[f"model.layers.{layer}.mlp.up_proj.weight"]
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", weights=weights)
    with pytest.raises(WeightsError) as caught:
        intaglio.export(folder, tmp_path / "bundle")
    message = str(caught.value)
    assert "4 of 20 tensors are missing" in message
    assert "model.layers.N.mlp.up_proj.weight [48, 32] (N = 0-1)" in message
    assert "model.norm.weight [32]" in message
    assert "model.layers.1.self_attn.k_proj.weight [16, 32]" in message
    assert "model.layers.0.mlp.down_proj.weight is [48, 32], expected [32, 48]" in message
    assert "1 tensors are unknown to the architecture (--allow-unused" in message
    assert nothing_left(tmp_path)


def test_unused_tensors_are_an_error_or_listed(tmp_path: Path) -> None:
    weights = {**tiny_checkpoint.tensors(), "extra.weight": np.zeros(2, np.float32)}
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", weights=weights)
    with pytest.raises(WeightsError, match=r"extra\.weight"):
        intaglio.export(folder, tmp_path / "bundle")
    assert intaglio.export(folder, tmp_path / "bundle", allow_unused=True).language_model.unused_tensors == (
        "extra.weight",
    )
    # A stored copy of a tied head is known, so it is listed without being asked.
    weights = {**tiny_checkpoint.tensors(), "lm_head.weight": np.zeros((260, 32), np.float32)}
    tiny_checkpoint.write(folder, weights=weights)
    assert intaglio.export(folder, tmp_path / "bundle").language_model.unused_tensors == ("lm_head.weight",)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    weights = tiny_checkpoint.tensors()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int32)
    folder = tiny_checkpoint.write(tmp_path / "checkpoint", weights=weights)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is I32"):
        intaglio.export(folder, tmp_path / "bundle")


@pytest.mark.parametrize(("name", "first_bytes"), [("pytorch_model.bin", b"PK\x03\x04"), ("model.pt", b"\x80\x02}q")])
def test_pickles_are_refused_with_advice(name: str, first_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(first_bytes + bytes(100))
    for path in (tmp_path / "m", tmp_path / "m" / name):
        with pytest.raises(CheckpointError, match=r"pickle.*safetensors"):
            intaglio.export(path, tmp_path / "bundle")


def test_a_folder_that_is_no_bundle_is_never_replaced(checkpoint: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match="is not a bundle, so it is not replaced"):
        intaglio.export(checkpoint, precious)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not a bundle"):
        intaglio.export(checkpoint, tmp_path / "file")
    assert contents(precious) == {"thesis.txt": b"years"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": ["paint"]}, "the stage 'paint' is unknown; llama has generate, score"),
        ({"stages": []}, "no stage is chosen"),
        ({"dtype": "int8"}, "the dtype 'int8' is unknown; there are float32, float16, bfloat16"),
        ({"hidden_states": [3]}, "hidden states of layer 3 are asked for; the model has 0 to 2"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        intaglio.export(checkpoint, tmp_path / "bundle", **arguments)
    assert not (tmp_path / "bundle").exists()


def test_what_lies_beside_a_bundle_is_never_deleted(checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "bundle")
    (tmp_path / "bundle" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes\.txt beside the bundle"):
        intaglio.export(checkpoint, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "notes.txt").read_text() == "mine"


def test_a_link_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "disk" / "bundle")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "bundle")
    intaglio.export(checkpoint, tmp_path / "link", stages=["score"])
    assert (tmp_path / "link").is_symlink()
    assert list(read_bundle(tmp_path / "disk" / "bundle").stages) == ["score"]
    assert nothing_left(tmp_path)
    assert nothing_left(tmp_path / "disk")


def test_the_working_folder_is_not_replaced(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for target in (".", ".."):
        with pytest.raises(OutputError, match="is the working folder"):
            intaglio.export(checkpoint, target)


def test_a_writer_that_is_alive_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """Two exports to one target at a time: both finish, and nothing is left but a whole bundle."""
    from intaglio.output import replaced_folder

    with replaced_folder(tmp_path / "bundle") as partial:
        intaglio.export(checkpoint, tmp_path / "bundle")
        assert partial.is_dir()
        intaglio.export(checkpoint, partial / "inner")
    assert (tmp_path / "bundle" / "inner" / "bundle.json").is_file()
    assert nothing_left(tmp_path)


def test_cancelling_leaves_the_old_bundle(checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "bundle")
    before = contents(tmp_path / "bundle")
    weights = tiny_checkpoint.tensors(seed=1)
    tiny_checkpoint.write(checkpoint, weights=weights)
    with pytest.raises(CancelledError):
        intaglio.export(checkpoint, tmp_path / "bundle", progress=lambda event: event.done < 4096)
    assert contents(tmp_path / "bundle") == before
    assert nothing_left(tmp_path)


KILLED_EXPORT = """
import os, signal, sys
import intaglio
def kill(event):
    if event.done > 4096:
        os.kill(os.getpid(), signal.SIGKILL)
intaglio.export(sys.argv[1], sys.argv[2], progress=kill)
"""


def test_a_killed_export_leaves_the_old_bundle_and_nothing_that_looks_whole(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "bundle"
    for before in (None, "exported"):
        if before:
            intaglio.export(checkpoint, target)
        old = contents(target) if target.exists() else None
        done = subprocess.run([sys.executable, "-c", KILLED_EXPORT, checkpoint, target], check=False)
        assert done.returncode == -signal.SIGKILL
        assert (contents(target) if target.exists() else None) == old
        leftovers = [p for p in target.parent.iterdir() if p != target]
        assert leftovers, "the kill came too late to test anything"
        assert not any((p / "bundle.json").exists() for p in leftovers)
    # The next export clears away what the dead one left.
    intaglio.export(checkpoint, target)
    assert [p.name for p in target.parent.iterdir()] == ["bundle"]
    read_bundle(target)


def test_an_exchange_cut_short_is_completed_by_the_next_writer(checkpoint: Path, tmp_path: Path) -> None:
    """Where folders cannot be exchanged, the old one is moved aside first; a kill between leaves only that."""
    intaglio.export(checkpoint, tmp_path / "bundle")
    before = contents(tmp_path / "bundle")
    (tmp_path / "bundle").rename(tmp_path / ".bundle.old")
    with pytest.raises(BundleError, match=r"cut short; the old one lies whole in .*\.bundle\.old"):
        read_bundle(tmp_path / "bundle")
    with pytest.raises(CancelledError):
        intaglio.export(checkpoint, tmp_path / "bundle", progress=lambda event: False)
    assert contents(tmp_path / "bundle") == before


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_works_with_and_without_an_exchange(
    can_exchange: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr("intaglio.output._exchange", lambda a, b: False)
    intaglio.export(checkpoint, tmp_path / "bundle")
    (tmp_path / "bundle" / "engines").mkdir()
    intaglio.export(checkpoint, tmp_path / "bundle", stages=["score"])
    assert list(read_bundle(tmp_path / "bundle").stages) == ["score"]
    assert not (tmp_path / "bundle" / "engines").exists()
    assert nothing_left(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists() or os.geteuid() != 0, reason="mounts a small file system as root")
def test_a_full_disk_is_one_clear_error(checkpoint: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(OutputError, match=r"cannot be written.*free space"):
            intaglio.export(checkpoint, disk / "bundle")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: (b / "weights.data").unlink(), r"weights\.data named in bundle\.json are missing"),
        (lambda b: (b / "weights.data").write_bytes(b"x"), "has 1 bytes, expected"),
        (lambda b: (b / "bundle.json").write_text("{"), "damaged or of another schema version"),
        (lambda b: _edit(b, schema_version=1), "schema_version.*another schema version"),
        (lambda b: _edit(b, surprise=1), "surprise"),
        (lambda b: _edit(b, weights={**_read(b)["weights"], "file": "../../etc/passwd"}), r"weights\.file"),
        (lambda b: (b / "bundle.json").unlink(), r"holds no bundle\.json"),
        (lambda b: _edit(b, stages={"../../stolen": _read(b)["stages"]["score"]}), "stages"),
        (lambda b: _edit(b, stages={}), "stages"),
        (lambda b: _edit(b, components={"language_model": _component(b, config={})}), "vocab_size is None"),
        (lambda b: _edit(b, components={"vae": _component(b)}), "has vae, which a bundle for text-generation has not"),
        (lambda b: _edit(b, kind="text-to-image", components={"vae": _component(b)}), "text_to_image belongs"),
        (lambda b: _edit(b, dims={"batch": {"min": 1, "max": 2}}), "which dims lacks"),
        (lambda b: (b / "weights.data").rename(b / "w") and (b / "weights.data").symlink_to(b / "w"), "is a link"),
        (lambda b: _edit(b, dims={"batch": {"min": 4, "max": 2}}), "must rise"),
        (lambda b: _edit(b, dims={"batch": {"min": 1, "max": 2, "expression": "past +"}}), "cannot be read"),
        (lambda b: _edit(b, dims={"batch": {"min": 1, "max": 2, "expression": "a ** b"}}), "may hold only names"),
    ],
)
def test_damaged_bundles(damage: Any, message: str, checkpoint: Path, tmp_path: Path) -> None:
    intaglio.export(checkpoint, tmp_path / "bundle")
    damage(tmp_path / "bundle")
    with pytest.raises(BundleError, match=message):
        intaglio.compile(tmp_path / "bundle")


def _read(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "bundle.json").read_text())


def _component(bundle: Path, **changes: Any) -> dict[str, Any]:
    return {**_read(bundle)["components"]["language_model"], **changes}


def _edit(bundle: Path, **changes: Any) -> None:
    (bundle / "bundle.json").write_text(json.dumps({**_read(bundle), **changes}))


def test_a_single_file_takes_the_config_beside_it(checkpoint: Path, tmp_path: Path) -> None:
    a = intaglio.export(checkpoint / "model.safetensors", tmp_path / "a")
    b = intaglio.export(checkpoint, tmp_path / "b")
    assert a.weights == b.weights
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: is missing or empty"):
        intaglio.export(checkpoint, tmp_path / "c")


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    whole = tiny_checkpoint.write(tmp_path / "whole")
    sharded = tiny_checkpoint.write(tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    names = list(tiny_checkpoint.tensors())
    weight_map = {}
    for i in range(3):
        shard = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({n: tiny_checkpoint.tensors()[n] for n in names[i::3]}, sharded / shard)
        weight_map |= dict.fromkeys(names[i::3], shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    a, b = intaglio.export(whole, tmp_path / "a"), intaglio.export(sharded, tmp_path / "b")
    assert (a.stages, a.weights) == (b.stages, b.weights)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing.*model-00002-of-00003\.safetensors"):
        intaglio.export(sharded, tmp_path / "c")
