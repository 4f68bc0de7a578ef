"""Checks and times the Triton kernels against torch where an NVIDIA GPU is: `python tests/gpu/check_kernels.py`.

Takes about four minutes and prints one JSON object: the device and versions, errors against float64, and times. The
speed of a product is told as a fraction of torch's bfloat16 matmul, of few rows as a fraction of the memory's speed (a
copy timed in the same run), of attention as a fraction of torch's. Each part runs in a process of its own, so that one
that crashes or hangs is told as such and the others still run; tiles to try are compiled in parallel while results are
checked. `--quick` leaves out the search for better tiles; `--output FILE` is written after every part.

Needs the packages intaglio, torch (2.9 or later) and triton (3.5 or later). Exits with 0 if all ran and every result is
right, 1 if not, 2 without a GPU. `TRITON_INTERPRET=1 python tests/gpu/check_kernels.py --device cpu --tiny` takes the
same steps in Triton's interpreter, in float16 alone, since it holds bfloat16 as integers; its times say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from intaglio.kernels.cuda.tiles import AttentionTile, MatmulTile, attention_tile, ternary_tile
from intaglio.trainer.ops import launch
from intaglio.trainer.ops.attention import flash_attention, launch_attention, launch_backward
from intaglio.trainer.ops.ternary import (
    dequantize_ternary,
    launch_dequantize,
    launch_int8_matmul,
    launch_matmul,
    ternary_matmul,
)

GROUP_SIZE = 128
DTYPES = (torch.float16, torch.bfloat16)
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 1e-4}
INT8_BOUND = 1.5e-2
# The parts that check and that time, in order. Tiles are compiled beside those that check.
CHECKS, TIMES = ("products", "attention"), ("many_rows", "few_rows", "attention_times")


@dataclass(frozen=True)
class Sizes:
    """What is timed: inputs and outputs of the largest matmuls of FLUX.2-klein's transformer, its tokens, a long
    sequence; ``weights`` so many that none is left in a cache when its turn comes again.
    """

    shapes: tuple[tuple[int, int], ...] = ((3072, 9216), (9216, 3072))
    many_rows: int = 1536
    few_rows: tuple[int, ...] = (1, 4, 8, 16)
    weights: int = 64
    heads: int = 24
    length: int = 4096
    head_dims: tuple[int, ...] = (128, 64)
    copied_bytes: int = 1 << 30
    repeats: int = 20


TINY = Sizes(((256, 64),), 40, (1, 3), 2, 2, 40, (32,), 1 << 12, 1)


@dataclass(frozen=True)
class Run:
    """Where and how large; ``tiles`` is how many of those to try are tried, None for all."""

    device: torch.device
    sizes: Sizes
    tiles: int | None
    # Seconds of searching for a tile in one case.
    limit: float

    @property
    def half(self) -> torch.dtype:
        """What is timed."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float16

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.half)


