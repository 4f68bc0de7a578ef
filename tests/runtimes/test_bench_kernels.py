"""What ``bench --kernels`` says: which ceilings count, how ratios are made, and that all sides get the same work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import intaglio
from intaglio.errors import EngineError, InputError, RuntimeMissingError
from intaglio.kernels.cpu.library import INSTRUCTION_SETS, instruction_set, instruction_sets
from intaglio.kernels.grouped_quant import GroupedQuantFormat, dequantize
from intaglio.runtimes import bench_graphs, bench_kernels
from intaglio.runtimes.bench_ceilings import (
    OPERATIONS_PER_CYCLE,
    Ceilings,
    forced_instruction_set,
    read_bandwidth_of,
    share_of_ports,
)
from intaglio.runtimes.bench_kernels import Attention, Product, judged, tables
from intaglio.scripts.main import app

TERNARY = ("ternary", GroupedQuantFormat(2, 128, 1), False)
AFFINE4 = ("affine4", GroupedQuantFormat(4, 64, 0), True)
PRODUCTS = [
    Product(*TERNARY, 24, 256, 320),
    Product(*AFFINE4, 24, 128, 96),
    Product("int8", GroupedQuantFormat(8, 32, 128), False, 24, 96, 64),
    Product("int8", GroupedQuantFormat(8, 96, 128), False, 24, 96, 64),
    Product(*TERNARY, 1, 256, 320),
]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_kernels.bench_kernels(
        quick=True, threads=2, products=PRODUCTS, attentions=[Attention(2, 40, 16)], rotated_bytes=100_000
    )


def test_a_result_is_an_object_of_machine_ceilings_and_rows(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result, allow_nan=False)).keys() == {"machine", "ceilings", "rows"}
    assert result["machine"]["threads"] == 2
    assert result["machine"]["alternations"] == bench_kernels.QUICK_ALTERNATIONS
    assert set(result["machine"]["instruction_sets"]) <= set(INSTRUCTION_SETS)
    assert result["ceilings"]["clock_ghz"] > 0
    for name in OPERATIONS_PER_CYCLE:
        speed = result["ceilings"][f"{name}_gops"]
        assert (speed is None) == (f"{name}_valid" not in result["ceilings"])
        assert speed is None or speed > 0
    best = instruction_set()
    sets = [best, *(["avx512_vnni"] if best == "amx" else [])]
    for product in PRODUCTS:
        rows = [
            row
            for row in result["rows"]
            if row["shape"] == [product.M, product.K, product.N]
            and (row["bits"], row["group_size"]) == (product.quantization.bits, product.quantization.group_size)
        ]
        expected = [("exact", best), *(("fast", isa) for isa in sets)]
        assert [(row["accuracy"], row["instruction_set"]) for row in rows] == expected
        for row in rows:
            assert row["format"] == product.format
            assert 0 < row["ours_median_gops"] <= row["ours_gops"]
            assert ("read_gbps" in row) == (product.M == 1)


def test_all_sides_compute_the_same_product(result: dict[str, Any]) -> None:
    """Accuracies are small only if activations, codes, scales and offsets mean the same to both."""
    for row in result["rows"]:
        if row["kernel"] == "attention":
            assert row["relative_l2"] < (1e-6 if row["accuracy"] == "exact" else 1e-2)
            assert row["onnxruntime_attention_relative_l2"] < 1e-6
            continue
        bound = 1e-6 if row["accuracy"] == "exact" or row["is_exact_kernel"] else 8e-3
        assert 0 < row["relative_l2"] <= bound
        assert row["relative_l2_outliers"] > 0
        if row["group_size"] == 96:
            assert row["onnxruntime_matmulnbits_gops"] is None
            assert "no blocks of 96" in row["onnxruntime_matmulnbits_reason"]
        else:
            assert row["onnxruntime_matmulnbits_gops"] > 0
            assert 0 < row["onnxruntime_matmulnbits_relative_l2"] < 1.2e-2
        assert (row["onnxruntime_matmulinteger_gops"] is None) == (row["shape"][0] == 1)


def test_one_row_is_counted_in_packed_bytes(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if "read_gbps" in row]
    one = 320 * 256 // 4 + 320 * 2 * 2 + 2  # codes, float16 scales, a scalar in place of offsets
    for row in rows:
        assert row["matrices"] == -(-100_000 // one)
        assert row["packed_bytes"] == row["matrices"] * one
        seconds = row["packed_bytes"] / (row["ours_gbps"] * 1e9)
        assert row["ours_gops"] == pytest.approx(row["matrices"] * 2 * 256 * 320 / seconds / 1e9, rel=0.2, abs=0.06)
        assert row["of_bandwidth"] == pytest.approx(row["ours_gbps"] / row["read_gbps"], rel=0.2, abs=0.01)


@pytest.mark.parametrize(
    ("loop", "per_cycle"), [("vpdpbusd_zmm", 2 * 64 * 2), ("vpdpbusd_ymm", 2 * 32 * 2), ("float32_fma_zmm", 2 * 16 * 2)]
)
def test_a_ceiling_counts_from_85_percent_of_two_ports_on(loop: str, per_cycle: int) -> None:
    clock, threads = 2.5e9, 3
    most = per_cycle * clock * threads
    assert share_of_ports(loop, most, clock, threads) == pytest.approx(1)
    for share, valid in ((0.849, False), (0.851, True), (1.1, True)):
        row = {"ceiling": loop, "ceiling_gops": share * most / 1e9}
        assert judged(row, clock, threads) == {"ceiling_share_of_ports": pytest.approx(share), "ceiling_valid": valid}
        # One thread more, or a faster clock, asks for more.
        assert not judged(row, clock * 1.5, threads)["ceiling_valid"]
        assert not judged(row, clock, threads + 1)["ceiling_valid"]
    assert judged({"ceiling": None}, clock, threads) == {"ceiling_share_of_ports": None, "ceiling_valid": False}


def test_rows_are_judged_by_the_highest_clock_of_the_run(result: dict[str, Any]) -> None:
    clock = 1e9 * result["ceilings"]["clock_ghz"]
    for row in result["rows"]:
        if row["ceiling"] is not None:
            share = share_of_ports(row["ceiling"], 1e9 * row["ceiling_gops"], clock, 2)
            assert row["ceiling_share_of_ports"] == pytest.approx(share, rel=0.01)
            assert row["of_ceiling"] == pytest.approx((row["ours_gops"] or 0) / row["ceiling_gops"], abs=0.01) or (
                row["ours_gops"] is None and row["of_ceiling"] is None
            )


def test_ratios_are_of_the_best_and_of_the_median() -> None:
    turns = bench_kernels._Turns(1)
    turns.seconds = {"ours": [2.0, 1.0, 4.0], "theirs": [3.0, 8.0, 5.0]}
    turns.reasons = {"absent": "it is not here"}
    assert turns.compare("ours", "theirs", 12e9) == {
        "theirs_gops": 4.0,
        "theirs_median_gops": 2.4,
        "times_theirs": 3.0,
        "times_theirs_median": 2.5,
    }
    absent = turns.compare("ours", "absent", 12e9)
    assert absent.pop("absent_reason") == "it is not here"
    assert set(absent.values()) == {None}


def test_every_runner_has_its_turn_before_the_next_round() -> None:
    order: list[str] = []
    turns = bench_kernels._Turns(1)
    for name in ("a", "b"):
        turns.add(name, lambda name=name: order.append(name) or 1.0)  # type: ignore[misc]
    turns.take(3, Ceilings(1), bench_kernels.Progress(None, "bench", 3, "turns"))
    assert "".join(order) == "ab" + "ab" * 3  # the first round warms up
    assert turns.seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_loops_are_there_for_what_the_machine_has() -> None:
    sets = instruction_sets()
    assert sets[0] == "portable"
    found = Ceilings(1)
    for isa, loop in {
        "avx2": "float32_fma_ymm", "avx_vnni": "vpdpbusd_ymm", "avx512": "float32_fma_zmm",
        "avx512_vnni": "vpdpbusd_zmm", "amx": "amx_int8", "neon": "sdot", "neon_i8mm": "smmla",
    }.items():  # fmt: skip
        assert (isa in sets) == (loop in found.loops), isa
    assert found._loop("no_such_loop") == 0
    assert read_bandwidth_of([np.ones(100_000), np.ones(3, np.uint8)], 2) > 0


def test_instruction_sets_are_forced_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTAGLIO_CPU_ISA", raising=False)
    with forced_instruction_set("portable"):
        assert instruction_set() == "portable"
    assert "INTAGLIO_CPU_ISA" not in os.environ
    monkeypatch.setenv("INTAGLIO_CPU_ISA", "abacus")
    with forced_instruction_set("portable"):
        pass
    with pytest.raises(EngineError, match="INTAGLIO_CPU_ISA is 'abacus', expected one of portable"):
        instruction_set()


@pytest.mark.parametrize("product", PRODUCTS[:3])
def test_integer_zero_points_say_what_offsets_say(product: Product) -> None:
    weight = bench_graphs.random_weight(
        (product.N, product.K), product.quantization, product.has_offsets, np.random.default_rng(1)
    )
    dense = dequantize(weight.rows, product.quantization)
    if weight.integer_zero_points is not None:
        scales = weight.rows.scales.astype(np.float64)
        assert (weight.rows.offsets.astype(np.float64) == -scales * weight.integer_zero_points).all()
    if product.format == "ternary":
        assert len(np.unique(np.sign(dense))) == 3
    assert weight.shape == dense.shape


def test_tables_have_a_line_for_each_row(result: dict[str, Any]) -> None:
    found = tables(result)
    assert list(found) == ["products", "products of one row", "attention"]
    assert sum(len(rows) for _, rows in found.values()) == len(result["rows"])
    for columns, rows in found.values():
        assert {len(row) for row in rows} == {len(columns)}


def test_the_command_line_prints_it(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def measure(**options: Any) -> dict[str, Any]:
        asked.update(options)
        return result

    monkeypatch.setattr(bench_kernels, "bench_kernels", measure)
    done = CliRunner().invoke(app, ["bench", "--kernels", "--json", "--quick", "--threads", "3", "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(result))
    assert (asked["quick"], asked["threads"]) == (True, 3)
    done = CliRunner().invoke(app, ["bench", "--kernels"])
    assert "24 x 256 x 320" in done.stdout


def test_what_has_no_meaning_for_kernels_is_refused(tmp_path: Path) -> None:
    for options, message in (
        ({}, "there is nothing to measure: give a bundle, or --kernels"),
        ({"kernels": True, "bundle": tmp_path}, "bundle has no meaning with --kernels"),
        ({"kernels": True, "profile": True}, "profile has no meaning with --kernels"),
        ({"bundle": tmp_path, "quick": True}, "quick has no meaning for a bundle"),
    ):
        with pytest.raises(InputError, match=message):
            intaglio.bench(**options)


def test_who_is_absent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise RuntimeMissingError("torch cannot be run beside ours: No module named 'torch'")

    monkeypatch.setattr(bench_kernels, "Competitor", absent)
    row, *_ = bench_kernels.bench_kernels(quick=True, threads=1, products=[], attentions=[Attention(1, 8, 8)])["rows"]
    assert row["torch_sdpa_seconds"] is None
    assert row["time_of_torch_sdpa"] is None
    assert "No module named 'torch'" in row["torch_sdpa_reason"]
    assert row["onnxruntime_attention_seconds"] is not None
