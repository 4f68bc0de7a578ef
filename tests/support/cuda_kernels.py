"""Compiles the CUDA kernels ahead of time and tells what they take: the tests' figures, and those of the docs.

`python tests/support/cuda_kernels.py --write-docs` compiles all of them for all architectures (about two minutes) and
writes the tables of `docs/cuda-kernels.md`. `python tests/support/cuda_kernels.py SM [NAME ...]` prints JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cuda-kernels.md"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
_BEGIN, _END = "<!-- tables: written by tests/support/cuda_kernels.py -->\n", "<!-- end of tables -->\n"


def compiled(sm: int, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The figures of each kernel for ``sm``, or of those named; the process has no interpreter of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(sm), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def variants(sm: int) -> Iterator[tuple[str, Any]]:
    """What is compiled, by name: sizes of FLUX.2-klein, and the widest heads."""
    from intaglio.kernels.cuda import variants as v

    yield "ternary, many rows, bf16", v.ternary_variant(1536, 9216, 3072, 128, "bf16", "bf16", sm)
    yield "ternary, many rows, fp16, fp32 scales", v.ternary_variant(1536, 9216, 3072, 128, "fp16", "fp32", sm)
    yield "ternary, few rows, bf16", v.ternary_variant(16, 9216, 3072, 128, "bf16", "bf16", sm)
    yield "ternary, many rows, int8", v.ternary_int8_variant(1536, 128, "bf16", "bf16")
    yield "ternary, few rows, int8", v.ternary_int8_variant(16, 128, "bf16", "bf16")
    yield "attention, D 64, fp16, causal", v.attention_variant(64, "fp16", sm, causal=True)
    yield "attention, D 128, bf16", v.attention_variant(128, "bf16", sm)
    yield "attention, D 256, fp16, mask, softcap", v.attention_variant(256, "fp16", sm, mask=2, softcap=True)
    yield "attention, D 128, fp32, mask", v.attention_variant(128, "fp32", sm, mask=1)
    yield "gradient of keys, D 128, bf16, causal", v.key_gradient_variant(128, "bf16", sm, causal=True)
    yield "gradient of keys, D 256, bf16", v.key_gradient_variant(256, "bf16", sm)
    yield "gradient of queries, D 128, bf16, causal", v.query_gradient_variant(128, "bf16", causal=True)
    yield "gradient of queries, D 256, bf16", v.query_gradient_variant(256, "bf16")


def plugin_variants() -> Iterator[tuple[str, Any]]:
    """The kernels of the plugins, which are compiled for sm_80 alone: later GPUs run its PTX."""
    from intaglio.kernels.cuda import variants as v
    from intaglio.kernels.cuda.tiles import PLUGIN_TILES_FEW_ROWS, PLUGIN_TILES_MANY_ROWS

    for which, tiles in (("many", PLUGIN_TILES_MANY_ROWS), ("few", PLUGIN_TILES_FEW_ROWS)):
        for tactic, tile in enumerate(tiles, 1):
            for scales in ("fp16", "fp32"):
                variant = v.ternary_plugin_variant(tile, 9216, 3072, 128, "fp16", scales)
                yield f"plugin: ternary, {which} rows, tactic {tactic}, {scales} scales", variant
    for head_dim in (40, 64, 128, 256):
        variant = v.attention_plugin_variant(head_dim, "fp16", 0.1, softcap=30.0, causal=True)
        yield f"plugin: attention, D {head_dim}, fp16, causal, softcap", variant
        variant = v.attention_plugin_variant(head_dim, "bf16", 0.1, softcap=30.0, mask=2)
        yield f"plugin: attention, D {head_dim}, bf16, mask, softcap", variant
    for head_dim in (16, 40, 64, 128):
        variant = v.attention_plugin_variant(head_dim, "fp32", 0.1, softcap=30.0, mask=2)
        yield f"plugin: attention, D {head_dim}, fp32, mask, softcap", variant


def tile_of(variant: Any) -> str:
    """``rows x columns x depth`` or ``queries x keys x width``, and what else the launch is made of."""
    constants = variant.constants
    sizes = [constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_L", "BLOCK_T") if name in constants]
    sizes += [constants["WIDTH"]] if "WIDTH" in constants else []
    return f"{' x '.join(map(str, sizes))}, {variant.warps} warps, {variant.stages} stages"


def figures(name: str, variant: Any, sm: int) -> dict[str, Any]:
    from intaglio.kernels.cuda.ahead_of_time import compile_kernel

    kernel = compile_kernel(variant, sm)
    return {
        "kernel": name,
        "tile": tile_of(variant),
        "registers": kernel.registers,
        "stack": kernel.stack_bytes,
        "shared": kernel.shared_bytes,
        "tensor_ops": kernel.tensor_ops,
        "target": re.findall(r"^\.target (\S+)", kernel.ptx, re.MULTILINE)[0],
        "cubin": len(kernel.cubin),
    }


def all_variants(sm: int) -> list[tuple[str, Any]]:
    return [*variants(sm), *(plugin_variants() if sm == 80 else ())]


def tables() -> str:
    """The tables of the docs, of kernels compiled now."""
    by_sm = {sm: {each["kernel"]: each for each in compiled(sm)} for sm in ARCHITECTURES}

    def cell(each: dict[str, Any]) -> str:
        spilled = f", {each['stack']} spilled" if each["stack"] else ""
        return f"{each['registers']} / {each['shared']:,}{spilled}"

    head = ["kernel", "tile", *(f"sm_{sm}" for sm in ARCHITECTURES)]
    lines = [_row(head), _row(["---"] * len(head))]
    for name, _ in variants(80):
        tiles: dict[str, list[int]] = {}
        for sm in ARCHITECTURES:
            tiles.setdefault(by_sm[sm][name]["tile"], []).append(sm)
        first, *others = tiles.items()
        tile = first[0] + "".join(f"; on {' and '.join(map(str, on))} {each}" for each, on in others)
        lines.append(_row([name, tile, *(cell(by_sm[sm][name]) for sm in ARCHITECTURES)]))
    lines += ["", _row(["kernel", "tile", "sm_80"]), _row(["---"] * 3)]
    lines += [_row([name, by_sm[80][name]["tile"], cell(by_sm[80][name])]) for name, _ in plugin_variants()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written_tables() -> str:
    """The tables as the docs have them."""
    return DOCS.read_text().split(_BEGIN)[1].split(_END)[0]


def _main(arguments: list[str]) -> None:
    if arguments == ["--write-docs"]:
        before, rest = DOCS.read_text().split(_BEGIN)
        DOCS.write_text(before + _BEGIN + tables() + _END + rest.split(_END)[1])
        return
    sm, *names = arguments
    for name, variant in all_variants(int(sm)):
        if not names or name in names:
            print(json.dumps(figures(name, variant, int(sm))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
