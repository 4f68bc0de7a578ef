"""Tables and chart of a benchmark's JSON."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    bench_table = importlib.import_module("bench_table")


def _row(**values: object) -> dict[str, object]:
    return {
        "kernel": "grouped_quant_matmul", "format": "ternary", "group_size": 128, "shape": [1536, 3072, 9216],
        "accuracy": "fast", "instruction_set": "avx512_vnni", "ours_gops": 800.0, "ceiling_gops": 1000.0,
        "of_ceiling": 0.8, "ceiling_valid": True, "onnxruntime_matmulnbits_gops": 250.0,
        "onnxruntime_matmulinteger_gops": None, "times_onnxruntime_matmulnbits": 3.2,
        "times_onnxruntime_matmulinteger": None, "relative_l2": 0.0064, "relative_l2_outliers": 0.022, **values,
    }  # fmt: skip


RESULT = {
    "machine": {
        "processor": "A & B", "threads": 2, "processor_features": ["avx2"], "alternations": 20,
        "load_average_before": 0.1,
    },
    "ceilings": {
        "clock_ghz": 2.0, "vpdpbusd_zmm_gops": 1000.0, "vpdpbusd_zmm_share_of_ports": 0.98, "vpdpbusd_zmm_valid": True,
        "sdot_gops": None,
    },
    "rows": [_row(), _row(accuracy="exact", ours_gops=200.0)],
}  # fmt: skip


def test_tables_and_chart_show_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RESULT))
    assert bench_table.main([str(tmp_path / "a.json"), "--chart", str(tmp_path / "a.svg")]) == 0
    text = capsys.readouterr().out
    assert "| vpdpbusd_zmm | 1000 | 0.98 | yes |" in text
    assert "sdot" not in text
    expected = "| ternary | 128 | 1536 x 3072 x 9216 | fast | avx512_vnni | 800 | 1000 | 0.8 | yes | 3.2 | - |"
    assert expected in text
    svg = ET.parse(tmp_path / "a.svg").getroot()
    rectangles = [element for element in svg if element.tag.endswith("rect")]
    widths = [float(element.attrib["width"]) for element in rectangles][4:]
    # Ours, MatMulNBits and the ceiling; MatMulInteger, which is not there, has no bar.
    assert widths == pytest.approx([416, 130, 520, 104, 130, 520])
