"""Takes the block-quantized types of GGUF apart into grouped-quantized rows.

Every decoder maps blocks, uint8 ``[rows, blocks, bytes]``, to :class:`GroupedQuantRows` without rounding:
codes are the file's (narrower ones in the next wider bits) and so are scales, but for the K-quants, whose
float16 times a 6-bit or 8-bit integer is exact in float32. Layouts: ggml's ``ggml-common.h``; the 128-wide
ternary type is oxibonsai's.
"""

from __future__ import annotations

import numpy as np

from intaglio.kernels.grouped_quant import GroupedQuantRows, pack_codes

_NO_OFFSETS = np.zeros((), np.float16)
_NO_OFFSETS_FLOAT32 = np.zeros((), np.float32)


def bit_planes(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpacks uint8 ``[..., n]`` to codes ``[..., n * 8 / bits]``, the way ggml interleaves them.

    Each ``run`` bytes hold ``8 / bits`` runs of values, the first in the lowest bits of all those bytes.
    """
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(*packed.shape[:-1], -1)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    return pack_codes(codes.reshape(codes.shape[0], -1), bits)


def _groups(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1)


def q4_0(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, 16 bytes of codes; w = d * (code - 8)."""
    return GroupedQuantRows(_packed(bit_planes(blocks[..., 2:], 4, 16), 4), _float16(blocks, 0), _NO_OFFSETS)


def q4_1(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, ``m`` f16, 16 bytes of codes; w = d * code + m."""
    return GroupedQuantRows(_packed(bit_planes(blocks[..., 4:], 4, 16), 4), _float16(blocks, 0), _float16(blocks, 2))


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _packed(bit_planes(low, 4, 16) | bit_planes(high, 1, 1) << np.uint8(4), 8)


def q5_0(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, 4 bytes of fifth bits, 16 bytes of low bits; w = d * (code - 16)."""
    return GroupedQuantRows(_five_bits(blocks[..., 2:6], blocks[..., 6:]), _float16(blocks, 0), _NO_OFFSETS)


def q5_1(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, ``m`` f16, 4 bytes of fifth bits, 16 bytes of low bits; w = d * code + m."""
    return GroupedQuantRows(_five_bits(blocks[..., 4:8], blocks[..., 8:]), _float16(blocks, 0), _float16(blocks, 2))


def q8_0(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, 32 int8; held as code + 128, which flips the sign bit."""
    return GroupedQuantRows(_packed(blocks[..., 2:] ^ np.uint8(0x80), 8), _float16(blocks, 0), _NO_OFFSETS)


def _product(block_scale: np.ndarray, integers: np.ndarray) -> np.ndarray:
    # At most 11 + 8 significant bits, so nothing is rounded. An infinite scale stays what it is.
    with np.errstate(invalid="ignore"):
        return _groups(block_scale.astype(np.float32)[..., None] * integers.astype(np.float32))


def q2_k(blocks: np.ndarray) -> GroupedQuantRows:
    """16 bytes of scale (low) and minimum (high) nibbles, 64 of codes, ``d`` f16, ``dmin`` f16; groups of 16."""
    codes = bit_planes(blocks[..., 16:80], 2, 32)
    scales = _product(_float16(blocks, 80), blocks[..., :16] & np.uint8(0x0F))
    offsets = -_product(_float16(blocks, 82), blocks[..., :16] >> np.uint8(4))
    return GroupedQuantRows(_packed(codes, 2), scales, offsets)


def q3_k(blocks: np.ndarray) -> GroupedQuantRows:
    """32 bytes of third bits, 64 of low bits, 12 of 6-bit scales, ``d`` f16; w = d * (sc - 32) * (code - 4)."""
    codes = bit_planes(blocks[..., 32:96], 2, 32) | bit_planes(blocks[..., :32], 1, 32) << np.uint8(2)
    # The low nibbles of the 16 scales fill 8 bytes, the high pairs the next 4.
    low = bit_planes(blocks[..., 96:104], 4, 8)
    high = bit_planes(blocks[..., 104:108], 2, 4)
    integers = (low | high << np.uint8(4)).astype(np.int16) - 32
    return GroupedQuantRows(_packed(codes, 4), _product(_float16(blocks, 108), integers), _NO_OFFSETS_FLOAT32)


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # 8 scales and 8 minima in 12 bytes: the first four of each whole in six bits, the last four as nibbles
    # whose upper two bits are the spare bits of the first.
    first, second, nibbles = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = [first & np.uint8(63), nibbles & np.uint8(15) | first >> np.uint8(6) << np.uint8(4)]
    minima = [second & np.uint8(63), nibbles >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)]
    return np.concatenate(scales, axis=-1), np.concatenate(minima, axis=-1)


def _affine_of_32(blocks: np.ndarray, codes: np.ndarray) -> GroupedQuantRows:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    return GroupedQuantRows(codes, _product(_float16(blocks, 0), scales), -_product(_float16(blocks, 2), minima))


def q4_k(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, ``dmin`` f16, 12 bytes of 6-bit scales and minima, 128 of codes; w = d * sc * code - dmin * m."""
    return _affine_of_32(blocks, _packed(bit_planes(blocks[..., 16:], 4, 32), 4))


def q5_k(blocks: np.ndarray) -> GroupedQuantRows:
    """As Q4_K, with 32 bytes of fifth bits before the 128 of low bits."""
    codes = bit_planes(blocks[..., 48:], 4, 32) | bit_planes(blocks[..., 16:48], 1, 32) << np.uint8(4)
    return _affine_of_32(blocks, _packed(codes, 8))


def q6_k(blocks: np.ndarray) -> GroupedQuantRows:
    """128 bytes of low bits, 64 of high pairs, 16 int8 scales, ``d`` f16; w = d * sc * (code - 32), groups of 16."""
    codes = bit_planes(blocks[..., :128], 4, 64) | bit_planes(blocks[..., 128:192], 2, 32) << np.uint8(4)
    integers = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return GroupedQuantRows(_packed(codes, 8), _product(_float16(blocks, 208), integers), _NO_OFFSETS_FLOAT32)


def _trits(packed: np.ndarray, count: int) -> np.ndarray:
    # A byte is a fraction of 256 in base 3: multiplying by 3 moves the next digit above the byte.
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
    digits = (packed[..., None, :] * powers).astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return digits.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def tq1_0(blocks: np.ndarray) -> GroupedQuantRows:
    """32 and 16 bytes of five ternary digits, 4 bytes of four, ``d`` f16; w = d * (code - 1)."""
    parts = [_trits(blocks[..., :32], 5), _trits(blocks[..., 32:48], 5), _trits(blocks[..., 48:52], 4)]
    return GroupedQuantRows(_packed(np.concatenate(parts, axis=-1), 2), _float16(blocks, 52), _NO_OFFSETS)


def tq2_0(blocks: np.ndarray) -> GroupedQuantRows:
    """64 bytes of interleaved codes, ``d`` f16; w = d * (code - 1), and code 3 is 2 d, as ggml reads it."""
    return GroupedQuantRows(_packed(bit_planes(blocks[..., :64], 2, 32), 2), _float16(blocks, 64), _NO_OFFSETS)


def tq2_0_g128(blocks: np.ndarray) -> GroupedQuantRows:
    """32 bytes of codes in order, ``d`` f16; w = d * (code - 1)."""
    return GroupedQuantRows(_groups(blocks[..., :32]), _float16(blocks, 32), _NO_OFFSETS)


def q1_0_g128(blocks: np.ndarray) -> GroupedQuantRows:
    """``d`` f16, 16 bytes of bits in order; 1 is d and 0 is -d, held as the ternary codes 2 and 0."""
    codes = bit_planes(blocks[..., 2:], 1, 1) << np.uint8(1)
    return GroupedQuantRows(_packed(codes, 2), _float16(blocks, 0), _NO_OFFSETS)
