"""Compiles the CUDA kernels for one architecture, in a process of its own, and prints their figures as JSON lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def compiled(sm: int) -> list[dict[str, Any]]:
    """The figures of each kernel for ``sm``; the process has no interpreter of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(sm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def variants(sm: int) -> Iterator[tuple[str, Any]]:
    """What is compiled, by name: sizes of FLUX.2-klein, and the widest heads. Plugins are for sm_80 only: later
    GPUs run its PTX.
    """
    from intaglio.kernels.cuda import variants as v

    yield "ternary, many rows, bf16", v.ternary_variant(1536, 9216, 3072, 128, "bf16", "bf16", sm)
    yield "ternary, many rows, fp16, fp32 scales", v.ternary_variant(1536, 9216, 3072, 128, "fp16", "fp32", sm)
    yield "ternary, few rows, bf16", v.ternary_variant(16, 9216, 3072, 128, "bf16", "bf16", sm)
    yield "ternary, many rows, int8", v.ternary_int8_variant(1536, 128, "bf16", "bf16")
    yield "ternary, few rows, int8", v.ternary_int8_variant(16, 128, "bf16", "bf16")
    yield "attention, D 64, fp16", v.attention_variant(64, "fp16", sm, causal=True)
    yield "attention, D 128, bf16", v.attention_variant(128, "bf16", sm)
    yield "attention, D 256, fp16, mask, softcap", v.attention_variant(256, "fp16", sm, mask=2, softcap=True)
    yield "attention, D 128, fp32, mask", v.attention_variant(128, "fp32", sm, mask=1)
    yield "gradient of keys, D 128, bf16", v.key_gradient_variant(128, "bf16", sm, causal=True)
    yield "gradient of queries, D 128, bf16", v.query_gradient_variant(128, "bf16", causal=True)
    if sm == 80:
        yield from _plugins()


def _plugins() -> Iterator[tuple[str, Any]]:
    from intaglio.kernels.cuda import variants as v
    from intaglio.kernels.cuda.tiles import PLUGIN_TILES_FEW_ROWS, PLUGIN_TILES_MANY_ROWS

    for which, tiles in (("many", PLUGIN_TILES_MANY_ROWS), ("few", PLUGIN_TILES_FEW_ROWS)):
        for tile in tiles:
            variant = v.ternary_plugin_variant(tile, 9216, 3072, 128, "fp16", "fp16")
            yield f"plugin: ternary, {which} rows, fp16", variant
    for head_dim in (64, 128, 256):
        variant = v.attention_plugin_variant(head_dim, "fp16", 0.1, softcap=30.0, causal=True)
        yield f"plugin: attention, D {head_dim}, fp16, causal, softcap", variant
    for head_dim in (64, 128, 256):
        variant = v.attention_plugin_variant(head_dim, "fp32", 0.1, mask=2)
        yield f"plugin: attention, D {head_dim}, fp32, mask", variant


def _main(sm: int) -> None:
    from intaglio.kernels.cuda.ahead_of_time import compile_kernel

    for name, variant in variants(sm):
        kernel = compile_kernel(variant, sm)
        sizes = [variant.constants[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if key in variant.constants]
        sizes += [variant.constants[key] for key in ("BLOCK_L", "BLOCK_T", "D") if key in variant.constants]
        figures = {
            "kernel": name,
            "tile": " x ".join(map(str, sizes)),
            "warps": kernel.warps,
            "stages": variant.stages,
            "registers": kernel.registers,
            "stack": kernel.stack_bytes,
            "shared": kernel.shared_bytes,
            "tensor_ops": kernel.tensor_ops,
            "target": re.findall(r"^\.target (\S+)", kernel.ptx, re.MULTILINE)[0],
            "cubin": len(kernel.cubin),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
