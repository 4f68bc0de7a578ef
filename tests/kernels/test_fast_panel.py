"""The accuracy ``fast`` with many rows of x, compared with the same rounding in exact arithmetic and with float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_runner import bits_of, build_model, has_chosen_instruction_set, load, random_rows, run
from numpy.typing import DTypeLike

from intaglio.kernels.grouped_quant import (
    SCALE_DTYPES,
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    unpack_codes,
)

INSTRUCTION_SETS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx", "neon", "neon_i8mm")
# Strips and tiles that are full, and that are not.
ROWS = (8, 9, 11, 13, 16, 17, 33, 64)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    if not has_chosen_instruction_set():
        pytest.skip(f"{request.param} is not to be had here")
    return request.param


def load_fast(rows: GroupedQuantRows, quantization: GroupedQuantFormat, threads: int = 2) -> Any:
    return load(build_model(rows, {**vars(quantization), "fast": 1}), threads)


def rounded(x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers ``[M, groups, group_size]`` and scales ``[M, groups]``, in the float32 arithmetic of the kernels."""
    groups = x.reshape(len(x), -1, group_size)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        largest = np.abs(groups).max(axis=-1)
        inverse = np.where(largest < 2.0**-120, np.float32(0), np.float32(127) / largest)
        scales = np.where(largest < 2.0**-120, np.float32(0), largest / np.float32(127))
        return np.rint(groups * inverse[..., None]), scales


def exact_product(x: np.ndarray, rows: GroupedQuantRows, quantization: GroupedQuantFormat) -> np.ndarray:
    """What the kernels would give with float64 sums. Long groups are rounded in pieces of at most 512 inputs."""
    sizes = [size for size in range(512, 0, -16) if quantization.group_size % size == 0]
    piece = sizes[0] if quantization.group_size > 512 and sizes else quantization.group_size
    times = quantization.group_size // piece
    offsets = np.repeat(rows.offsets, times, axis=1) if rows.has_offsets else rows.offsets
    rows = GroupedQuantRows(rows.codes, np.repeat(rows.scales, times, axis=1), offsets)
    integers, scales = rounded(x, piece)
    codes = unpack_codes(rows.codes, quantization.bits).astype(np.float64) - quantization.zero_point
    codes = codes.reshape(len(codes), *integers.shape[1:])
    dots = np.einsum("mgk,ngk->mng", integers.astype(np.float64), codes, optimize=True)
    sums = integers.sum(axis=-1).astype(np.float64) * scales
    offsets = np.broadcast_to(rows.offsets.astype(np.float64), rows.scales.shape)
    return (
        np.einsum("mng,mg,ng->mn", dots, scales.astype(np.float64), rows.scales.astype(np.float64)) + sums @ offsets.T
    )


def relative_l2(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("bits", "group_size", "width"),
    [
        (2, 128, 1152),
        (2, 256, 512),
        (4, 32, 224),
        (4, 64, 704),
        (4, 128, 384),
        (8, 32, 160),
        (8, 1200, 1200),
        # Steps of the inner loops that are not full, groups of several pieces, and rows that end anywhere.
        (2, 16, 272),
        (4, 48, 624),
        (8, 80, 560),
        (2, 1040, 2080),
        (2, 1300, 1300),
        (4, 50, 50),
        (8, 517, 517),
        (8, 3, 3),
    ],
)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_the_product_of_rounded_activations_is_exact(
    bits: int, group_size: int, width: int, has_offsets: bool, instruction_set: str
) -> None:
    rng = np.random.default_rng(bits * width)
    for zero_point in (0, 1, (1 << bits) // 2, (1 << bits) - 1):
        quantization = GroupedQuantFormat(bits, group_size, zero_point)
        dtype = SCALE_DTYPES[(group_size + zero_point) % len(SCALE_DTYPES)]
        outputs = int(rng.integers(1, 140))
        rows = random_rows(rng, (outputs, width), quantization, dtype, has_offsets)
        session = load_fast(rows, quantization)
        for count in rng.choice(ROWS, 2, replace=False):
            x = rng.normal(size=(count, width)).astype(np.float32)
            assert relative_l2(run(session, x), exact_product(x, rows, quantization)) <= 1e-6


@pytest.mark.parametrize("count", [*range(8, 18), 64, 513, 800])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (4, 64), (8, 32)])
def test_every_number_of_rows_is_computed(count: int, bits: int, group_size: int, instruction_set: str) -> None:
    rng = np.random.default_rng(count)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (67, 640), quantization, np.float16, has_offsets=bits == 4)
    x = rng.normal(size=(count, 640)).astype(np.float32)
    assert relative_l2(run(load_fast(rows, quantization), x), exact_product(x, rows, quantization)) <= 1e-6


