"""Checks and times the Triton kernels against torch where an NVIDIA GPU is: `python tests/gpu/check_kernels.py`.

Takes about four minutes and prints JSON: the device and versions, errors against float64, and times. A product's speed
is told as a fraction of torch's bfloat16 matmul, of few rows as a fraction of the memory's speed (a copy timed in the
same run), attention's as a fraction of torch's. `--quick` leaves out the search for better tiles. Needs the packages
intaglio, torch (2.9 or later) and triton (3.5 or later). Exits with 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from intaglio.kernels.cuda.tiles import AttentionTile, MatmulTile, attention_tile, ternary_tile
from intaglio.trainer.ops import launch
from intaglio.trainer.ops.attention import flash_attention, launch_attention
from intaglio.trainer.ops.ternary import dequantize_ternary, launch_int8_matmul, launch_matmul, ternary_matmul

DEVICE = torch.device("cuda")
GROUP_SIZE = 128
# The largest matmuls of FLUX.2-klein's transformer: inputs and outputs.
SHAPES = ((3072, 9216), (9216, 3072))
MANY_ROWS = 1536
DTYPES = (torch.float16, torch.bfloat16)
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 1e-4}
# Seconds of searching for tiles in all, and the wall clock that the checks get.
SEARCH_SECONDS = 100.0


def ternary_weight(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 3, (outputs, inputs), device=DEVICE, dtype=torch.uint8).view(outputs, -1, 4)
    packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
    scales = (torch.rand(outputs, inputs // GROUP_SIZE, device=DEVICE) + 0.5) * 0.02
    return packed.contiguous(), scales.to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not found.isfinite().all():
        return math.inf
    return float((found.double() - expected).norm() / expected.norm())


def seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of one call, replayed as a CUDA graph so that Python's own time is left out."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times[3:])[repeats // 2]


def check_products() -> Iterator[dict[str, Any]]:
    """Errors of the products, for rows of every kind of tile."""
    shapes = ((1, 512, 1000), (7, 3072, 257), (16, 512, 1000), (33, 3072, 257), (200, 512, 1000))
    for dtype, (rows, inputs, outputs) in itertools.product(DTYPES, shapes):
        codes, scales = ternary_weight(outputs, inputs, dtype)
        weight = dequantize_ternary(codes.cpu(), scales.cpu(), torch.float64).to(DEVICE)
        x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        expected = x.double() @ weight.T
        found = {
            "ternary": (ternary_matmul(x, codes, scales), BOUNDS[dtype]),
            "ternary, float32 scales": (ternary_matmul(x, codes, scales.float()), BOUNDS[dtype]),
            "ternary, int8": (ternary_matmul(x, codes, scales, int8=True), 1.5e-2),
            "dequantized": (x @ dequantize_ternary(codes, scales, dtype).T, BOUNDS[dtype]),
        }
        for name, (y, bound) in found.items():
            shape = [rows, inputs, outputs]
            yield {"what": name, "dtype": str(dtype), "shape": shape, "error": error(y, expected), "bound": bound}


def check_attention() -> Iterator[dict[str, Any]]:
    """Errors of attention and its gradients against the reference on the CPU in float64."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    cases = [(half, 64, ""), (half, 40, "mask"), (half, 128, "causal"), (half, 256, "softcap")]
    cases += [(brain, 128, ""), (brain, 64, "causal"), (single, 64, "mask"), (single, 128, "")]
    for dtype, head_dim, kind in cases:
        shapes = ((2, 4, 150, head_dim), (2, 2, 150, head_dim), (2, 2, 150, head_dim))
        tensors = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]
        mask = torch.rand(2, 1, 150, 150, device=DEVICE) > 0.3 if kind == "mask" else None
        options: dict[str, Any] = {"is_causal": kind == "causal", "softcap": 2.0 if kind == "softcap" else 0.0}
        leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
        expected = flash_attention(*leaves, None if mask is None else mask.cpu(), **options)
        gradient = torch.randn(expected.shape, device=DEVICE).to(dtype)
        expected.backward(gradient.double().cpu())
        found = flash_attention(*tensors, mask, **options)
        found.backward(gradient)
        pairs = {"attention": (found.detach(), expected.detach())}
        pairs |= {
            f"gradient of {name}": (tensor.grad, leaf.grad)
            for name, tensor, leaf in zip(("query", "key", "value"), tensors, leaves, strict=True)
        }
        for name, (ours, theirs) in pairs.items():
            bound = BOUNDS[dtype] * (1 if name == "attention" else 2)
            what = {"what": f"{name} {kind}".strip(), "dtype": str(dtype), "head_dim": head_dim}
            yield what | {"error": error(ours, theirs.to(DEVICE)), "bound": bound}


