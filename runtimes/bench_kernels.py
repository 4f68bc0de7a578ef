"""``bench --kernels``: our matrix products and attention beside onnxruntime's, torch's and what the machine can do.

All that a row compares runs in turns in one process (torch in one of its own), because speeds of a shared machine
change from second to second; the best and the median of all turns are reported.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from intaglio.engines.memory import return_freed_memory
from intaglio.errors import EngineError, RuntimeMissingError
from intaglio.kernels.cpu.library import instruction_set, instruction_sets
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes import bench_graphs
from intaglio.runtimes.bench_ceilings import (
    AMX_LOOPS,
    FLOAT32_LOOPS,
    INT8_LOOPS,
    Ceilings,
    forced_instruction_set,
    is_valid,
    read_bandwidth_of,
    share_of_ports,
)
from intaglio.runtimes.bench_graphs import Runner, Weight, random_weight
from intaglio.runtimes.competitors.child import Competitor
from intaglio.runtimes.machine import describe_machine, load_average, processor_features

# Turns of each runner; --quick shows that everything runs, and roughly how fast.
ALTERNATIONS, QUICK_ALTERNATIONS = 20, 3
# More than the last-level caches of today's servers hold.
ROTATED_BYTES = 1200 << 20
# Rows of a result that are compared with float64.
_CHECKED_ROWS, _CHECKED_COLUMNS = 32, 1024
# Of a thousand activations one, this many standard deviations large.
_OUTLIER, _OUTLIER_SHARE = 50.0, 1e-3
_NBITS, _INTEGER = "onnxruntime_matmulnbits", "onnxruntime_matmulinteger"
_TORCH, _ORT_ATTENTION = "torch_sdpa", "onnxruntime_attention"
_READ = "read"


@dataclass(frozen=True)
class Product:
    """A product of ``M`` rows; of one row, the matrices of ``ROTATED_BYTES`` take turns."""

    format: str
    quantization: GroupedQuantFormat
    has_offsets: bool
    M: int
    K: int
    N: int

    @property
    def operations(self) -> int:
        """Multiplications and additions of one matrix."""
        return 2 * self.M * self.K * self.N


@dataclass(frozen=True)
class Attention:
    """Attention of so many tokens to each other, without a mask."""

    heads: int
    tokens: int
    head_dim: int


_TERNARY = ("ternary", GroupedQuantFormat(2, 128, 1), False)
_AFFINE4 = ("affine4", GroupedQuantFormat(4, 64, 0), True)
PRODUCTS = (
    Product(*_TERNARY, 1536, 3072, 9216),
    Product(*_TERNARY, 1536, 3072, 27648),
    Product(*_TERNARY, 1536, 12288, 3072),
    Product(*_AFFINE4, 512, 2560, 9728),
    Product("int8", GroupedQuantFormat(8, 32, 128), False, 512, 2560, 9728),
    Product("int8", GroupedQuantFormat(8, 2560, 128), False, 512, 2560, 9728),
    Product(*_TERNARY, 1, 3072, 9216),
    Product(*_AFFINE4, 1, 2560, 9728),
)
ATTENTIONS = (Attention(24, 1536, 128),)


def bench_kernels(
    *,
    quick: bool = False,
    threads: int = 0,
    products: Sequence[Product] = PRODUCTS,
    attentions: Sequence[Attention] = ATTENTIONS,
    rotated_bytes: int = ROTATED_BYTES,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Measures our kernels and returns ``{machine, ceilings, rows}``; docs/benchmarks.md says what the fields mean.

    ``quick`` takes few turns. ``threads`` 0 takes one a core. What is not there is null, with ``<name>_reason``.
    Raises EngineError.
    """
    count = threads or os.cpu_count() or 1
    busy = load_average()
    turns = QUICK_ALTERNATIONS if quick else ALTERNATIONS
    done = Progress(progress, "bench", turns * (len(products) + len(attentions)), "turns")
    total, rows = Ceilings(count), list[dict[str, Any]]()
    for product in products:
        rows += _product_rows(product, turns, count, rotated_bytes, total, done)
    for attention in attentions:
        rows += _attention_rows(attention, turns, count, total, done)
    for row in rows:
        row |= judged(row, total.clock, count)
    machine = describe_machine(count) | {
        "instruction_sets": instruction_sets(),
        # onnxruntime says nowhere which of them it uses; it asks the processor itself.
        "processor_features": processor_features(),
        "load_average_before": busy,
        "alternations": turns,
    }
    return {"machine": machine, "ceilings": total.describe(), "rows": rows}


