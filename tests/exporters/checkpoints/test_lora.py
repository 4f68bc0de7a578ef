"""Reading adapters: what each spelling means, and what bad files are told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.lora import check_finite, is_adapter, open_adapter

Q = "model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": False, "init_lora_weights": True}


def matrices(down: str, up: str, rank: int = 4, width: int = 8, rows: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    shapes = {down: (rank, width), up: (rows, rank)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def peft_pair(module: str = Q, **shape: int) -> dict[str, np.ndarray]:
    return matrices(f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight", **shape)


def write_peft(folder: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors or peft_pair(), folder / "adapter_model.safetensors")
    return folder


def write_file(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def test_peft_scales(tmp_path: Path) -> None:
    tensors = peft_pair() | peft_pair("model.layers.1.self_attn.q_proj", rank=2) | peft_pair("lm_head")
    patterns = {"rank_pattern": {r"layers\.1\..*": 2}, "alpha_pattern": {"lm_head": 20, "layers.1.self_attn.q_proj": 7}}
    adapter = open_adapter(write_peft(tmp_path / "a", tensors, **patterns))
    assert (adapter.spelling, adapter.ranks, len(adapter.files)) == ("peft", (2, 4), 2)
    found = {name: module.scale for name, module in adapter.modules.items()}
    assert found == {Q: 6 / 4, "model.layers.1.self_attn.q_proj": 7 / 2, "lm_head": 20 / 4}
    stable = open_adapter(write_peft(tmp_path / "a", use_rslora=True))
    assert stable.modules[Q].scale == 6 / math.sqrt(4)
    # The file in its folder says the same.
    assert open_adapter(tmp_path / "a" / "adapter_model.safetensors").modules[Q].scale == 3
    np.testing.assert_array_equal(stable.modules[Q].down.read(), peft_pair()[f"base_model.model.{Q}.lora_A.weight"])


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora.down.weight", "lora.up.weight"),
        ("lora_down.weight", "lora_up.weight"),
        ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    ],
)
def test_diffusers_spellings(tmp_path: Path, down: str, up: str) -> None:
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = matrices(f"{name}.{down}", f"{name}.{up}")
    module = open_adapter(write_file(tmp_path / "a.safetensors", tensors)).modules[name]
    # Without an alpha diffusers takes the rank for it.
    assert (module.rank, module.scale) == (4, 1.0)
    tensors[f"{name}.alpha"] = np.array(3, np.float16)
    adapter = open_adapter(write_file(tmp_path / "a.safetensors", tensors))
    assert (adapter.spelling, adapter.modules[name].scale) == ("diffusers", 0.75)


def test_metadata_of_diffusers(tmp_path: Path) -> None:
    parts = {"transformer": "transformer_blocks.0.attn.to_q", "text_encoder": Q}
    tensors = {}
    for part, name in parts.items():
        tensors |= matrices(f"{part}.{name}.lora_A.weight", f"{part}.{name}.lora_B.weight")
    said = {"transformer.r": 4, "transformer.lora_alpha": 8, "text_encoder.r": 4, "text_encoder.lora_alpha": 2}
    metadata = {"lora_adapter_metadata": json.dumps(said)}
    modules = open_adapter(write_file(tmp_path / "a.safetensors", tensors, metadata)).modules
    assert {name.partition(".")[0]: m.scale for name, m in modules.items()} == {"transformer": 2, "text_encoder": 0.5}


def test_kohya(tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = matrices(f"{name}.lora_down.weight", f"{name}.lora_up.weight")
    file = write_file(tmp_path / "a.safetensors", tensors)
    with pytest.raises(
        CheckpointError, match=rf"a\.safetensors: has no {name}\.alpha, which says by what {name}\.lora_"
    ):
        open_adapter(file)
    adapter = open_adapter(write_file(file, {**tensors, f"{name}.alpha": np.array(2.0, np.float32)}))
    assert (adapter.spelling, adapter.modules[name].scale, adapter.modules[name].is_flat) == ("kohya", 0.5, True)


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    file = write_file(tmp_path / "m.safetensors", {f"{Q}.weight": np.zeros((4, 4), np.float32)})
    assert not is_adapter(open_checkpoint(file))
    with pytest.raises(CheckpointError, match="holds no keys of an adapter"):
        open_adapter(file)


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
ZEROS = np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({A: ZEROS}, {}, rf"adapter_model\.safetensors: {A} has no lora_B \(lora_up\) beside it"),
        ({B: ZEROS}, {}, rf"{B} has no lora_A"),
        ({A: ZEROS, B: np.zeros((6, 5), np.float32)}, {}, rf"{A} is \[4, 8\] and {B} \[6, 5\]; expected \[rank, in\]"),
        ({A: ZEROS[:0], B: np.zeros((6, 0), np.float32)}, {}, "of one rank"),
        (peft_pair(rank=3), {}, rf"{A} has the rank 3, and the configuration says 4"),
        ({A: ZEROS.reshape(4, 8, 1, 1), B: ZEROS.T.reshape(8, 4, 1, 1)}, {}, rf"{A} is .* a convolution's adapter"),
        ({A: ZEROS.astype(np.int8), B: ZEROS.T}, {}, f"{A} is stored as I8"),
        (
            {**peft_pair(), A.replace("lora_A.", "lora_magnitude_vector."): ZEROS[0]},
            {},
            "magnitude_vector.* is of DoRA",
        ),
        ({**peft_pair(), "x.hada_w1_a": ZEROS}, {}, r"x\.hada_w1_a is of another method"),
        ({**peft_pair(), "e.lora_embedding_A": ZEROS}, {}, "an adapter of an embedding"),
        ({**peft_pair(), B.replace("weight", "bias"): ZEROS[0]}, {}, "is a bias of an adapter"),
        ({**peft_pair(), "base_model.model.lm_head.weight": ZEROS}, {}, "lm_head.weight is no part of an adapter"),
        ({**peft_pair(), A.replace("lora_A", "lora_A.other"): ZEROS}, {}, "are the same matrix of one module"),
        ({**peft_pair(), "q.alpha": ZEROS[0, :1]}, {}, rf"has no {Q}\.alpha"),
        ({**peft_pair(), f"{Q}.alpha": ZEROS[0, :1], "q.alpha": ZEROS[0, :1]}, {}, r"q\.alpha belongs to no pair"),
        ({**peft_pair(), f"{Q}.alpha": np.float32("nan").reshape(1)}, {}, r"alpha is nan"),
        ({**peft_pair(), f"{Q}.alpha": ZEROS}, {}, r"alpha is \[4, 8\], expected one number"),
        (None, {"lora_alpha": None}, "the configuration's lora_alpha is None, expected a number"),
        (None, {"r": "4"}, "the configuration's r is '4'"),
        (None, {"rank_pattern": {"(": 4}}, r"rank_pattern has '\(', which is no pattern"),
        (None, {"rank_pattern": [4]}, "expected an object"),
        (None, {"use_dora": True}, r"adapter_config\.json: has use_dora True"),
        (None, {"peft_type": "IA3"}, "peft_type is IA3; read is LORA"),
        (None, {"init_lora_weights": "pissa_niter_4"}, "changes the base model too"),
    ],
)
def test_bad_adapters(
    tmp_path: Path, tensors: dict[str, np.ndarray] | None, changes: dict[str, Any], message: str
) -> None:
    folder = write_peft(tmp_path / "a", tensors, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_adapter(folder)


def test_what_lies_where(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is in peft's spelling, whose lora_alpha is in adapter_config\.json"):
        open_adapter(write_file(tmp_path / "a.safetensors", peft_pair()))
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json; expected a folder as peft saves it"):
        open_adapter(tmp_path)
    bad = {"lora_adapter_metadata": "{"}
    with pytest.raises(CheckpointError, match="lora_adapter_metadata is not JSON"):
        open_adapter(write_file(tmp_path / "b.safetensors", matrices("x.lora_A.weight", "x.lora_B.weight"), bad))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("key", [A, B])
def test_values_that_are_not_finite_are_named(tmp_path: Path, key: str, value: float) -> None:
    tensors = peft_pair()
    tensors[key][1, 2] = value
    adapter = open_adapter(write_peft(tmp_path / "a", tensors))
    with pytest.raises(CheckpointError, match=rf"{key} holds 1 values that are not finite"):
        check_finite(adapter)