def matmul_tiles(few: bool) -> Iterator[MatmulTile]:
    """Tiles to try beside the chosen ones."""
    if few:
        for columns, depth, warps, stages in itertools.product((16, 32, 64), (128, 256), (2, 4), (3, 5)):
            yield MatmulTile(16, columns, depth, warps, stages, swapped=True, band=1)
        return
    for (rows, columns, warps), depth, swapped, stages in itertools.product(
        ((128, 128, 4), (128, 128, 8), (128, 256, 8), (64, 128, 4), (256, 64, 8)), (64, 128), (False, True), (3, 4)
    ):
        yield MatmulTile(rows, columns, depth, warps, stages, swapped)


def best(chosen: Any, others: Iterator[Any], run: Callable[[Any], Any], limit: float) -> tuple[Any, float]:
    """The fastest tile found within ``limit`` seconds, and its time."""
    fastest, least = chosen, seconds(lambda: run(chosen))
    end = time.monotonic() + limit
    for tile in others:
        if time.monotonic() > end:
            break
        try:
            needed = seconds(lambda tile=tile: run(tile), 7)  # type: ignore[misc]
        except (triton.runtime.errors.OutOfResources, RuntimeError):  # a tile too large for this GPU or compiler
            continue
        if needed < least:
            fastest, least = tile, seconds(lambda tile=tile: run(tile))  # type: ignore[misc]
    return fastest, least