def judged(row: Mapping[str, Any], clock: float, threads: int) -> dict[str, Any]:
    """Whether the ceiling of a row counts, and how much of two ports it reached.

    ``clock`` is the highest of the whole run: one that was disturbed would make a disturbed ceiling look whole.
    """
    if row["ceiling"] is None:
        return {"ceiling_share_of_ports": None, "ceiling_valid": False}
    share = share_of_ports(row["ceiling"], row["ceiling_gops"] * 1e9, clock, threads)
    return {"ceiling_share_of_ports": _round(share), "ceiling_valid": is_valid(share)}


class _Turns:
    """Runners that take turns, with the ceilings between them."""

    def __init__(self, threads: int) -> None:
        self.ceilings = Ceilings(threads)
        self.seconds: dict[str, list[float]] = {}
        self.reasons: dict[str, str] = {}
        self._runners: dict[str, Callable[[], float]] = {}
        # What rows are compared with; the others are measured once, for the ceilings of the whole run.
        compared = (self.ceilings.first_of(INT8_LOOPS), self.ceilings.first_of(FLOAT32_LOOPS), *AMX_LOOPS)
        self._loops = [loop for loop in compared if loop is not None and loop in self.ceilings.loops]

    def add(self, name: str, seconds: Callable[[], float]) -> None:
        """``seconds`` runs once and says how long it took."""
        self._runners[name], self.seconds[name] = seconds, []

    def take(self, count: int, total: Ceilings, done: Progress) -> None:
        """Each of them ``count`` times, after a run that does not count."""
        for seconds in self._runners.values():
            seconds()
        self.ceilings.measure()
        for _ in range(count):
            for name, seconds in self._runners.items():
                self.seconds[name].append(seconds())
            self.ceilings.measure(self._loops)
            done.advance(1)
        total.include(self.ceilings)

    def speeds(self, name: str, amount: float) -> tuple[float | None, float | None]:
        """Giga-units a second of ``amount`` units in a turn, at best and in the median; null for who is not there."""
        seconds = self.seconds.get(name)
        if not seconds:
            return None, None
        return amount / min(seconds) / 1e9, amount / statistics.median(seconds) / 1e9

    def compare(self, ours: str, theirs: str, amount: float) -> dict[str, Any]:
        """Their speed, and how many times as fast ours is."""
        best, median = self.speeds(theirs, amount)
        our_best, our_median = self.speeds(ours, amount)
        row: dict[str, Any] = {
            f"{theirs}_gops": _round(best),
            f"{theirs}_median_gops": _round(median),
            f"times_{theirs}": _ratio(our_best, best),
            f"times_{theirs}_median": _ratio(our_median, median),
        }
        if theirs in self.reasons:
            row[f"{theirs}_reason"] = self.reasons[theirs]
        return row

    def ceiling(self, loops: Sequence[str], speed: float | None) -> dict[str, Any]:
        """The fastest loop of these that the machine has, measured between the turns."""
        loop = self.ceilings.first_of(loops)
        reached = None if loop is None else self.ceilings.loops[loop] / 1e9
        row: dict[str, Any] = {
            "ceiling": loop,
            "ceiling_gops": _round(reached),
            "ceiling_share_of_ports": None,  # when the run is over, and its clock known
            "ceiling_valid": False,
            "of_ceiling": _ratio(speed, reached),
        }
        if loop is None:
            row["ceiling_reason"] = f"this machine or this build has none of {', '.join(loops)}"
        return row

    def amx(self, loop: str, speed: float | None) -> dict[str, Any]:
        """The same of the matrix unit, where there is one."""
        reached = self.ceilings.loops.get(loop)
        if reached is None:
            return {"amx_ceiling_gops": None, "of_amx_ceiling": None}
        return {"amx_ceiling_gops": _round(reached / 1e9), "of_amx_ceiling": _ratio(speed, reached / 1e9)}


def _round(value: float | None) -> float | None:
    """Four digits."""
    return None if value is None else float(f"{value:.4g}")


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else _round(ours / theirs)


