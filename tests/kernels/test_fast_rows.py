"""The accuracy ``fast`` of GroupedQuantMatMul for few rows, compared with the same rounding in NumPy and in float64."""

from __future__ import annotations

from typing import Any

import kernel_runner
import ml_dtypes
import numpy as np
import pytest
from kernel_runner import bits_of, build_model, has_chosen_instruction_set, random_rows, run

from intaglio.kernels.grouped_quant import (
    SCALE_DTYPES,
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    unpack_codes,
)

INSTRUCTION_SETS = ("portable", "neon", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx")
# The kernels of few rows take fewer than this.
MANY_ROWS = 8
# The largest magnitude of a group that counts as zeros.
SMALLEST = 2.0**-120


def load(rows: GroupedQuantRows, quantization: GroupedQuantFormat, threads: int = 2, fast: int = 1) -> Any:
    return kernel_runner.load(build_model(rows, {**vars(quantization), "fast": fast}), threads)


def rounded_product(x: np.ndarray, rows: GroupedQuantRows, quantization: GroupedQuantFormat) -> np.ndarray:
    """The product in float64 of activations rounded to 8 bits, one scale a row and group."""
    group_size = quantization.group_size
    values = x.reshape(len(x), -1, group_size)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    is_zero = largest < SMALLEST
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(is_zero, np.float32(0), np.float32(127) / largest)
    codes = np.rint(values * inverse)
    scales = np.where(is_zero, np.float32(0), largest / np.float32(127))
    assert codes.dtype == scales.dtype == np.float32
    rounded = (codes.astype(np.float64) * scales.astype(np.float64)).reshape(x.shape)
    weight = unpack_codes(rows.codes, quantization.bits).astype(np.float64) - quantization.zero_point
    weight = weight.reshape(len(weight), -1, group_size) * rows.scales.astype(np.float64)[..., None]
    weight = weight + rows.offsets.astype(np.float64)[..., None]
    return rounded @ weight.reshape(len(weight), -1).T


def relative_l2(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INTAGLIO_CPU_ISA", request.param)
    if not has_chosen_instruction_set():
        pytest.skip(f"{request.param} is not to be had here")
    return request.param


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("group_size", "width"), [(16, 528), (32, 576), (48, 720), (64, 1536), (128, 3072), (256, 1280), (300, 300)]
)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_few_rows_match_the_product_of_rounded_activations(
    bits: int, group_size: int, width: int, has_offsets: bool, instruction_set: str
) -> None:
    rng = np.random.default_rng(bits * group_size)
    quantization = GroupedQuantFormat(bits, group_size, (1 << bits) // 2)
    # More columns than tiles, and a rest.
    rows = random_rows(rng, (71, width), quantization, SCALE_DTYPES[group_size % 3], has_offsets)
    session = load(rows, quantization)
    for count in range(1, MANY_ROWS):
        x = rng.normal(size=(count, width)).astype(np.float32)
        y = run(session, x)
        assert y.dtype == np.float32
        assert relative_l2(y, rounded_product(x, rows, quantization)) <= 1e-6


def test_few_columns(instruction_set: str) -> None:
    """Fewer than are read side by side, and any rest."""
    rng = np.random.default_rng(13)
    quantization = GroupedQuantFormat(2, 128, 1)
    x = rng.normal(size=(5, 256)).astype(np.float32)
    for columns in (1, 3, 6):
        rows = random_rows(rng, (columns, 256), quantization)
        session = load(rows, quantization)
        for count in (1, 5):
            assert relative_l2(run(session, x[:count]), rounded_product(x[:count], rows, quantization)) <= 1e-6


@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (2, 256), (4, 32), (4, 64), (4, 128), (8, 32)])
def test_few_rows_are_near_the_product_that_is_not_rounded(bits: int, group_size: int, instruction_set: str) -> None:
    rng = np.random.default_rng(bits * group_size)
    quantization = GroupedQuantFormat(bits, group_size, (1 << bits) // 2)
    rows = random_rows(rng, (256, 3072), quantization, has_offsets=False)
    x = rng.normal(size=(MANY_ROWS - 1, 3072)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantize(rows, quantization).astype(np.float64).T
    assert relative_l2(run(load(rows, quantization), x), expected) <= 8e-3


@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (4, 32), (8, 32)])
def test_outliers_cost_only_their_own_group(
    bits: int, group_size: int, instruction_set: str, record_property: Any
) -> None:
    rng = np.random.default_rng(11)
    quantization = GroupedQuantFormat(bits, group_size, (1 << bits) // 2)
    rows = random_rows(rng, (64, 1536), quantization, has_offsets=False)
    x = rng.normal(size=(3, 1536)).astype(np.float32)
    x[:, rng.integers(0, 1536, 8)] *= 50
    y = run(load(rows, quantization), x)
    assert relative_l2(y, rounded_product(x, rows, quantization)) <= 1e-6
    weight = dequantize(rows, quantization).astype(np.float64)
    record_property("relative_l2_with_outliers", relative_l2(y, x.astype(np.float64) @ weight.T))


@pytest.mark.parametrize(("bits", "group_size", "width"), [(2, 128, 1152), (4, 32, 1536), (8, 20 * 16, 2240)])
def test_a_row_depends_on_neither_threads_nor_other_rows(
    bits: int, group_size: int, width: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(3)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    # Enough columns for several parts.
    rows = random_rows(rng, (403, width), quantization)
    x = rng.normal(size=(MANY_ROWS - 1, width)).astype(np.float32)
    expected = bits_of(np.concatenate([run(load(rows, quantization, threads=1), row[None]) for row in x]))
    for threads in (1, 2, 3):
        session = load(rows, quantization, threads)
        for count in range(1, MANY_ROWS):
            np.testing.assert_array_equal(bits_of(run(session, x[:count])), expected[:count])


def test_only_a_row_with_a_non_finite_activation_becomes_nan(instruction_set: str) -> None:
    rng = np.random.default_rng(5)
    for bits, group_size, value in ((2, 128, np.inf), (4, 32, np.nan), (8, 384, -np.inf)):
        quantization = GroupedQuantFormat(bits, group_size, 1)
        rows = random_rows(rng, (9, 384), quantization)
        x = rng.normal(size=(5, 384)).astype(np.float32)
        x[1, 0], x[4, 383] = value, value
        y = run(load(rows, quantization), x)
        assert np.isnan(y).all(axis=1).tolist() == [False, True, False, False, True]
        finite = [0, 2, 3]
        assert relative_l2(y[finite], rounded_product(x[finite], rows, quantization)) <= 1e-6


def test_zeros_and_the_smallest_values_are_harmless(instruction_set: str) -> None:
    rng = np.random.default_rng(6)
    quantization = GroupedQuantFormat(4, 32, 8)
    rows = random_rows(rng, (9, 96), quantization)
    session = load(rows, quantization)
    for size in (0.0, 1e-45, 1e-40, 1e-36, 1e-30, 1e30):
        x = (rng.normal(size=(2, 96)) * size).astype(np.float32)
        y = run(session, x)
        assert np.isfinite(y).all()
        np.testing.assert_allclose(y, rounded_product(x, rows, quantization), rtol=1e-4, atol=max(size, 1e-36) * 1e-4)


def test_scales_at_the_ends_of_float16_are_read_exactly(instruction_set: str) -> None:
    scales = np.array([[5.96e-8, 6.1e-5, 65504.0], [-5.96e-8, -6.0e-5, -65504.0]], np.float16)
    codes = np.full((2, 48), 1, np.uint8)
    rows = GroupedQuantRows(codes, scales, np.zeros((), np.float16))
    session = load(rows, GroupedQuantFormat(8, 16, 0))
    for group in range(3):
        x = np.zeros((1, 48), np.float32)
        x[0, 16 * group] = 127
        np.testing.assert_array_equal(run(session, x)[0], 127 * scales[:, group].astype(np.float32))


def test_a_scale_that_is_not_finite_stays_in_its_column(instruction_set: str) -> None:
    rng = np.random.default_rng(7)
    quantization = GroupedQuantFormat(2, 128, 1)
    for dtype in SCALE_DTYPES:
        rows = random_rows(rng, (6, 384), quantization, dtype)
        rows.scales[3, 0] = np.array(np.inf).astype(dtype)
        rows.offsets[1, 0] = np.array(np.nan).astype(dtype)
        y = run(load(rows, quantization), rng.normal(size=(1, 384)).astype(np.float32))
        assert np.isfinite(y[0]).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(("bits", "group_size", "width"), [(2, 4, 64), (4, 24, 96), (8, 8, 64)])
def test_other_groups_are_computed_exactly(bits: int, group_size: int, width: int) -> None:
    rng = np.random.default_rng(8)
    quantization = GroupedQuantFormat(bits, group_size, 1)
    rows = random_rows(rng, (5, width), quantization, np.dtype(ml_dtypes.bfloat16))
    x = rng.normal(size=(3, width)).astype(np.float32)
    exact = run(load(rows, quantization, fast=0), x)
    np.testing.assert_array_equal(bits_of(run(load(rows, quantization), x)), bits_of(exact))
