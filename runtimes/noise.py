"""Normally distributed float32 numbers from a seed: NumPy's own, or those that MLX and torch draw.

``numpy``: Philox and NumPy's ziggurat. NumPy may change that transform in a new version.

``mlx``: `mlx.random.normal(shape, key=mlx.random.key(seed))` on the CPU under Linux, byte for byte (measured on x86-64
with mlx 0.32): Threefry-2x32 of 20 rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405) in counter mode, and the
inverse error function in float32 with fused multiply-adds and the C library's logf. MLX on Apple's systems computes
logarithm and error function otherwise.

``torch``: `torch.randn(shape, generator=torch.Generator().manual_seed(seed))` on the CPU: MT19937 and Box-Muller. From
16 values on it is the float32 transform of torch's AVX2 kernel, byte for byte (measured with torch 2.13;
ATen/native/cpu/DistributionTemplates.h), which takes logarithm, sine and cosine from Cephes (Moshier). torch without
AVX2 differs from it by some 2e-6. Fewer than 16 values are computed in float64.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from intaglio.errors import InputError

# Values that are transformed at once: the temporaries then stay in the processor's cache.
_CHUNK = 1 << 15


def normal(shape: Sequence[int], seed: int | Sequence[int], rng: str = "numpy") -> np.ndarray:
    """Float32 numbers of mean 0 and variance 1, of ``shape``, which depend on nothing but the arguments.

    seed: an integer from 0 to 2**64 - 1 draws the whole shape at once; a sequence holds one for each index of the first
    axis, and row i is then what ``seed[i]`` alone draws for ``[1, *shape[1:]]``. rng: ``numpy``, ``mlx`` or ``torch``.
    ``torch`` takes the lowest 32 bits of the seed, as torch does. The numbers of a longer draw do not begin with those
    of a shorter one. Raises InputError for other arguments, and for ``mlx`` where the C library is not glibc.
    """
    if rng not in GENERATORS:
        raise InputError(f"rng is {rng!r}; expected one of {', '.join(GENERATORS)}")
    sizes = _checked_shape(shape)
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if not sizes or len(seed) != sizes[0]:
            raise InputError(f"there are {len(seed)} seeds for the shape {list(sizes)}; expected one for each row")
        rows = [_DRAW[rng](math.prod(sizes[1:]), _checked_seed(one)) for one in seed]
        return np.concatenate([np.empty(0, np.float32), *rows]).reshape(sizes)
    return _DRAW[rng](math.prod(sizes), _checked_seed(seed)).reshape(sizes)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if not all(isinstance(size, numbers.Integral) and not isinstance(size, bool) and size >= 0 for size in shape):
        raise InputError(f"the shape is {list(shape)}; expected integers of at least 0")
    return tuple(int(size) for size in shape)


def _checked_seed(seed: object) -> int:
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**64:
        raise InputError(f"seed is {seed!r}; expected an integer from 0 to 2**64 - 1")
    return int(seed)


def _numpy_normals(count: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(count, np.float32)


def _in_chunks(transform: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """``transform`` of float32 values along the first axis, which gives float32 of the same shape."""
    out = np.empty_like(values)
    rows = max(1, _CHUNK // math.prod(values.shape[1:]))
    for start in range(0, len(values), rows):
        out[start : start + rows] = transform(values[start : start + rows])
    return out


def _fma(a: np.ndarray, b: np.ndarray | np.floating, c: np.ndarray | float) -> np.ndarray:
    """a * b + c of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond 2008,
    doi:10.1109/TC.2007.70819), so that the second rounding gives what a single one would.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = product + addend
    above = total - product
    error = (product - (total - above)) + (addend - above)
    bits = total.view(np.int64)
    to_odd = (error != 0) & (bits & 1 == 0)
    bits += np.where(to_odd, np.where((error > 0) == (total > 0), 1, -1), 0)
    return total.astype(np.float32)