@pytest.mark.parametrize("outputs", [2240, 2250])
def test_a_large_output_is_computed(outputs: int, instruction_set: str) -> None:
    """Written past the caches where its rows are aligned."""
    rng = np.random.default_rng(outputs)
    quantization = GroupedQuantFormat(2, 128, 1)
    rows = random_rows(rng, (outputs, 128), quantization, has_offsets=False)
    x = rng.normal(size=(520, 128)).astype(np.float32)
    assert relative_l2(run(load_fast(rows, quantization), x), exact_product(x, rows, quantization)) <= 1e-6


@pytest.mark.parametrize(
    ("bits", "group_size"), [(2, 128), (2, 256), (4, 32), (4, 64), (4, 128), (8, 32), (8, 1536), (8, 2560)]
)
def test_the_rounding_of_activations_costs_less_than_eight_thousandths(
    bits: int, group_size: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(1)
    width = max(group_size, 1536)
    quantization = GroupedQuantFormat(bits, group_size, (1 << bits) // 2)
    rows = random_rows(rng, (200, width), quantization, has_offsets=False)
    x = rng.normal(size=(40, width)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantize(rows, quantization).T.astype(np.float64)
    assert 1e-4 < relative_l2(run(load_fast(rows, quantization), x), expected) <= 8e-3


def test_outliers_cost_only_their_groups(instruction_set: str) -> None:
    rng = np.random.default_rng(2)
    quantization = GroupedQuantFormat(2, 128, 1)
    rows = random_rows(rng, (200, 1536), quantization, has_offsets=False)
    x = rng.normal(size=(40, 1536)).astype(np.float32)
    x[::4, 700] = 50
    y = run(load_fast(rows, quantization), x)
    expected = x.astype(np.float64) @ dequantize(rows, quantization).T.astype(np.float64)
    assert relative_l2(y, exact_product(x, rows, quantization)) <= 1e-6
    assert relative_l2(y[1::4], expected[1::4]) <= 8e-3
    assert relative_l2(y[::4], expected[::4]) <= 3e-2


def test_a_group_that_is_not_finite_makes_its_row_nan(instruction_set: str) -> None:
    rng = np.random.default_rng(3)
    for bits, group_size, has_offsets in ((2, 128, False), (4, 32, True), (8, 640, False)):
        quantization = GroupedQuantFormat(bits, group_size, 1)
        rows = random_rows(rng, (70, 640), quantization, has_offsets=has_offsets)
        x = rng.normal(size=(37, 640)).astype(np.float32)
        x[0, 0], x[5, 639], x[6, 300], x[36, 131] = np.nan, np.inf, -np.inf, np.nan
        x[20, 64], x[20, 65] = np.inf, -np.inf
        y = run(load_fast(rows, quantization), x)
        is_special = ~np.isfinite(x).all(axis=1)
        assert np.isnan(y[is_special]).all()
        finite = ~is_special
        assert relative_l2(y[finite], exact_product(x[finite], rows, quantization)) <= 1e-6


def test_zeros_and_subnormal_numbers(instruction_set: str) -> None:
    rng = np.random.default_rng(4)
    quantization = GroupedQuantFormat(4, 64, 3)
    rows = random_rows(rng, (70, 640), quantization)
    x = rng.normal(size=(37, 640)).astype(np.float32)
    x[3], x[4, :64], x[5] = 0, 0, -0.0
    x[6] *= np.float32(1e-43)
    x[7, :64] *= np.float32(1e-41)
    x[8] *= np.float32(1e-30)
    x[9] *= np.float32(1e30)
    y = run(load_fast(rows, quantization), x)
    expected = exact_product(x, rows, quantization)
    assert (y[[3, 5, 6]] == 0).all()
    for r in range(len(x)):
        if r not in (3, 5, 6):
            assert relative_l2(y[r], expected[r]) <= 1e-6


def test_halves_are_rounded_to_even(instruction_set: str) -> None:
    quantization = GroupedQuantFormat(8, 32, 0)
    rows = GroupedQuantRows(np.eye(32, dtype=np.uint8), np.ones((32, 1), np.float32), np.zeros((), np.float32))
    x = np.tile(np.arange(-15.5, 16.5, dtype=np.float32), (8, 1))
    x[:, 0] = 127
    np.testing.assert_array_equal(run(load_fast(rows, quantization), x), np.rint(x))


@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (4, 32), (8, 768)])
def test_results_do_not_depend_on_threads_rows_or_what_memory_held(
    bits: int, group_size: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(5)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (210, 768), quantization)
    x = rng.normal(size=(233, 768)).astype(np.float32)
    expected = bits_of(run(load_fast(rows, quantization, threads=1), x))
    # The same scratch memory, full of NaN's scales.
    poison = load_fast(rows, quantization, threads=1)
    run(poison, np.full((300, 768), np.nan, np.float32))
    np.testing.assert_array_equal(bits_of(run(poison, x)), expected)
    for threads in (2, 3):
        session = load_fast(rows, quantization, threads)
        np.testing.assert_array_equal(bits_of(run(session, x)), expected)
        for start, count in ((0, 8), (100, 11), (200, 33)):
            part = bits_of(run(session, x[start : start + count]))
            np.testing.assert_array_equal(part, expected[start : start + count])


def test_vectors_of_every_width_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit where multiply-adds are fused, since the order of additions is one."""
    rng = np.random.default_rng(6)
    quantization = GroupedQuantFormat(4, 96, 5)
    rows = random_rows(rng, (130, 1920), quantization)
    x = rng.normal(size=(50, 1920)).astype(np.float32)
    fused = []
    for name in ("avx2", "avx_vnni", "avx512_vnni", "amx"):
        monkeypatch.setenv("INTAGLIO_CPU_ISA", name)
        if has_chosen_instruction_set():
            fused.append(bits_of(run(load_fast(rows, quantization), x)))
    if len(fused) < 2:
        pytest.skip("fewer than two instruction sets that fuse are to be had here")
    for y in fused[1:]:
        np.testing.assert_array_equal(y, fused[0])


@pytest.mark.parametrize("count", [1, 7, 8])
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("offset", [0.5, -(2.0**-24), -0.0])
def test_one_offset_for_all_groups_is_added(count: int, dtype: DTypeLike, offset: float, instruction_set: str) -> None:
    """By the exact kernel unless it is zero: the fast ones have none."""
    rng = np.random.default_rng(7)
    quantization = GroupedQuantFormat(4, 32, 8)
    some = random_rows(rng, (70, 320), quantization, dtype, has_offsets=False)
    rows = GroupedQuantRows(some.codes, some.scales, np.array(offset, dtype))
    x = rng.normal(size=(count, 320)).astype(np.float32)
    y = run(load_fast(rows, quantization), x)
    exact = run(load(build_model(rows, vars(quantization))), x)
    assert np.array_equal(bits_of(y), bits_of(exact)) == (offset != 0)
    assert relative_l2(y, x.astype(np.float64) @ dequantize(rows, quantization).T.astype(np.float64)) <= 8e-3