def _product_rows(
    product: Product, turns: int, threads: int, rotated_bytes: int, total: Ceilings, done: Progress
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x, outliers = _activations(product, rng)
    matrices = _matrices(product, rotated_bytes, rng)
    group = _Turns(threads)
    variants = _variants(x, matrices, threads)
    theirs = _their_products(group, product, x, matrices, threads)
    for name, runner in ((name, runner) for name, (_, _, runner) in variants.items()):
        group.add(name, runner.seconds)
    packed = [array for matrix in matrices for array in (matrix.rows.codes, matrix.rows.scales, matrix.rows.offsets)]
    read_bytes = sum(array.nbytes for array in packed)
    if product.M == 1:
        arrays = [array for array in packed if array.ndim]
        group.add(_READ, lambda: read_bytes / read_bandwidth_of(arrays, threads))
    accuracies = _accuracies(
        {name: runner for name, (_, _, runner) in variants.items()} | theirs, x, outliers, matrices[0]
    )
    group.take(turns, total, done)
    rows = []
    for name, (accuracy, isa, _) in variants.items():
        operations = product.operations * len(matrices)
        best, median = group.speeds(name, operations)
        row: dict[str, Any] = {
            "kernel": "grouped_quant_matmul",
            "format": product.format,
            "bits": product.quantization.bits,
            "group_size": product.quantization.group_size,
            "has_offsets": product.has_offsets,
            "shape": [product.M, product.K, product.N],
            "accuracy": accuracy,
            "instruction_set": isa,
            "ours_gops": _round(best),
            "ours_median_gops": _round(median),
            **group.ceiling(INT8_LOOPS if accuracy == "fast" else FLOAT32_LOOPS, best),
            **(group.amx(AMX_LOOPS[0], best) if accuracy == "fast" else {}),
            **group.compare(name, _NBITS, operations),
            **group.compare(name, _INTEGER, operations),
            **accuracies[name],
        }
        if _NBITS in accuracies:
            row |= {f"{_NBITS}_{key}": value for key, value in accuracies[_NBITS].items() if key != "digest"}
        if accuracy == "fast":
            # Where no fast kernel takes a format, the exact one does.
            row["is_exact_kernel"] = row["digest"] == accuracies[_name("exact", instruction_set())]["digest"]
        del row["digest"]
        if product.M == 1:
            row |= _bandwidth(group, name, read_bytes, len(matrices))
        rows.append(row)
    return rows


def _name(accuracy: str, isa: str) -> str:
    return f"{accuracy}, {isa}"


def _activations(product: Product, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Normal values, and the same with outliers."""
    x = rng.standard_normal((product.M, product.K), np.float32)
    is_outlier = rng.random(x.shape) < _OUTLIER_SHARE
    is_outlier[:, rng.integers(product.K)] = True  # one at least in each row
    return x, np.where(is_outlier, np.float32(_OUTLIER) * np.sign(x), x)


def _matrices(product: Product, rotated_bytes: int, rng: np.random.Generator) -> list[Weight]:
    first = random_weight((product.N, product.K), product.quantization, product.has_offsets, rng)
    count = math.ceil(rotated_bytes / first.nbytes) if product.M == 1 else 1

    def rolled(shift: int) -> Weight:
        # In memory of its own, which is all that matters to speed.
        rows, zero_points = first.rows, first.integer_zero_points
        turned = (
            np.roll(array, shift, axis=0) if array.ndim else array for array in (rows.codes, rows.scales, rows.offsets)
        )
        return Weight(
            GroupedQuantRows(*turned),
            first.quantization,
            None if zero_points is None else np.roll(zero_points, shift, axis=0),
        )

    return [first, *(rolled(shift) for shift in range(1, count))]


def _variants(x: np.ndarray, matrices: Sequence[Weight], threads: int) -> dict[str, tuple[str, str, Runner]]:
    """Accuracy, instruction set and runner of what we have: also ``fast`` without AMX, which most machines lack."""
    best = instruction_set()
    sets = [best] + (["avx512_vnni"] if best == "amx" and "avx512_vnni" in instruction_sets() else [])
    found = {}
    for accuracy, isa in [("exact", best), *(("fast", isa) for isa in sets)]:
        with forced_instruction_set(isa):
            runner = bench_graphs.ours(x, matrices, fast=accuracy == "fast", threads=threads)
        found[_name(accuracy, isa)] = accuracy, isa, runner
    return found


def _their_products(
    group: _Turns, product: Product, x: np.ndarray, matrices: Sequence[Weight], threads: int
) -> dict[str, Runner]:
    """onnxruntime's, where there is one; the reason in ``group`` where there is none."""
    makers: dict[str, Callable[[], Runner]] = {}
    if bench_graphs.takes_matmulnbits(product.quantization):
        makers[_NBITS] = lambda: bench_graphs.matmulnbits(x, matrices, threads=threads)
    else:
        group.reasons[_NBITS] = f"it has no blocks of {product.quantization.group_size}"
    if len(matrices) == 1:
        makers[_INTEGER] = lambda: bench_graphs.matmulinteger(x, matrices[0], threads=threads)
    else:
        group.reasons[_INTEGER] = "it reads 8 bits a weight, and is not for single rows"
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except EngineError as error:
            group.reasons[name] = str(error)
            continue
        group.add(name, found[name].seconds)
    return_freed_memory()  # of weights that were packed anew
    return found


def _accuracies(
    runners: Mapping[str, Runner], x: np.ndarray, outliers: np.ndarray, weight: Weight
) -> dict[str, dict[str, Any]]:
    """Relative L2 distances from float64, with and without outliers; ``digest`` is the same for equal results."""
    found: dict[str, dict[str, Any]] = {name: {} for name in runners if name != _INTEGER}
    for key, given in (("relative_l2_outliers", outliers), ("relative_l2", x)):
        results = {}
        for name in found:
            runners[name].feed({"x": given})
            result = runners[name].run()[:_CHECKED_ROWS]
            found[name]["digest"] = hash(result.tobytes())
            results[name] = result.astype(np.float64)
        for name, distance in _distances(results, given, weight).items():
            found[name][key] = _round(distance)
    return found


def _distances(results: Mapping[str, np.ndarray], x: np.ndarray, weight: Weight) -> dict[str, float]:
    x64 = x[:_CHECKED_ROWS].astype(np.float64)
    squares, norm = dict.fromkeys(results, 0.0), 0.0
    for first in range(0, weight.shape[0], _CHECKED_COLUMNS):
        part = slice(first, first + _CHECKED_COLUMNS)
        rows = weight.rows
        offsets = rows.offsets[part] if rows.has_offsets else rows.offsets
        dense = dequantize(GroupedQuantRows(rows.codes[part], rows.scales[part], offsets), weight.quantization)
        expected = x64 @ dense.astype(np.float64).T
        norm += float(np.square(expected).sum())
        for name, result in results.items():
            squares[name] += float(np.square(result[:, part] - expected).sum())
    return {name: math.sqrt(square / norm) for name, square in squares.items()}


def _bandwidth(group: _Turns, name: str, packed_bytes: int, matrices: int) -> dict[str, Any]:
    """Packed bytes a second beside reading them, and nothing else, in the same turns."""
    best, median = group.speeds(name, packed_bytes)
    read, read_median = group.speeds(_READ, packed_bytes)
    return {
        "matrices": matrices,
        "packed_bytes": packed_bytes,
        "ours_gbps": _round(best),
        "ours_median_gbps": _round(median),
        "read_gbps": _round(read),
        "read_median_gbps": _round(read_median),
        "of_bandwidth": _ratio(best, read),
        "of_bandwidth_median": _ratio(median, read_median),
    }


def _attention_rows(
    attention: Attention, turns: int, threads: int, total: Ceilings, done: Progress
) -> list[dict[str, Any]]:
    shape = (1, attention.heads, attention.tokens, attention.head_dim)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) for name in ("query", "key", "value")}
    operations = 4 * attention.heads * attention.tokens**2 * attention.head_dim
    group = _Turns(threads)
    best_set = instruction_set()
    variants = {
        _name(accuracy, isa): (accuracy, isa)
        for isa in (best_set, *(["avx512_vnni"] if best_set == "amx" else []))
        for accuracy in ("exact", "fast")
    }
    with ExitStack() as stack:
        runners = {}
        for name in (*variants, _ORT_ATTENTION):
            accuracy, isa = variants.get(name, ("", best_set))
            operator = "FusedAttention" if name in variants else "Attention"
            try:
                with forced_instruction_set(isa):
                    runners[name] = bench_graphs.attention(operator, tensors, fast=accuracy == "fast", threads=threads)
            except EngineError as error:
                group.reasons[name] = str(error)
                continue
            group.add(name, runners[name].seconds)
        request = {
            "heads": attention.heads, "tokens": attention.tokens, "head_dim": attention.head_dim, "threads": threads,
        }  # fmt: skip
        try:
            torch = stack.enter_context(Competitor("torch", "intaglio.runtimes.competitors.torch_attention", request))
            group.add(_TORCH, torch.seconds)
        except RuntimeMissingError as error:
            group.reasons[_TORCH] = str(error)
        distances = _attention_distances(runners, tensors)
        group.take(turns, total, done)
    return [
        _attention_row(attention, group, name, accuracy, isa, operations, distances)
        for name, (accuracy, isa) in variants.items()
    ]