def ternary_weight(run: Run, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 3, (outputs, inputs), device=run.device, dtype=torch.uint8).view(outputs, -1, 4)
    packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
    scales = (torch.rand(outputs, inputs // GROUP_SIZE, device=run.device) + 0.5) * 0.02
    return packed.contiguous(), scales.to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative L2 of the difference; a million where a result is no number."""
    if found.shape != expected.shape or not found.isfinite().all():
        return 1e6
    return float((found.double() - expected).norm() / expected.norm())


def seconds(run: Run, work: Callable[[], Any], repeats: int | None = None) -> float:
    """The median time of one call; on a GPU replayed as a CUDA graph, so that Python's own time is left out."""
    repeats = repeats or run.sizes.repeats
    work()
    if run.device.type != "cuda":
        return _median(_timed_by_clock(work) for _ in range(repeats))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    return _median(_timed_by_gpu(graph.replay) for _ in range(repeats))


def _median(times: Iterator[float]) -> float:
    listed = sorted(times)
    return listed[len(listed) // 2]


def _timed_by_clock(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _timed_by_gpu(work: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def guarded(what: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``what`` with what ``work`` found, or with how it failed."""
    try:
        return what | work()
    except Exception:
        return what | {"failed": traceback.format_exc(limit=-4)}


def check_products(run: Run) -> Iterator[dict[str, Any]]:
    """Errors of the products, for rows of every kind of tile, against float64."""
    shapes = ((1, 512, 1000), (7, 3072, 257), (16, 512, 1000), (17, 512, 96), (33, 3072, 257), (200, 512, 1000))
    if run.sizes is TINY:
        shapes = ((1, 256, 33), (17, 256, 40))
    dtypes = DTYPES if run.device.type == "cuda" else DTYPES[:1]
    for dtype, (rows, inputs, outputs) in itertools.product(dtypes, shapes):
        codes, scales = ternary_weight(run, outputs, inputs, dtype)
        weight = dequantize_ternary(codes.cpu(), scales.cpu(), torch.float64).to(run.device)
        x = run.randn(rows, inputs, dtype=dtype)
        expected = x.double() @ weight.T
        works = {
            "ternary": (lambda x=x, c=codes, s=scales: launch_matmul(x, c, s), BOUNDS[dtype]),
            "ternary, float32 scales": (lambda x=x, c=codes, s=scales: launch_matmul(x, c, s.float()), BOUNDS[dtype]),
            "ternary, int8": (lambda x=x, c=codes, s=scales: launch_int8_matmul(x, c, s), INT8_BOUND),
            "ternary, operator": (lambda x=x, c=codes, s=scales: ternary_matmul(x, c, s), BOUNDS[dtype]),
            "dequantized": (lambda x=x, c=codes, s=scales: x @ launch_dequantize(c, s, x.dtype).T, BOUNDS[dtype]),
        }
        for name, (work, bound) in works.items():
            what = {"what": name, "dtype": str(dtype), "shape": [rows, inputs, outputs], "bound": bound}
            yield guarded(what, lambda w=work, e=expected: {"error": error(w(), e)})  # type: ignore[misc]


def check_attention(run: Run) -> Iterator[dict[str, Any]]:
    """Errors of attention and its gradients against the reference on the CPU in float64."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    cases = [(half, 64, ""), (half, 40, "mask"), (half, 128, "causal"), (half, 256, "softcap"), (half, 72, "numbers")]
    cases += [(brain, 128, ""), (brain, 64, "causal"), (single, 64, "mask"), (single, 128, "causal")]
    queries, keys = 150, 170
    if run.sizes is TINY:
        cases, queries, keys = [(half, 40, "mask"), (single, 16, "causal")], 33, 40
    for dtype, head_dim, kind in cases:
        what = {"what": f"attention {kind}".strip(), "dtype": str(dtype), "head_dim": head_dim, "bound": BOUNDS[dtype]}
        yield guarded(what, lambda c=(dtype, head_dim, kind): _attention_errors(run, *c, queries, keys))  # type: ignore[misc]


def _attention_errors(
    run: Run, dtype: torch.dtype, head_dim: int, kind: str, queries: int, keys: int
) -> dict[str, Any]:
    shapes = ((2, 4, queries, head_dim), (2, 2, keys, head_dim), (2, 2, keys, head_dim))
    q, k, v = (run.randn(*shape, dtype=dtype) for shape in shapes)
    mask = None
    if kind == "mask":
        mask = torch.rand(2, 1, queries, keys, device=run.device) > 0.3
    elif kind == "numbers":
        mask = torch.randn(1, 4, queries, keys, device=run.device)
    softcap = 2.0 if kind == "softcap" else 0.0
    offset = keys - queries
    leaves = [tensor.double().cpu().requires_grad_() for tensor in (q, k, v)]
    on_cpu = None if mask is None else mask.cpu()
    expected = flash_attention(*leaves, on_cpu, kind == "causal", softcap=softcap, causal_offset=offset)
    gradient = run.randn(*expected.shape, dtype=dtype)
    expected.backward(gradient.double().cpu())
    wide = None if mask is None else mask.expand(2, 4, queries, keys)
    settings = (kind == "causal", 1 / math.sqrt(head_dim), softcap, offset)
    attended, logsumexp = launch_attention(q, k, v, wide, *settings)
    errors = {"error": error(attended, expected.detach().to(run.device))}
    gradients = launch_backward(gradient, q, k, v, wide, attended, logsumexp, *settings)
    for name, found, leaf in zip(("query", "key", "value"), gradients, leaves, strict=True):
        # Twice the bound: a gradient is a product of rounded products.
        errors[f"error of {name}'s gradient"] = error(found, leaf.grad.to(run.device)) / 2
    again = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    flash_attention(*again, mask, kind == "causal", softcap=softcap, causal_offset=offset).backward(gradient)
    errors["error of the operator"] = error(again[0].grad, leaves[0].grad.to(run.device)) / 2
    return errors


def matmul_tiles(rows: int, chosen: MatmulTile) -> Iterator[MatmulTile]:
    """Tiles to try beside the chosen one, the likeliest first."""
    if rows <= 16:
        for stages, columns, depth in itertools.product((4, 6), (32, 64, 16, 128), (256, 128)):
            for splits in dict.fromkeys((chosen.splits, 1, 2, 4)):
                yield MatmulTile(16, columns, depth, 4, stages, swapped=True, splits=splits, band=1)
        return
    shapes = ((128, 128, 8), (128, 256, 8), (256, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4))
    for swapped, depth, stages, (height, columns, warps) in itertools.product((False, True), (64, 128), (4, 3), shapes):
        yield MatmulTile(height, columns, depth, warps, stages, swapped)


def attention_tiles() -> Iterator[AttentionTile]:
    shapes = ((128, 64, 8), (128, 128, 8), (128, 64, 4), (64, 64, 4), (128, 32, 4), (256, 64, 8))
    for stages, (queries, keys, warps) in itertools.product((3, 2, 4), shapes):
        yield AttentionTile(queries, keys, warps, stages)


@dataclass(frozen=True)
class Case:
    """A kernel on tensors, with the tile that is chosen for it and others to try."""

    what: dict[str, Any]
    chosen: Any
    others: list[Any]
    work: Callable[[Any], Any]


def many_rows_cases(run: Run) -> Iterator[Case]:
    rows = run.sizes.many_rows
    for inputs, outputs in run.sizes.shapes:
        codes, scales = ternary_weight(run, outputs, inputs, run.half)
        x = run.randn(rows, inputs)
        chosen = ternary_tile(rows, outputs, inputs, GROUP_SIZE, True, *launch.architecture(run.device))
        yield Case(
            {"shape": [rows, inputs, outputs], "tensors": (x, codes, scales)},
            chosen,
            list(matmul_tiles(rows, chosen))[: run.tiles],
            lambda tile, x=x, c=codes, s=scales: launch_matmul(x, c, s, tile),
        )


def few_rows_cases(run: Run) -> Iterator[Case]:
    inputs, outputs = run.sizes.shapes[0]
    weights = [ternary_weight(run, outputs, inputs, run.half) for _ in range(run.sizes.weights)]
    for rows in run.sizes.few_rows:
        x = run.randn(rows, inputs)
        chosen = ternary_tile(rows, outputs, inputs, GROUP_SIZE, True, *launch.architecture(run.device))

        def work(tile: MatmulTile, x: torch.Tensor = x) -> torch.Tensor:
            for codes, scales in weights:
                y = launch_matmul(x, codes, scales, tile)
            return y

        moved = sum(codes.nbytes + scales.nbytes for codes, scales in weights) / len(weights)
        what = {"shape": [rows, inputs, outputs], "moved": moved + x.nbytes + 2 * rows * outputs}
        # Between the ends, tiles differ little; each number of rows is compiled anew.
        others = list(matmul_tiles(rows, chosen)) if rows in (run.sizes.few_rows[0], run.sizes.few_rows[-1]) else []
        yield Case(what, chosen, others[: run.tiles], work)


def attention_cases(run: Run) -> Iterator[Case]:
    for head_dim, causal in itertools.product(run.sizes.head_dims, (False, True)):
        q, k, v = (run.randn(1, run.sizes.heads, run.sizes.length, head_dim) for _ in range(3))
        scale = 1 / math.sqrt(head_dim)
        yield Case(
            {"shape": list(q.shape), "causal": causal, "tensors": (q, k, v)},
            attention_tile(head_dim, 2, launch.architecture(run.device)[0]),
            list(attention_tiles())[: run.tiles],
            lambda tile, t=(q, k, v), c=causal, s=scale: launch_attention(*t, None, c, s, 0.0, 0, tile)[0],
        )


def timed(run: Run, case: Case) -> tuple[float, dict[str, Any]]:
    """The time of the chosen tile, and what to report of the fastest that was found in time."""
    chosen_s = seconds(run, lambda: case.work(case.chosen))
    fastest, least, tried, refused = case.chosen, chosen_s, 0, 0
    end = time.monotonic() + run.limit
    for tile in case.others:
        if time.monotonic() > end:
            break
        tried += 1
        try:
            needed = seconds(run, lambda tile=tile: case.work(tile), min(run.sizes.repeats, 7))  # type: ignore[misc]
            if needed < least:
                needed = seconds(run, lambda tile=tile: case.work(tile))  # type: ignore[misc]
        except Exception as failure:  # a tile too large for this GPU or compiler
            if "illegal" in str(failure):
                raise
            refused += 1
            continue
        if needed < least:
            fastest, least = tile, needed
    told = {"chosen_tile": spell(case.chosen), "tuned_tile": spell(fastest)}
    if fastest != case.chosen:
        told["tuned_differs_by"] = error(case.work(fastest), case.work(case.chosen).double())
    return chosen_s, {"tuned_seconds": least, "tiles_tried": tried, "tiles_refused": refused} | told


def spell(tile: Any) -> str:
    return " ".join(f"{name} {value}" for name, value in dataclasses.asdict(tile).items())


def time_many_rows(run: Run) -> Iterator[dict[str, Any]]:
    for case in many_rows_cases(run):
        x, codes, scales = case.what["tensors"]
        what = {"what": "ternary matmul, many rows, fractions of torch's matmul", "shape": case.what["shape"]}
        yield guarded(what, lambda c=case, t=(x, codes, scales): _time_many_rows(run, c, *t))  # type: ignore[misc]


def _time_many_rows(run: Run, case: Case, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    dense = launch_dequantize(codes, scales, run.half)
    torch_s = seconds(run, lambda: x @ dense.T)
    chosen_s, told = timed(run, case)
    int8 = guarded({}, lambda: {"int8": torch_s / seconds(run, lambda: launch_int8_matmul(x, codes, scales))})
    dense_s = seconds(run, lambda: x @ launch_dequantize(codes, scales, run.half).T)
    rows, inputs, outputs = case.what["shape"]
    return {
        "torch_tflops": 2e-12 * rows * inputs * outputs / torch_s,
        "chosen": torch_s / chosen_s,
        "tuned": torch_s / told["tuned_seconds"],
        "dequantize_then_torch": torch_s / dense_s,
    } | (int8 | told)


def _copy_speed(run: Run) -> float:
    """Bytes read and written in a second."""
    source = torch.zeros(run.sizes.copied_bytes // 4, dtype=torch.float32, device=run.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(run, lambda: target.copy_(source))


def time_few_rows(run: Run) -> Iterator[dict[str, Any]]:
    speed = _copy_speed(run)
    yield {"what": "memory's speed: bytes read and written by a copy", "gb_per_second": speed / 1e9}
    for case in few_rows_cases(run):
        what = {"what": "ternary matmul, few rows, fractions of the memory's speed", "shape": case.what["shape"]}
        yield guarded(what, lambda c=case: _time_few_rows(run, c, speed))  # type: ignore[misc]


def _time_few_rows(run: Run, case: Case, bytes_per_second: float) -> dict[str, Any]:
    chosen_s, told = timed(run, case)
    seconds_at_best = case.what["moved"] * run.sizes.weights / bytes_per_second
    return {
        "chosen": seconds_at_best / chosen_s,
        "tuned": seconds_at_best / told["tuned_seconds"],
        "microseconds": 1e6 * told["tuned_seconds"] / run.sizes.weights,
    } | told


def time_attention(run: Run) -> Iterator[dict[str, Any]]:
    for case in attention_cases(run):
        what = {"what": "attention, fractions of torch's", "shape": case.what["shape"]}
        what |= {"causal": case.what["causal"]}
        yield guarded(what, lambda c=case: _time_attention(run, c))  # type: ignore[misc]


def _time_attention(run: Run, case: Case) -> dict[str, Any]:
    q, k, v = case.what["tensors"]
    causal, sdpa = case.what["causal"], torch.nn.functional.scaled_dot_product_attention
    torch_s = seconds(run, lambda: sdpa(q, k, v, is_causal=causal))
    chosen_s, told = timed(run, case)
    backward = guarded({}, lambda: _time_backward(run, q, k, v, causal))
    shares = {"torch_ms": torch_s * 1e3, "chosen": torch_s / chosen_s, "tuned": torch_s / told["tuned_seconds"]}
    return shares | backward | told


def _time_backward(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Any]:
    """Of the backward pass alone: torch keeps what its forward left, and so do we."""
    gradient = torch.randn_like(q)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    settings = (causal, 1 / math.sqrt(q.shape[-1]), 0.0, 0)
    attended, logsumexp = launch_attention(q, k, v, None, *settings)

    def torchs() -> None:
        torch.autograd.grad(theirs, leaves, gradient, retain_graph=True)

    def ours() -> None:
        launch_backward(gradient, q, k, v, None, attended, logsumexp, *settings)

    # Autograd has threads of its own: not into a CUDA graph. Several calls, so that the GPU does not wait for Python.
    timer, calls = (_timed_by_gpu, 5) if run.device.type == "cuda" else (_timed_by_clock, 1)

    def measured(work: Callable[[], None]) -> float:
        work()
        return _median(timer(lambda: [work() for _ in range(calls)]) for _ in range(run.sizes.repeats // 2 + 1)) / calls

    torch_s, ours_s = measured(torchs), measured(ours)
    return {"torch_backward_ms": torch_s * 1e3, "backward": torch_s / ours_s}


def compile_tiles(run: Run, share: int, shares: int) -> Iterator[dict[str, Any]]:
    """Runs a share of the tiles once, so that they lie in Triton's cache when they are timed."""
    one_weight = dataclasses.replace(run, sizes=dataclasses.replace(run.sizes, weights=1))
    cases = itertools.chain(many_rows_cases(run), few_rows_cases(one_weight), attention_cases(run))
    counts = {"compiled": 0, "refused": 0}
    number = 0
    for case in cases:
        for tile in (case.chosen, *case.others):
            number += 1
            if number % shares != share:
                continue
            try:
                case.work(tile)
                counts["compiled"] += 1
            except Exception:
                counts["refused"] += 1
    yield counts


PARTS: dict[str, Callable[[Run], Iterator[dict[str, Any]]]] = {
    "products": check_products,
    "attention": check_attention,
    "many_rows": time_many_rows,
    "few_rows": time_few_rows,
    "attention_times": time_attention,
}


def start(*part: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *sys.argv[1:], "--part", *part]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], limit: float) -> list[dict[str, Any]]:
    """What a part told, a line of JSON each, and how it ended where it did not end well."""
    try:
        out, err = process.communicate(timeout=max(limit, 1.0))
        ended = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        ended = f"was ended after {limit:.0f} seconds"
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [*results, {"failed": f"the part {ended}: {err[-2000:]}"}] if ended else results


def describe(device: torch.device) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if device.type != "cuda":
        return {"device": "cpu, Triton's interpreter: times say nothing", "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired):
        driver = []
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "versions": versions | {"driver": driver[0] if driver else "nvidia-smi does not tell"},
    }


def run_part(run: Run, part: list[str]) -> None:
    """Prints a line of JSON for each result, as soon as it is there."""
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    results = compile_tiles(run, int(part[1]), int(part[2])) if part[0] == "compile" else PARTS[part[0]](run)
    for result in results:
        print(json.dumps(result), flush=True)


def judged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How many checks ran, what is wrong or failed, and which is nearest to its bound."""
    shares = [
        (max(value for name, value in check.items() if name.startswith("error")) / check["bound"], check)
        for check in results
        if "error" in check
    ]
    return {
        "checks": len(shares),
        "wrong": [check for share, check in shares if not share <= 1],
        "failed": [result for result in results if "failed" in result],
        "nearest_to_bound": max(shares, key=lambda pair: pair[0], default=(0, {}))[1],
    }


def write(report: dict[str, Any], output: str | None) -> str:
    text = json.dumps(report, indent=1)
    if output:
        beside = Path(f"{output}.part")
        beside.write_text(text + "\n")
        beside.replace(output)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="time the chosen tiles only")
    parser.add_argument("--output", help="a file for the JSON, besides standard output")
    parser.add_argument("--seconds", type=float, default=240.0, help="the time that all may take (default 240)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes and two tiles a case")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    began = time.monotonic()
    device = torch.device(arguments.device)
    tiles = 0 if arguments.quick else 2 if arguments.tiny else None
    run = Run(device, TINY if arguments.tiny else Sizes(), tiles, arguments.seconds / 30)
    if arguments.part:
        run_part(run, arguments.part)
        return 0
    report: dict[str, Any] = describe(device)

    def left() -> float:
        return arguments.seconds - (time.monotonic() - began)

    shares = 0 if arguments.quick else min(12, max(1, (os.cpu_count() or 1) - 3))
    compiling = [start("compile", str(share), str(shares)) for share in range(shares)]
    checked = [result for part in CHECKS for result in finish(start(part), 0.35 * arguments.seconds)]
    report |= judged(checked)
    write(report, arguments.output)
    end = time.monotonic() + left() - 0.45 * arguments.seconds
    report["compiled"] = [each for process in compiling for each in finish(process, end - time.monotonic())]
    report["check_and_compile_seconds"] = round(time.monotonic() - began, 1)
    for done, part in enumerate(TIMES):
        report["times"] = report.get("times", []) + finish(
            start(part), max(30.0, left() - 20 * (len(TIMES) - 1 - done))
        )
        write(report, arguments.output)
    report["failed"] += [result for result in report["times"] if "failed" in result]
    report["seconds"] = round(time.monotonic() - began, 1)
    print(write(report, arguments.output))
    return 1 if report["wrong"] or report["failed"] or not report["checks"] else 0


if __name__ == "__main__":
    sys.exit(main())
