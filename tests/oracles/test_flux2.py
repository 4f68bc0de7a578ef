"""FLUX.2's transformer against diffusers: every tap and the prediction, on tiny models with random weights.

Bounds are those of ``flux2_models.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from diffusers import Flux2Transformer2DModel
from flux2_models import MODULATIONS, SETTINGS, TINY, check, feeds, run_oracle, tiny_model
from run_graph import run_onnxruntime
from stage_runner import RUNNERS, check_golden, run_lowered, write_stage

from intaglio.errors import ConfigError, WeightsError


@dataclass
class Case:
    name: str
    oracle: Flux2Transformer2DModel
    checkpoint: Path
    graph: Path


_CASES: dict[str, Case] = {}


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    if name not in _CASES:
        folder = tmp_path_factory.mktemp(name)
        oracle = tiny_model(TINY[name])
        oracle.save_pretrained(folder / "checkpoint")
        graph = write_stage(folder / "checkpoint", "transformer", folder / "stage")
        _CASES[name] = Case(name, oracle, folder / "checkpoint", graph)
    return _CASES[name]


def over(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", names, indirect=True)


all_models = over(*TINY)
SIZES = [(1, [(1, 1)], 1), (1, [(4, 6)], 7), (2, [(5, 3), (2, 4)], 12), (3, [(2, 2), (3, 1), (1, 5)], 20)]


@all_models
@pytest.mark.parametrize(("batch", "grids", "text"), SIZES)
def test_every_tap_equals_diffusers(case: Case, batch: int, grids: list[tuple[int, int]], text: int) -> None:
    inputs = feeds(TINY[case.name], batch, grids, text)
    found = run_onnxruntime(case.graph, inputs)
    config = case.oracle.config
    # 19 before the blocks, two for each double-stream block, their sum, one for each single-stream block, the output.
    assert len(found) == 19 + 2 * config["num_layers"] + 1 + config["num_single_layers"] + 1
    check(found, run_oracle(case.oracle, inputs))


@all_models
@pytest.mark.parametrize("runner", ["lowered", "tract"])
def test_other_runtimes_agree_with_diffusers(case: Case, runner: str) -> None:
    inputs = feeds(TINY[case.name], 2, [(4, 5), (3, 2)], 9)
    check(RUNNERS[runner](case.graph, inputs), run_oracle(case.oracle, inputs))


def test_klein_has_the_published_named_points(tmp_path: Path) -> None:
    """The 51 that goldens of klein have: in a model of its depth, at a tiny width."""
    config = {**SETTINGS, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 8, "axes_dims_rope": (2,) * 4}
    tiny_model(config).save_pretrained(tmp_path)
    graph = ir.load(write_stage(tmp_path, "transformer", tmp_path / "stage")).graph
    names = [str(output.name) for output in graph.outputs]
    expected = {"x_emb_out", "ctx_emb_out", "rope_cos", "rope_sin", "single_in_hidden_states", "noise_pred"}
    expected |= {*MODULATIONS, *(f"c_{name}" for name in MODULATIONS)}
    expected |= {"single_mod_shift", "single_mod_scale", "single_mod_gate"}
    expected |= {f"double_block{i}_{stream}" for i in range(5) for stream in ("enc", "h")}
    expected |= {f"single_block{i}_h" for i in range(20)}
    assert len(names) == len(expected) == 51
    assert set(names) == expected


def test_each_row_has_positions_and_timestep_of_its_own(tmp_path: Path) -> None:
    oracle = tiny_model(SETTINGS)
    oracle.save_pretrained(tmp_path)
    graph = write_stage(tmp_path, "transformer", tmp_path / "stage")
    rows = [feeds(SETTINGS, 1, [(3, 4)], 6, seed=1), feeds(SETTINGS, 1, [(2, 3), (1, 6)], 6, seed=2)]
    rows[1]["txt_ids"] = rows[1]["txt_ids"] + 5
    together = run_onnxruntime(graph, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    for i, row in enumerate(rows):
        check({name: value[i : i + 1] for name, value in together.items()}, run_oracle(oracle, row))


@all_models
def test_graphs_are_valid_onnx(case: Case) -> None:
    onnx.checker.check_model(str(case.graph), full_check=True)
    for output in ir.load(case.graph).graph.outputs:
        assert output.shape is not None and output.dtype == ir.DataType.FLOAT, output


@over("flux2-klein", "flux2-dev")
def test_graph_text_is_the_golden_one(case: Case, write_goldens: bool) -> None:
    """After an intended change, read the diff, then rewrite the files with ``pytest --write-goldens``."""
    check_golden(case.graph, f"{case.name}.transformer", write=write_goldens)


# --- other dtypes -------------------------------------------------------------------------------------------

# Of every tap: a value is rounded by at most 2 ** -11 or 2 ** -8 of itself; in float16 weights and some twenty
# activations in a row are, in bfloat16, which is widened, weights only. Measured: at most 7.5e-4 and 3.3e-3.
ROUNDED = {"float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("dtype", ROUNDED)
def test_narrow_graphs_stay_near_float32(tmp_path: Path, dtype: str, write_goldens: bool) -> None:
    config = TINY["flux2-dev"]
    oracle = tiny_model(config)
    oracle.save_pretrained(tmp_path)
    graph = write_stage(tmp_path, "transformer", tmp_path / "stage", dtype=dtype)
    inputs = feeds(config, 2, [(4, 5), (3, 2)], 9)
    narrow = {name: narrowed(value, dtype) if name.endswith("states") else value for name, value in inputs.items()}
    expected = run_oracle(oracle, {name: np.asarray(value, inputs[name].dtype) for name, value in narrow.items()})
    for runner in ("lowered", "onnxruntime"):
        # Where bfloat16 is widened to float32, its inputs are.
        given = {n: v.astype(np.float32) if v.dtype == ml_dtypes.bfloat16 else v for n, v in narrow.items()}
        found = RUNNERS[runner](graph, given)
        assert check(found, expected, ROUNDED[dtype]) > 1e-4
    if dtype == "float16":
        assert {value.dtype for value in found.values()} == {np.dtype(np.float16)}
        check_golden(graph, "flux2-dev.transformer.float16", write=write_goldens)


def narrowed(value: np.ndarray, dtype: str) -> np.ndarray:
    return value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def test_float16_residuals_stay_finite(tmp_path: Path) -> None:
    oracle = tiny_model(SETTINGS)
    for ff in (oracle.transformer_blocks[0].ff, oracle.transformer_blocks[0].ff_context):
        ff.linear_in.weight.mul_(5)
        ff.linear_out.weight.mul_(1e5)
    oracle.single_transformer_blocks[0].attn.to_out.weight.mul_(1e5)
    oracle.save_pretrained(tmp_path)
    graph = write_stage(tmp_path, "transformer", tmp_path / "stage", dtype="float16")
    inputs = feeds(SETTINGS, 1, [(4, 5)], 9)
    expected = run_oracle(oracle, inputs)
    for name in ("double_block0_h", "double_block0_enc", "single_block0_h"):
        assert np.abs(expected[name]).max() > 65504, "the model must overflow for this test to say anything"
    found = run_lowered(graph, {n: v.astype(np.float16) if n.endswith("states") else v for n, v in inputs.items()})
    assert all(np.isfinite(value).all() for value in found.values())


# --- configurations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key in SETTINGS if key != "guidance_embeds"])
def test_a_missing_key_is_an_error(tmp_path: Path, key: str) -> None:
    tiny_model(SETTINGS).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"has no {key}, .*--config {key}=VALUE"):
        write_stage(tmp_path, "transformer", tmp_path / "stage")


def test_absent_keys_mean_what_published_files_mean(tmp_path: Path) -> None:
    """FLUX.2 dev's config.json has no guidance_embeds, and out_channels is null in all."""
    tiny_model(TINY["flux2-dev"]).save_pretrained(tmp_path / "dev")
    file = tmp_path / "dev" / "config.json"
    config = json.loads(file.read_text())
    assert config["out_channels"] is None
    del config["guidance_embeds"], config["out_channels"]
    file.write_text(json.dumps(config))
    graph = ir.load(write_stage(tmp_path / "dev", "transformer", tmp_path / "stage"))
    assert [value.name for value in graph.graph.inputs][-1] == "guidance"
    tiny_model(SETTINGS).save_pretrained(tmp_path / "klein")
    with pytest.raises(WeightsError, match=r"2 of .* missing.*\n.*guidance_embedder\.linear_1"):
        write_stage(tmp_path / "klein", "transformer", tmp_path / "stage", config={"guidance_embeds": True})
    with pytest.raises(WeightsError, match=r"2 tensors are unknown.*\n.*guidance_embedder\.linear_1"):
        write_stage(tmp_path / "dev", "transformer", tmp_path / "stage", config={"guidance_embeds": False})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("axes_dims_rope", [16, 16, 16, 14]),
        ("axes_dims_rope", [15, 17, 16, 16]),
        ("axes_dims_rope", [32, 32]),
        ("axes_dims_rope", []),
        ("axes_dims_rope", 64),
        ("timestep_guidance_channels", 33),
        ("mlp_ratio", "3"),
        ("eps", 0),
        ("guidance_embeds", None),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    tiny_model(TINY["flux2-dev"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    if value is None:
        write_stage(tmp_path, "transformer", tmp_path / "stage")  # null is absent
        return
    with pytest.raises(ConfigError, match=rf"{key} is "):
        write_stage(tmp_path, "transformer", tmp_path / "stage")
