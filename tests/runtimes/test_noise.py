"""Random numbers: published and measured vectors, batches, what depends on what, bad arguments."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import Any

import numpy as np
import pytest

from intaglio.errors import InputError
from intaglio.runtimes.latents import pack
from intaglio.runtimes.noise import GENERATORS, _fma, _mlx_words, normal, threefry_2x32

glibc = pytest.mark.skipif(sys.platform != "linux", reason="MLX's numbers need glibc's logf")


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Known answers of Random123, threefry2x32 of 20 rounds.
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry(key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    first, second = threefry_2x32(key, np.array(counter[:1], np.uint32), np.array(counter[1:], np.uint32))
    assert (int(first[0]), int(second[0])) == expected


def test_mlx_words() -> None:
    assert _mlx_words(1, 0).tolist() == [1797259609]
    assert _mlx_words(1, 1).tolist() == [507451445]
    assert _mlx_words(3, 0).tolist() == [4146024105, 1351547692, 2718843009]
    assert _mlx_words(4, 0).tolist() == [4146024105, 967050713, 2718843009, 1272950319]


@glibc
def test_mlx_vectors() -> None:
    latents = normal((1, 128, 32, 32), 42, "mlx")
    bits = latents.view(np.uint32)
    found = [int(bits[at]) for at in [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 127, 31, 31)]]
    assert found == [0xBE474979, 0x3E9A0659, 0xC019E699, 0x3F05423B]
    digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in (latents, pack(latents))]
    assert digests == [
        "fa7f7fab17777e4a300415947f89317e1ddae77282948b25ce20f6bb4f2c3b4f",
        "f5fdf1bd1d56efe63bc36641ee1d690939a4298cfd814b22e1d533137ea0944f",
    ]


@glibc
def test_largest_words() -> None:
    # 2**32 - 44, which float32 rounds to 2**32: the uniform number stays below 1 and the normal one finite.
    assert _mlx_words(131072, 38)[3383] == 0xFFFFFFD4
    assert abs(normal((131072,), 38, "mlx")[3383] - 5.4) < 0.1


def test_torch_vectors() -> None:
    # torch 2.13 on x86-64: below 16 values, one that is drawn anew at the end, and many.
    assert normal((3,), 0, "torch").view(np.uint32).tolist() == [0x3FC53F5C, 0xBE963C50, 0xC00B7149]
    assert normal((17,), 0, "torch").view(np.uint32)[[0, 1, 16]].tolist() == [0xBF901B85, 0xBFD91446, 0x3F6E8C30]
    digest = hashlib.sha256(normal((1, 128, 32, 32), 42, "torch").tobytes()).hexdigest()
    assert digest == "10543f477ae1e5573e72cf20ce66ae39569c7bbd4aa56fd443947c53d34378a9"


def test_numpy_is_philox() -> None:
    expected = np.random.Generator(np.random.Philox(7)).standard_normal((2, 3, 5), np.float32)
    np.testing.assert_array_equal(normal((2, 3, 5), 7), expected)


def test_fma_rounds_once() -> None:
    # The products are 2**-54 short of half a last bit: float64 rounds the sums onto the middle of two float32 numbers,
    # and from there they would go to the even one.
    a = np.float32(1 - 2**-15) * np.array([1, -1, -1, 1], np.float32)
    b = np.full(4, (1 + 2**-15) * 2**-24, np.float32)
    c = np.float32(1 + 2**-23) * np.array([1, 1, -1, -1], np.float32)
    assert _fma(a, b, c).tolist() == c.tolist()
    # One that is exact and one that cancels.
    assert _fma(np.array([3, 3], np.float32), np.array([5, 5], np.float32), np.float32(-15)).tolist() == [0, 0]


@pytest.mark.parametrize("rng", GENERATORS)
def test_statistics_and_dtype(rng: str) -> None:
    if rng == "mlx" and sys.platform != "linux":
        pytest.skip("MLX's numbers need glibc's logf")
    values = normal((100, 1000), 3, rng)
    assert values.dtype == np.float32 and values.shape == (100, 1000)
    # Four standard errors of mean, variance and fourth moment of 1e5 values.
    assert abs(values.mean()) < 4 * 1e5**-0.5
    assert abs(values.var() - 1) < 4 * (2 / 1e5) ** 0.5
    assert abs((values.astype(np.float64) ** 4).mean() - 3) < 4 * (96 / 1e5) ** 0.5
    assert len(np.unique(values)) > 99000


@pytest.mark.parametrize("rng", GENERATORS)
def test_seeds_of_a_batch(rng: str) -> None:
    if rng == "mlx" and sys.platform != "linux":
        pytest.skip("MLX's numbers need glibc's logf")
    batch = normal((3, 4, 5), [5, 6, 5], rng)
    assert batch.shape == (3, 4, 5) and batch.dtype == np.float32
    for row, seed in zip(batch, [5, 6, 5], strict=True):
        np.testing.assert_array_equal(row[None], normal((1, 4, 5), seed, rng))
    assert not np.array_equal(batch[0], batch[1])
    # One seed for the whole shape goes on where the first row ends, or draws all rows in another order.
    assert not np.array_equal(normal((3, 4, 5), 5, rng)[2], batch[2])
    np.testing.assert_array_equal(normal((1, 4, 5), [5], rng), normal((1, 4, 5), 5, rng))


@pytest.mark.parametrize("rng", GENERATORS)
def test_shapes(rng: str) -> None:
    if rng == "mlx" and sys.platform != "linux":
        pytest.skip("MLX's numbers need glibc's logf")
    assert normal((), 0, rng).shape == ()
    assert normal((2, 0, 3), 0, rng).shape == (2, 0, 3)
    assert normal((0, 3), [], rng).shape == (0, 3)
    flat = normal((60,), 2**64 - 1, rng)
    np.testing.assert_array_equal(normal(np.array([3, 4, 5]), np.uint64(2**64 - 1), rng).ravel(), flat)


def test_torch_takes_32_bits_of_the_seed() -> None:
    np.testing.assert_array_equal(normal((20,), 2**32 + 9, "torch"), normal((20,), 9, "torch"))
    assert not np.array_equal(normal((20,), 2**32 + 9), normal((20,), 9))


@pytest.mark.parametrize(
    ("shape", "seed", "rng", "message"),
    [
        ((2,), 0, "jax", "rng is 'jax'; expected one of numpy, mlx, torch"),
        ((2,), -1, "numpy", "seed is -1; expected an integer from 0"),
        ((2,), 2**64, "torch", "expected an integer from 0 to 2"),
        ((2,), 1.0, "mlx", "seed is 1.0"),
        ((2,), True, "numpy", "seed is True"),
        ((2,), "1", "numpy", "seed is '1'"),
        ((2,), [1, None], "numpy", "seed is None"),
        ((2,), [1], "numpy", "there are 1 seeds for the shape .2.; expected one for each row"),
        ((), [1], "numpy", "there are 1 seeds for the shape"),
        ((2, -1), 0, "numpy", "the shape is .2, -1.; expected integers of at least 0"),
        ((2.0,), 0, "numpy", "the shape is"),
    ],
)
def test_bad_arguments(shape: Any, seed: Any, rng: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        normal(shape, seed, rng)


def test_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(InputError, match=r"needs the function logf of glibc.*libc\.so\.6.*use rng 'numpy' or 'torch'"):
        normal((2,), 0, "mlx")
    # Another C library may come with a stand-in for libm.so.6.
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(InputError, match="gnu_get_libc_version"):
        normal((2,), 0, "mlx")
    assert normal((20,), 0, "torch").shape == (20,)