def _attention_row(
    attention: Attention,
    group: _Turns,
    name: str,
    accuracy: str,
    isa: str,
    operations: int,
    distances: Mapping[str, float | None],
) -> dict[str, Any]:
    best, median = group.speeds(name, operations)
    row: dict[str, Any] = {
        "kernel": "attention",
        "format": "float32",
        "bits": 32,
        "shape": [attention.heads, attention.tokens, attention.head_dim],
        "accuracy": accuracy,
        "instruction_set": isa,
        "ours_gops": _round(best),
        "ours_median_gops": _round(median),
        **({"ours_reason": group.reasons[name]} if name in group.reasons else {}),
        **group.ceiling(FLOAT32_LOOPS, best),
        **group.amx(AMX_LOOPS[1], best),
        "relative_l2": distances.get(name),
        f"{_ORT_ATTENTION}_relative_l2": distances.get(_ORT_ATTENTION),
    }
    for theirs in (_TORCH, _ORT_ATTENTION):
        row |= group.compare(name, theirs, operations)
        # As bounds on time are written: 0.8 is a fifth less.
        for suffix in ("", "_median"):
            row[f"time_of_{theirs}{suffix}"] = _ratio(1, row[f"times_{theirs}{suffix}"])
    for key, runner in (("ours", name), (_TORCH, _TORCH), (_ORT_ATTENTION, _ORT_ATTENTION)):
        seconds = group.seconds.get(runner)
        row[f"{key}_seconds"] = _round(min(seconds)) if seconds else None
    return row


