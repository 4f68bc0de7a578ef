"""Random numbers against MLX, torch and diffusers: equal to the last bit where their kernels are the ones matched.

torch without AVX2 (other processors than x86-64) takes other logarithms and rounds the angle otherwise: there the bound
is 5e-6 (measured: 2.3e-6 over 2 million values).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from intaglio.runtimes.noise import _fma, _mlx_words, normal

SIZES = [*range(1, 36), 47, 48, 49, 1000, 1001, 65536, 65537, 131072, 200001]
SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**63, 2**64 - 1]

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX's numbers need glibc's logf")


def assert_bits_equal(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def assert_equals_torch(found: np.ndarray, expected: torch.Tensor) -> None:
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert_bits_equal(found, expected.numpy())
    else:
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=5e-6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@linux
def test_mlx_normals() -> None:
    import mlx.core as mx

    drawn = np.random.default_rng().integers(2**63, size=3).tolist()
    for size in SIZES:
        for seed in [*SEEDS, *drawn] if size < 1e4 else drawn:
            expected = np.array(mx.random.normal((size,), key=mx.random.key(seed)))
            assert_bits_equal(normal((size,), seed, "mlx"), expected)
    # One of its words is so near 2**32 that float32 rounds it there.
    expected = np.array(mx.random.normal((131072,), key=mx.random.key(38)))
    assert_bits_equal(normal((131072,), 38, "mlx"), expected)
    expected = np.array(mx.random.normal((2, 3, 5, 7), key=mx.random.key(11)))
    assert_bits_equal(normal((2, 3, 5, 7), 11, "mlx"), expected)


@linux
def test_mlx_words() -> None:
    import mlx.core as mx

    # Splitting a key is the one place where they come out as they are.
    for pairs in (1, 2, 3, 8, 501):
        for seed in SEEDS:
            expected = np.array(mx.random.split(mx.random.key(seed), pairs))
            np.testing.assert_array_equal(_mlx_words(2 * pairs, seed), expected.ravel())


def test_torch_normals() -> None:
    drawn = np.random.default_rng().integers(2**63, size=3).tolist()
    for size in SIZES:
        for seed in [*SEEDS, *drawn] if size < 1e4 else drawn:
            assert_equals_torch(normal((size,), seed, "torch"), torch.randn(size, generator=generator(seed)))
    for shape in [(), (1, 3, 5), (2, 3, 5, 7), (1, 128, 16, 24)]:
        assert_equals_torch(normal(shape, 11, "torch"), torch.randn(shape, generator=generator(11)))


def test_torch_manual_seed() -> None:
    torch.manual_seed(1234)
    assert_equals_torch(normal((1, 128, 8, 8), 1234, "torch"), torch.randn(1, 128, 8, 8))


@pytest.mark.parametrize("shape", [(3, 128, 4, 6), (3, 1, 2, 2), (3, 1, 1, 17)])
def test_batches_of_diffusers(shape: tuple[int, ...]) -> None:
    one: Any = randn_tensor(shape, generator=generator(5))
    assert_equals_torch(normal(shape, 5, "torch"), one)
    seeds = [5, 2**40 + 1, 0]
    several: Any = randn_tensor(shape, generator=[generator(seed) for seed in seeds])
    assert_equals_torch(normal(shape, seeds, "torch"), several)


def test_fma() -> None:
    """Against exact rational arithmetic, on numbers whose float64 sum often lies at the middle of two float32."""
    from fractions import Fraction

    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 4000)).astype(np.float32)
    c = (rng.standard_normal(4000) * 2.0 ** rng.integers(-40, 40, 4000)).astype(np.float32)
    # Products that are 2**-54 short of half the last bit of the other term.
    a[::2] = (1 - 2.0**-15) * rng.choice([-1, 1], 2000)
    b[::2] = (1 + 2.0**-15) * 2.0**-24
    c[::2] = 1 + rng.integers(0, 2**23, 2000) * 2.0**-23
    found = _fma(a, b, c)
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), found, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [np.nextafter(value, np.float32(-np.inf)), value, np.nextafter(value, np.float32(np.inf))]
        distance = [abs(Fraction(float(one)) - exact) for one in near]
        assert distance[1] == min(distance)
        if distance[1] in (distance[0], distance[2]):
            assert int(value.view(np.uint32)) % 2 == 0
