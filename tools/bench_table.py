"""Makes Markdown tables and an SVG chart of what ``intaglio bench --kernels --json`` printed.

intaglio bench --kernels --json > kernels.json
python tools/bench_table.py kernels.json --chart docs/kernels.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from intaglio.runtimes.bench_kernels import tables

_BAR, _GAP, _LABELS, _WIDTH = 16, 10, 330, 520
_SIDES = (
    ("ours_gops", "ours", "#2b6cb0"),
    ("onnxruntime_matmulnbits_gops", "MatMulNBits", "#a0aec0"),
    ("onnxruntime_matmulinteger_gops", "MatMulInteger", "#cbd5e0"),
    ("ceiling_gops", "ceiling", "#e2e8f0"),
)


def markdown(result: Mapping[str, Any]) -> str:
    """The machine in a line, its ceilings, and a table of each kind of row."""
    machine = result["machine"]
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, {', '.join(machine['processor_features'])}; "
        f"{machine['alternations']} turns; load average before: {machine['load_average_before']}.",
        "",
        *_table(["ceiling", "GOP/s", "of two ports", "counts"], _ceilings(result["ceilings"])),
    ]
    for title, (columns, rows) in tables(result).items():
        lines += ["", f"### {title.capitalize()}", "", *_table(columns, rows)]
    return "\n".join(lines) + "\n"


def _ceilings(ceilings: Mapping[str, Any]) -> list[list[Any]]:
    names = [key.removesuffix("_gops") for key, value in ceilings.items() if key.endswith("_gops") and value]
    return [
        [name, ceilings[f"{name}_gops"], ceilings[f"{name}_share_of_ports"], ceilings[f"{name}_valid"]]
        for name in names
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(map(_cell, cells)) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def chart(result: Mapping[str, Any]) -> str:
    """Bars of the products of many rows: ours, onnxruntime's and the ceiling, in GOP/s."""
    rows = [row for row in result["rows"] if row["kernel"] != "attention" and "read_gbps" not in row]
    most = max((row[key] or 0 for row in rows for key, _, _ in _SIDES), default=0) or 1
    parts, y = [], _GAP
    for index, (_, name, colour) in enumerate(_SIDES):
        x = _LABELS + 130 * index
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{name}</text>')
    y += 2 * _GAP + 12
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        label = f"{row['format']} g{row['group_size']} {shape}, {row['accuracy']}, {row['instruction_set']}"
        parts.append(f'<text x="{_LABELS - 8}" y="{y + 2 * _BAR}" text-anchor="end">{escape(label)}</text>')
        for key, _, colour in _SIDES:
            if row[key]:
                width = _WIDTH * row[key] / most
                parts.append(f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"/>')
                parts.append(f'<text x="{_LABELS + width + 4:.1f}" y="{y + _BAR - 4}">{row[key]:.0f}</text>')
            y += _BAR
        y += _GAP
    size = f'width="{_LABELS + _WIDTH + 60}" height="{y}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; ``--chart`` writes the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--chart", type=Path, help="where the SVG goes")
    options = parser.parse_args(arguments)
    result = json.loads(options.result.read_text("utf-8"))
    sys.stdout.write(markdown(result))
    if options.chart is not None:
        options.chart.write_text(chart(result), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