def _attention_distances(runners: Mapping[str, Runner], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Relative L2 distances of the first head from float64."""
    query, key, value = (tensors[name][0, 0].astype(np.float64) for name in ("query", "key", "value"))
    scores = query @ key.T / math.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ value
    found = {}
    for name, runner in runners.items():
        distance = np.linalg.norm(runner.run()[0, 0] - expected) / np.linalg.norm(expected)
        found[name] = _round(float(distance))
    return found


# What a table shows of each kind of row, and under which head.
_PRODUCT_COLUMNS = {
    "format": "format", "group_size": "group", "shape": "M x K x N", "accuracy": "accuracy",
    "instruction_set": "ours uses up to", "ours_gops": "ours GOP/s", "ceiling_gops": "ceiling GOP/s",
    "of_ceiling": "of ceiling", "ceiling_valid": "ceiling counts", f"times_{_NBITS}": "x MatMulNBits",
    f"times_{_INTEGER}": "x MatMulInteger", "relative_l2": "relative L2", "relative_l2_outliers": "with outliers",
}  # fmt: skip
_COLUMNS = {
    "products": _PRODUCT_COLUMNS,
    "products of one row": {
        "format": "format", "group_size": "group", "shape": "M x K x N", "accuracy": "accuracy",
        "instruction_set": "ours uses up to", "ours_gbps": "ours GB/s", "read_gbps": "read GB/s",
        "of_bandwidth": "of bandwidth", f"times_{_NBITS}": "x MatMulNBits", "relative_l2": "relative L2",
    },
    "attention": {
        "shape": "heads x tokens x head", "accuracy": "accuracy", "instruction_set": "ours uses up to",
        "ours_seconds": "ours s",
        "torch_sdpa_seconds": "torch s", "onnxruntime_attention_seconds": "onnxruntime s",
        "time_of_torch_sdpa": "time of torch's", "relative_l2": "relative L2", "of_ceiling": "of ceiling",
    },
}  # fmt: skip


def tables(result: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """What people look at first of a result: columns and rows by title."""
    kinds: dict[str, list[Mapping[str, Any]]] = {title: [] for title in _COLUMNS}
    for row in result["rows"]:
        single = "products of one row" if "read_gbps" in row else "products"
        kinds[single if row["kernel"] != "attention" else "attention"].append(row)
    return {
        title: (list(_COLUMNS[title].values()), [[_cell(row[key]) for key in _COLUMNS[title]] for row in rows])
        for title, rows in kinds.items()
        if rows
    }


def _cell(value: Any) -> Any:
    return "-" if value is None else " x ".join(map(str, value)) if isinstance(value, list) else value
