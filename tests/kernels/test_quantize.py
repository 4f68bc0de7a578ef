"""The quantizer's reference against its definition in float64 and exact fractions, and its formats against MLX."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from intaglio.kernels.grouped_quant import dequantize, unpack_codes
from intaglio.kernels.quantize import LARGEST_SCALE, SMALLEST_SCALE, Quantization, quantize, quantize_groups

TERNARY = Quantization("ternary", 128)


def weights(seed: int, rows: int = 24, width: int = 384) -> np.ndarray:
    """Groups of many magnitudes, shifted ones among them."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-8, 3, (rows, width // 32, 1))) * rng.choice([-1, 1], (rows, width // 32, 1))
    groups = (rng.standard_normal((rows, width // 32, 32)) + rng.normal(0, 2, (rows, width // 32, 1))) * size
    return groups.reshape(rows, width).astype(np.float32)


def codes(rows: np.ndarray, bits: int) -> np.ndarray:
    return unpack_codes(rows, bits).astype(np.int32)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_ternary_by_its_definition(seed: int, group_size: int) -> None:
    weight = weights(seed)
    rows = quantize(weight, Quantization("ternary", group_size))
    mean = np.abs(weight.astype(np.float64)).reshape(len(weight), -1, group_size).mean(-1)
    scales = rows.scales.astype(np.float64)
    # Half a bfloat16 step, and float32's rounding of the sum.
    assert np.all(np.abs(scales - mean) <= mean * (2**-8 + 1e-6))
    assert rows.offsets.shape == ()
    ratio = weight.astype(np.float64) / np.repeat(scales, group_size, axis=1)
    assert np.array_equal(codes(rows.codes, 2), np.clip(np.rint(ratio), -1, 1) + 1)


def test_the_nearest_bfloat16_is_the_scale() -> None:
    weight = np.full((1, 128), 0.3, np.float32)
    assert quantize(weight, TERNARY).scales == np.float32(0.3).astype(ml_dtypes.bfloat16)
    # 257/256 and 259/256 lie between two bfloat16 numbers; of both the even one is taken.
    for value, expected in ((257 / 256, 1.0), (259 / 256, 260 / 256)):
        assert quantize(np.full((1, 128), value, np.float32), TERNARY).scales.item() == expected


def test_steps_at_a_tie_are_those_of_exact_fractions() -> None:
    """Values one float32 around half of the scale, of scales with all mantissas: no quotient may round over the tie."""
    for mantissa in range(128, 256):
        scale = np.float32(mantissa / 128)
        half = scale / np.float32(2)
        tested = np.array([half, np.nextafter(half, np.float32(9)), np.nextafter(half, np.float32(0))], np.float32)
        # The rest of the group makes the mean exactly the scale.
        rest = np.full(125, scale, np.float32)
        rest[:3] += scale - tested
        group = np.concatenate([tested, rest]).reshape(1, 1, 128)
        found = quantize_groups(group, "ternary")
        assert found.scales.item() == scale
        expected = [round(Fraction(float(value)) / Fraction(float(scale))) for value in tested]
        assert found.steps[0, 0, :3].tolist() == expected == [0, 1, 0]
        assert quantize_groups(-group, "ternary").steps[0, 0, :3].tolist() == [0, -1, 0]


def test_scales_stay_in_the_normal_range_of_float16() -> None:
    weight = np.zeros((5, 128), np.float32)
    weight[1] = 1e-9
    weight[2, 5] = 2.0**-13
    weight[3] = 70000.0
    weight[4] = np.finfo(np.float32).max
    rows = quantize(weight, TERNARY)
    scales = rows.scales[:, 0].astype(np.float32)
    assert scales.tolist() == [SMALLEST_SCALE] * 3 + [LARGEST_SCALE] * 2
    assert np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
    assert np.float32(65504) < np.nextafter(ml_dtypes.bfloat16(LARGEST_SCALE), ml_dtypes.bfloat16(np.inf))
    found = dequantize(rows, TERNARY.layout(128))
    assert not found[:2].any()
    assert found[2].tolist() == [SMALLEST_SCALE if i == 5 else 0 for i in range(128)]
    assert (found[3:] == LARGEST_SCALE).all()


@pytest.mark.parametrize("seed", range(3))
def test_int8_by_its_definition(seed: int) -> None:
    weight = weights(seed, width=96)
    rows = quantize(weight, Quantization("int8"))
    assert rows.scales.shape == (len(weight), 1)
    largest = np.abs(weight.astype(np.float64)).max(-1, keepdims=True) / 127
    scales = rows.scales.astype(np.float64)
    assert np.all(np.abs(scales - largest) <= largest * (2**-8 + 1e-6))
    steps = codes(rows.codes, 8) - 128
    # A float32 quotient beside a tie may be the tie itself, hence half a step and a little.
    assert np.all(np.abs(steps - np.clip(weight / scales, -127, 127)) <= 0.5 + 1e-5)
    assert steps.min() >= -127
    assert np.abs(steps).max(-1).min() >= 126
    # What MLX and GGUF files have in place of a zero point, 128 scales, is a float16 too.
    largest = quantize(np.full((1, 96), 1e9, np.float32), Quantization("int8")).scales.astype(np.float32)
    assert np.isfinite((128 * largest).astype(np.float16))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_affine_against_mlx(seed: int, group_size: int) -> None:
    """MLX's float32 scales and biases, rounded, are ours; and MLX unpacks to what our reference does."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = weights(seed)
    quantization = Quantization("affine4", group_size)
    rows = quantize(weight, quantization)
    _, scales, biases = (np.array(a) for a in mx.quantize(mx.array(weight), group_size=group_size, bits=4))
    ours = [part.astype(np.float32) for part in (rows.scales, rows.offsets)]
    for found, expected in zip(ours, (scales, biases), strict=True):
        inside = np.abs(expected) >= SMALLEST_SCALE
        assert inside.mean() > 0.9
        assert np.array_equal(found[inside], expected.astype(ml_dtypes.bfloat16).astype(np.float32)[inside])
    packed = mx.array(np.ascontiguousarray(rows.codes).view(np.uint32))
    unpacked = mx.dequantize(packed, mx.array(ours[0]), mx.array(ours[1]), group_size=group_size, bits=4)
    assert np.array_equal(np.array(unpacked), dequantize(rows, quantization.layout(weight.shape[1])))
    # Each weight got the nearest of its sixteen values.
    wide, far = (np.repeat(part, group_size, axis=1).astype(np.float64)[..., None] for part in ours)
    errors = np.abs(np.arange(16) * wide + far - weight[..., None])
    found = np.take_along_axis(errors, codes(rows.codes, 4)[..., None], -1)[..., 0]
    assert np.all(found <= errors.min(-1) + 1e-5 * np.abs(wide[..., 0]))


def test_what_cannot_be_quantized_is_said() -> None:
    with pytest.raises(ValueError, match="format 'Ternary' is unknown; there are ternary, affine4, int8"):
        Quantization("Ternary", 128)
    for group_size in (None, 0, -128, 48, 256):
        with pytest.raises(ValueError, match=f"group_size is {group_size}, expected one of 32, 64, 128"):
            Quantization("ternary", group_size)
    with pytest.raises(ValueError, match="int8 has one group a row"):
        Quantization("int8", 128)
    with pytest.raises(ValueError, match="its 192 inputs are no multiple of the group size 128"):
        quantize(np.zeros((2, 192), np.float32), TERNARY)
    with pytest.raises(ValueError, match="its 0 inputs"):
        Quantization("int8").layout(0)
    weight = weights(0)
    weight[3, 7] = np.nan
    with pytest.raises(ValueError, match="row 3 holds nan at input 7"):
        quantize(weight, TERNARY)
