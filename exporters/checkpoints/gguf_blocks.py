"""The tensor types of GGUF: sizes of all, and which of them are read as grouped-quantized rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf_unpack
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, FileBytes, QuantizedLayout, Rows
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows

DENSE_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# id -> (name, values a block, bytes a block), for every type that ggml has published. Id 42 has three
# meanings and stands in gguf_type42; 41 is ggml's Q1_0 and oxibonsai's Q1_0_g128, one layout.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0_g128", 128, 18), 142: ("PQ2_0", 128, 34),
}  # fmt: skip


@dataclass(frozen=True)
class BlockType:
    """A block-quantized type that is read: its layout and its decoder from blocks ``[rows, blocks, bytes]``.

    ``ternary`` types have a fourth code that nothing may use.
    """

    layout: QuantizedLayout
    decode: Callable[[np.ndarray], GroupedQuantRows]
    ternary: bool = False


def _layout(
    bits: int, group_size: int, zero_point: int, *, dtype: str = "f2", offsets: bool = False
) -> QuantizedLayout:
    return QuantizedLayout(GroupedQuantFormat(bits, group_size, zero_point), np.dtype(dtype), offsets)


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(_layout(4, 32, 8), gguf_unpack.q4_0),
    "Q4_1": BlockType(_layout(4, 32, 0, offsets=True), gguf_unpack.q4_1),
    "Q5_0": BlockType(_layout(8, 32, 16), gguf_unpack.q5_0),
    "Q5_1": BlockType(_layout(8, 32, 0, offsets=True), gguf_unpack.q5_1),
    "Q8_0": BlockType(_layout(8, 32, 128), gguf_unpack.q8_0),
    "Q2_K": BlockType(_layout(2, 16, 0, dtype="f4", offsets=True), gguf_unpack.q2_k),
    "Q3_K": BlockType(_layout(4, 16, 4, dtype="f4"), gguf_unpack.q3_k),
    "Q4_K": BlockType(_layout(4, 32, 0, dtype="f4", offsets=True), gguf_unpack.q4_k),
    "Q5_K": BlockType(_layout(8, 32, 0, dtype="f4", offsets=True), gguf_unpack.q5_k),
    "Q6_K": BlockType(_layout(8, 16, 32, dtype="f4"), gguf_unpack.q6_k),
    "TQ1_0": BlockType(_layout(2, 256, 1), gguf_unpack.tq1_0),
    "TQ2_0": BlockType(_layout(2, 256, 1), gguf_unpack.tq2_0),
    "TQ2_0_g128": BlockType(_layout(2, 128, 1), gguf_unpack.tq2_0_g128, ternary=True),
    "Q1_0_g128": BlockType(_layout(2, 128, 1), gguf_unpack.q1_0_g128),
}


@dataclass(frozen=True)
class StoredTensor(CheckpointTensor):
    """A tensor of blocks in a GGUF file, as bytes: ``type_id`` is the file's, ``offset`` is from its start."""

    file: FileBytes
    offset: int
    type_id: int
    block_values: int
    block_bytes: int

    @property
    def row_bytes(self) -> int:
        values = 1
        for n in self.shape[1:] if len(self.shape) > 1 else self.shape:
            values *= n
        return values // self.block_values * self.block_bytes


@dataclass(frozen=True)
class BlockTensor(StoredTensor):
    """A block-quantized matrix ``[out, in]`` of a GGUF file."""

    block_type: BlockType

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.block_type.layout)

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        raw = self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        blocks = np.frombuffer(raw, np.uint8).reshape(stop - start, -1, self.block_bytes)
        rows = self.block_type.decode(blocks)
        if self.block_type.ternary:
            self._check_ternary(rows.codes, start)
        return rows

    def _check_ternary(self, codes: np.ndarray, start: int) -> None:
        both_bits = codes & codes >> np.uint8(1) & np.uint8(0x55)
        if both_bits.any():
            row, byte = np.argwhere(both_bits)[0]
            raise CheckpointError(
                f"{self.file.path}: {self.name}: row {start + row}, group {byte * 4 // self.block_values} holds the "
                f"code 3, expected 0, 1 or 2 in {self.storage}; the file is damaged, or another layout of its type id"
            )


@dataclass(frozen=True)
class OpaqueTensor(StoredTensor):
    """A tensor whose size is known, but whose values are not read. Its bytes can be copied to another file."""

    why: str

    def read_rows(self, start: int, stop: int) -> Rows:
        raise CheckpointError(self.why)
