"""What a profile says of a stage: which operators ran, and how their times add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint

import intaglio
from intaglio.engines.engine import open_engine, read_report
from intaglio.runtimes.profile import summarize


def _event(op: str, us: int, *shapes: list[int]) -> dict[str, object]:
    given = [{"float": shape} for shape in shapes]
    return {"name": f"{op}_kernel_time", "dur": us, "args": {"op_name": op, "input_type_shape": given}}


def test_times_of_one_kind_and_of_like_nodes_are_added() -> None:
    found = summarize(
        1000,
        [
            _event("Add", 100, [2, 3], []),
            _event("MatMul", 500, [2, 3]),
            _event("Add", 150, [4]),
            _event("Add", 50, [4]),
        ],
    )
    assert found["seconds"] == 0.001
    assert found["outside_operators_ms"] == 0.2
    assert found["operators"] == [
        {"op_type": "MatMul", "count": 1, "ms": 0.5, "share": 0.5},
        {"op_type": "Add", "count": 3, "ms": 0.3, "share": 0.3},
    ]
    assert [(node["op_type"], node["shapes"], node["count"]) for node in found["nodes"]] == [
        ("MatMul", "2x3", 1),
        ("Add", "4", 2),
        ("Add", "2x3, scalar", 1),
    ]


def test_every_operator_of_a_picture_stage_is_in_its_profile(klein: Path) -> None:
    report = read_report(klein, "cpu")
    for row in intaglio.bench(klein, height=32, width=32, repeats=2, profile=True)["rows"]:
        profile = row["profile"]
        # The build runs the same graph, at the smallest sizes.
        expected = report.stages[row["stage"]].operators
        assert {kind["op_type"]: kind["count"] for kind in profile["operators"]} == expected
        total = sum(kind["ms"] for kind in profile["operators"]) + profile["outside_operators_ms"]
        assert total == pytest.approx(1e3 * profile["seconds"], abs=0.1)
        assert sum(kind["share"] for kind in profile["operators"]) <= 1


def test_a_language_model_has_profiles_of_prefill_and_decode(tmp_path: Path) -> None:
    intaglio.export(tiny_checkpoint.write(tmp_path / "checkpoint"), tmp_path / "bundle")
    intaglio.compile(tmp_path / "bundle")
    (row,) = intaglio.bench(tmp_path / "bundle", prompt_tokens=5, new_tokens=2, repeats=1, profile=True)["rows"]
    layers = open_engine(tmp_path / "bundle").bundle.language_model.config["num_hidden_layers"]
    for key, tokens in (("prefill_profile", 5), ("decode_profile", 1)):
        attentions = [kind["count"] for kind in row[key]["operators"] if kind["op_type"] == "FusedAttention"]
        assert attentions == [layers]
        assert any(node["shapes"].startswith(f"1x{tokens}x") for node in row[key]["nodes"])