def _horner(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """The polynomial, highest power first, with one rounding for each coefficient."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = _fma(total, x, coefficient)
    return total


# MLX


def threefry_2x32(key: tuple[int, int], first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two uint32 words for each counter, which is a pair of uint32 words. ``key`` is two words of 32 bits."""
    keys = np.array([key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA], np.uint32)
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for rotation in (17, 29, 16, 24) if group % 2 else (13, 15, 26, 6):
            first = first + second
            second = (second << np.uint32(rotation) | second >> np.uint32(32 - rotation)) ^ first
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def _mlx_words(count: int, seed: int) -> np.ndarray:
    """The ``count`` uint32 words of the key of ``seed``: the counter's halves are i and i + half of the words."""
    half = (count + 1) // 2
    first = np.arange(half, dtype=np.uint32)
    second = first + np.uint32(half)
    # Of an odd number of words the middle one has no partner.
    second[count // 2 :] = 0
    low, high = threefry_2x32((seed >> 32, seed & 0xFFFFFFFF), first, second)
    return np.concatenate([low, high[: count // 2]])


# The inverse error function divided by its argument, in t = log(1 - x * x), for t above -6.125 and below (Giles 2012).
_ERFINV_CENTRE = (
    5.43877832e-9, 1.43285448e-7, 1.22774793e-6, 1.12963626e-7, -5.61530760e-5,
    -1.47697632e-4, 2.31468678e-3, 1.15392581e-2, -2.32015476e-1, 8.86226892e-1,
)  # fmt: skip
_ERFINV_TAIL = (
    3.03697567e-10, 2.93243101e-8, 1.22150334e-6, 2.84108955e-5, 3.93552968e-4,
    3.02698812e-3, 4.83185798e-3, -2.64646143e-1, 8.40016484e-1,
)  # fmt: skip


def _mlx_normals(count: int, seed: int) -> np.ndarray:
    logf = _glibc_logf()
    uniform = _mlx_words(count, seed).astype(np.float32) / np.float32(2**32)
    # Words near 2**32 round up to it.
    uniform = np.minimum(uniform, np.float32(1 - 2**-24))
    # (upper - lower) * u + lower. In float32 the width, 2 - 2**-24, is 2.
    uniform = np.float32(2) * uniform + np.float32(2**-24 - 1)

    def transform(x: np.ndarray) -> np.ndarray:
        t = np.fromiter(map(logf, _fma(x, -x, 1).tolist()), np.float32, len(x))
        ratio = _horner(t, _ERFINV_CENTRE)
        tail = np.abs(t) > np.float32(6.125)
        ratio[tail] = _horner(t[tail], _ERFINV_TAIL)
        return np.float32(math.sqrt(2)) * (x * ratio)

    return _in_chunks(transform, uniform)


def _glibc_logf() -> Callable[[float], float]:
    """Other C libraries round some logarithms differently. Raises InputError."""
    try:
        # Only glibc has it: a libm.so.6 beside another C library is a stand-in.
        _ = ctypes.CDLL("libc.so.6").gnu_get_libc_version
        logf = ctypes.CDLL("libm.so.6").logf
    except (OSError, AttributeError) as error:
        raise InputError(
            f"rng 'mlx' needs the function logf of glibc, the C library of most Linux systems, to match MLX to the "
            f"last bit, and it is not found here ({error}); use rng 'numpy' or 'torch', or pass the numbers as latents"
        ) from error
    logf.argtypes, logf.restype = [ctypes.c_float], ctypes.c_float
    return logf


# torch


def _torch_normals(count: int, seed: int) -> np.ndarray:
    # NumPy keeps the stream of RandomState as it is; full-range uint32 are the words of MT19937 one by one.
    words = np.random.RandomState(seed & 0xFFFFFFFF)
    if count < 16:
        return _torch_few_normals(count, words)
    out = np.empty(count, np.float32)
    whole = count // 16 * 16
    uniform = _torch_uniform(words, count)
    out[:whole] = _box_muller(uniform[:whole])
    if count > whole:
        # The last 16 values are drawn anew, over the end of the last whole block.
        out[-16:] = _box_muller(_torch_uniform(words, 16))
    return out


def _torch_uniform(words: np.random.RandomState, count: int) -> np.ndarray:
    return (words.randint(0, 2**32, count, np.uint32) & 0xFFFFFF).astype(np.float32) / np.float32(2**24)


def _torch_few_normals(count: int, words: np.random.RandomState) -> np.ndarray:
    out = []
    for _ in range((count + 1) // 2):
        high_low = words.randint(0, 2**32, 4, np.uint32).tolist()
        angle, radius = ((high << 32 | low) % 2**53 / 2**53 for high, low in (high_low[:2], high_low[2:]))
        angle, radius = 2 * math.pi * angle, math.sqrt(-2 * math.log1p(-radius))
        out += [radius * math.cos(angle), radius * math.sin(angle)]
    return np.array(out[:count], np.float32)


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    """Each 16 values are 8 radii and then 8 angles, which become 8 cosines and then 8 sines."""

    def transform(blocks: np.ndarray) -> np.ndarray:
        radius = np.sqrt(np.float32(-2) * _cephes_log(1 - blocks[:, 0]))
        cosine, sine = _cephes_cos_sin(np.float32(2 * math.pi) * blocks[:, 1])
        # No negative zero comes out of torch's addition of the mean.
        return np.stack([radius * cosine, radius * sine], axis=1) + np.float32(0)

    return _in_chunks(transform, uniform.reshape(-1, 2, 8)).reshape(-1)


_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)


def _cephes_log(x: np.ndarray) -> np.ndarray:
    """The natural logarithm of normal positive float32 numbers; fused where torch's compiler fuses."""
    fraction, exponent = np.frexp(x)
    below = fraction < np.float32(math.sqrt(0.5))
    power = (exponent - below).astype(np.float32)
    x = np.where(below, fraction + fraction, fraction) - np.float32(1)
    square = x * x
    # log(2) is taken in two parts, the larger one exact in a few bits.
    small = power * np.float32(-2.12194440e-4)
    total = _fma(_horner(x, _LOG) * x, square, small)
    total = _fma(-square, np.float32(0.5), total)
    return power * np.float32(0.693359375) + (x + total)


def _cephes_cos_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of float32 numbers from 0 to 8192; fused where torch's compiler fuses."""
    # Pairs of octants, counted from the one around 0.
    octant = ((x * np.float32(4 / math.pi)).astype(np.int32) + 1) & ~1
    for part in (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8):
        x = _fma(octant.astype(np.float32), np.float32(part), x)
    square = x * x
    even = _fma(_horner(square, _COS) * square, square, -(square * np.float32(0.5))) + np.float32(1)
    odd = _fma(_horner(square, _SIN) * square, x, x)
    swapped = octant & 2 != 0
    cosine, sine = np.where(swapped, odd, even), np.where(swapped, even, odd)
    return np.where((octant + 2) & 4 != 0, -cosine, cosine), np.where(octant & 4 != 0, -sine, sine)


_DRAW: dict[str, Callable[[int, int], np.ndarray]] = {
    "numpy": _numpy_normals,
    "mlx": _mlx_normals,
    "torch": _torch_normals,
}
GENERATORS = tuple(_DRAW)
