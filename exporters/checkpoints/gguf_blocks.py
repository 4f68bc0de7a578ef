"""The tensor types of GGUF: sizes of all, and how the block-quantized ones become grouped-quantized rows.

A block holds its scale (and minimum) beside its codes; here they are taken apart, exactly: codes and
scales are the file's, element for element. Layouts: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.exporters.checkpoints.tensors import CheckpointTensor, FileBytes, QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, pack_codes

DENSE_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# id -> (name, values a block, bytes a block), for every type that ggml has published.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    # ggml keeps value i in the low and value i + 16 in the high half of byte i.
    quants = blocks[..., at : at + 16]
    values = np.concatenate([quants & 0x0F, quants >> 4], axis=-1)
    return pack_codes(values.reshape(values.shape[0], -1), 4)


_NO_OFFSETS = np.zeros((), np.float16)


def _q4_0(blocks: np.ndarray) -> GroupedQuantRows:
    return GroupedQuantRows(_nibbles(blocks, 2), _float16(blocks, 0), _NO_OFFSETS)


def _q4_1(blocks: np.ndarray) -> GroupedQuantRows:
    return GroupedQuantRows(_nibbles(blocks, 4), _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: np.ndarray) -> GroupedQuantRows:
    # int8 values, held as code + 128: the sign bit flipped.
    codes = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(blocks.shape[0], -1)
    return GroupedQuantRows(codes, _float16(blocks, 0), _NO_OFFSETS)


@dataclass(frozen=True)
class BlockType:
    """A block-quantized type that is read: its layout and its decoder from blocks ``[rows, blocks, bytes]``."""

    layout: QuantizedLayout
    decode: Callable[[np.ndarray], GroupedQuantRows]


_HALF = np.dtype(np.float16)
BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(QuantizedLayout(GroupedQuantFormat(4, 32, 8), _HALF, False), _q4_0),
    "Q4_1": BlockType(QuantizedLayout(GroupedQuantFormat(4, 32, 0), _HALF, True), _q4_1),
    "Q8_0": BlockType(QuantizedLayout(GroupedQuantFormat(8, 32, 128), _HALF, False), _q8_0),
}


@dataclass(frozen=True)
class BlockTensor(CheckpointTensor):
    """A block-quantized matrix ``[out, in]`` of a GGUF file."""

    file: FileBytes
    offset: int
    block_type: BlockType
    block_values: int
    block_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.block_type.layout)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_values * self.block_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        raw = self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        blocks = np.frombuffer(raw, np.uint8).reshape(stop - start, -1, self.block_bytes)
        return self.block_type.decode(blocks)