def copy_speed() -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.empty(1 << 28, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def time_many_rows(limit: float) -> Iterator[dict[str, Any]]:
    for inputs, outputs in SHAPES:
        codes, scales = ternary_weight(outputs, inputs, torch.bfloat16)
        dense = dequantize_ternary(codes, scales, torch.bfloat16)
        x = torch.randn(MANY_ROWS, inputs, device=DEVICE).bfloat16()
        torch_s = seconds(lambda x=x, dense=dense: x @ dense.T)  # type: ignore[misc]
        chosen = ternary_tile(MANY_ROWS, outputs, inputs, GROUP_SIZE, True, *launch.architecture(DEVICE))
        ours_s = seconds(lambda x=x, c=codes, s=scales: launch_matmul(x, c, s))  # type: ignore[misc]

        def run(tile: MatmulTile, x: Any = x, c: Any = codes, s: Any = scales) -> Any:
            return launch_matmul(x, c, s, tile)

        tile, tuned_s = best(chosen, matmul_tiles(few=False), run, limit)
        int8_s = seconds(lambda x=x, c=codes, s=scales: launch_int8_matmul(x, c, s))  # type: ignore[misc]
        dense_s = seconds(
            lambda x=x, c=codes, s=scales: x @ dequantize_ternary(c, s, torch.bfloat16).T  # type: ignore[misc]
        )
        yield {
            "what": "ternary matmul, bfloat16, fractions of torch's matmul",
            "shape": [MANY_ROWS, inputs, outputs],
            "torch_tflops": 2e-12 * MANY_ROWS * inputs * outputs / torch_s,
            "chosen": torch_s / ours_s,
            "tuned": torch_s / tuned_s,
            "int8": torch_s / int8_s,
            "dequantize_then_torch": torch_s / dense_s,
            "chosen_tile": dataclasses.asdict(chosen),
            "tuned_tile": dataclasses.asdict(tile),
        }


def time_few_rows(limit: float, bytes_per_second: float) -> Iterator[dict[str, Any]]:
    inputs, outputs = SHAPES[0]
    # So many weights, one after the other, that none is left in the cache when its turn comes again.
    weights = [ternary_weight(outputs, inputs, torch.bfloat16) for _ in range(64)]
    for rows in (1, 4, 16):
        x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
        chosen = ternary_tile(rows, outputs, inputs, GROUP_SIZE, True, *launch.architecture(DEVICE))

        def run(tile: MatmulTile, x: Any = x) -> None:
            for codes, scales in weights:
                launch_matmul(x, codes, scales, tile)

        ours_s = seconds(lambda run=run, chosen=chosen: run(chosen)) / len(weights)  # type: ignore[misc]
        splits = [chosen.splits, 1, 2, 4]
        tiles = (dataclasses.replace(t, splits=s) for t in matmul_tiles(few=True) for s in dict.fromkeys(splits))
        tile, tuned_s = best(chosen, tiles, run, limit)
        moved = sum(codes.nbytes + scales.nbytes for codes, scales in weights) / len(weights)
        moved += x.nbytes + 2 * rows * outputs
        yield {
            "what": "ternary matmul, few rows, fractions of the memory's speed",
            "shape": [rows, inputs, outputs],
            "chosen": moved / ours_s / bytes_per_second,
            "tuned": moved / (tuned_s / len(weights)) / bytes_per_second,
            "chosen_tile": dataclasses.asdict(chosen),
            "tuned_tile": dataclasses.asdict(tile),
        }


def attention_tiles() -> Iterator[AttentionTile]:
    for (queries, keys, warps), stages in itertools.product(
        ((128, 64, 8), (128, 64, 4), (64, 64, 4), (128, 32, 4), (128, 128, 8)), (2, 3, 4)
    ):
        yield AttentionTile(queries, keys, warps, stages)


def time_attention(limit: float) -> Iterator[dict[str, Any]]:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for head_dim, causal in ((128, False), (128, True), (64, True)):
        q, k, v = (torch.randn(1, 24, 4096, head_dim, device=DEVICE).bfloat16() for _ in range(3))
        scale = 1 / math.sqrt(head_dim)

        def theirs(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
            return sdpa(q, k, v, is_causal=causal)

        def ours(tile: Any = None, q: Any = q, k: Any = k, v: Any = v, s: float = scale, causal: bool = causal) -> Any:
            return launch_attention(q, k, v, None, causal, s, 0.0, 0, tile)

        torch_s, ours_s = seconds(theirs), seconds(ours)
        chosen = attention_tile(head_dim, 2, launch.architecture(DEVICE)[0])
        tile, tuned_s = best(chosen, attention_tiles(), ours, limit)
        yield {
            "what": "attention, bfloat16, fractions of torch's",
            "shape": [1, 24, 4096, head_dim],
            "causal": causal,
            "torch_ms": torch_s * 1e3,
            "chosen": torch_s / ours_s,
            "tuned": torch_s / tuned_s,
            "with_backward": both_ways(sdpa, q, k, v, causal) / both_ways(flash_attention, q, k, v, causal),
            "chosen_tile": dataclasses.asdict(chosen),
            "tuned_tile": dataclasses.asdict(tile),
        }


def both_ways(attention: Any, *tensors: Any) -> float:
    """The median time of a forward and a backward pass, by the clock of the GPU."""
    *inputs, causal = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    gradient = torch.randn_like(inputs[0])
    times = []
    for _ in range(12):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        attention(*leaves, is_causal=causal).backward(gradient)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times[2:])[5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="time the chosen tiles only")
    parser.add_argument("--output", help="a file for the JSON, besides standard output")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    started = time.monotonic()
    limit = 0.0 if arguments.quick else SEARCH_SECONDS / 8
    properties = torch.cuda.get_device_properties(DEVICE)
    report: dict[str, Any] = {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
    }
    torch.manual_seed(0)
    checks = [*check_products(), *check_attention()]
    wrong = [check for check in checks if not check["error"] <= check["bound"]]
    report["checks"] = {"run": len(checks), "wrong": wrong, "worst": max(checks, key=lambda c: c["error"] / c["bound"])}
    report["check_seconds"] = round(time.monotonic() - started, 1)
    speed = copy_speed()
    report["copy_gb_per_second"] = speed / 1e9
    report["times"] = [*time_many_rows(limit), *time_few_rows(limit, speed), *time_attention(limit)]
    report["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
