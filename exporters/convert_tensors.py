"""The tensors of a conversion: which type each is written in, and whether its values fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.gguf_blocks import DENSE_TYPES
from intaglio.exporters.checkpoints.gguf_pack import PACKED_TYPES, quantize_rows, repack_rows
from intaglio.exporters.checkpoints.mlx import MlxTensor, UnresolvedMlxTensor
from intaglio.exporters.checkpoints.safetensors_writer import mlx_parts, mlx_rows
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize

FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CHUNK_BYTES = 4 << 20
# The type of GGUF that holds codes of so many bits with an offset; tried in this order.
_PACKED_BY_BITS = {2: ("TQ2_0_g128", "TQ2_0", "Q4_1"), 4: ("Q4_0", "Q4_1"), 8: ("Q8_0", "Q5_1")}
_WIDENS = {("F16", "F32"), ("BF16", "F32"), ("F8_E4M3", "F16"), ("F8_E5M2", "F16")}
_WIDENS |= {(small, wide) for small in ("F8_E4M3", "F8_E5M2") for wide in ("BF16", "F32")}


@dataclass(frozen=True)
class FloatTensor(CheckpointTensor):
    """Another tensor's values as one floating-point type: a dense one cast, a quantized one unpacked.

    A value beyond the type's range raises CheckpointError when it is read.
    """

    source: CheckpointTensor
    element: np.dtype[Any]

    @classmethod
    def of(cls, source: CheckpointTensor, storage: str) -> FloatTensor:
        """``source`` as F32, F16 or BF16."""
        return cls(source.name, source.shape, storage, source, FLOATS[storage])

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.element)

    @property
    def exact(self) -> bool:
        """Whether no value can be rounded."""
        layout = self.source.layout
        if layout is not None:
            # A float16 or bfloat16 times a code needs 19 bits; an offset may need more.
            return self.storage == "F32" and not layout.has_offsets and layout.scale_dtype.itemsize == 2
        return self.source.storage == self.storage or (self.source.storage, self.storage) in _WIDENS

    @property
    def row_bytes(self) -> int:
        count = self.element.itemsize
        for n in self.shape[1:] if len(self.shape) > 1 else self.shape:
            count *= n
        return count

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self.source.read_rows(start, stop)
        if isinstance(rows, GroupedQuantRows):
            assert self.source.layout is not None
            rows = dequantize(rows, self.source.layout.format)
        with np.errstate(over="ignore", invalid="ignore"):
            values = rows.astype(self.element)
            lost = np.isfinite(rows.astype(np.float64)) & ~np.isfinite(values.astype(np.float64))
        if lost.any():
            raise CheckpointError(
                f"{self.name}: holds {rows[lost][0]}, which overflows {self.storage}; take a wider type"
            )
        return values


def as_float(tensor: CheckpointTensor, storage: str | None) -> CheckpointTensor:
    """``tensor`` as the floating-point type that was asked for; itself where none was, or where it holds integers."""
    if isinstance(tensor, UnresolvedMlxTensor) and storage is not None:
        tensor.read_rows(0, 0)  # raises
    if storage is None or not _is_float(tensor) or tensor.storage == storage:
        return tensor
    return FloatTensor.of(tensor, storage)


def storage_in_gguf(
    what: str, tensor: CheckpointTensor, storage: str | None, *, native: bool
) -> tuple[CheckpointTensor, str | None]:
    """The tensor to write to a GGUF file, and the type to write it in; None keeps its own.

    ``storage`` is the type that was asked for, if any; ``native`` tensors come from a GGUF file. Raises
    CheckpointError where the file has no type for it.
    """
    if len(tensor.shape) < 2:
        # Readers of GGUF files want norms and biases in float32.
        if native or tensor.storage in FLOATS:
            return tensor, None if native else "F32"
        raise CheckpointError(f"{what}: is {tensor.storage}, which GGUF files hold no vectors of")
    if storage is None:
        if not native and tensor.layout is None and tensor.storage not in DENSE_TYPES:
            raise CheckpointError(
                f"{what}: is {tensor.storage}, which GGUF has no type for that is written; ask for --type F16, BF16 "
                "or F32"
            )
        return tensor, None
    if storage in FLOATS and tensor.storage != storage and _is_float(tensor):
        return FloatTensor.of(tensor, storage), None
    if tensor.layout is None and _is_float(tensor) and tensor.storage not in FLOATS:
        return FloatTensor.of(tensor, "F32"), storage
    return tensor, storage


def _is_float(tensor: CheckpointTensor) -> bool:
    return tensor.layout is not None or (tensor.dtype is not None and tensor.dtype.kind not in "iubc")


def packed_storage(target: str, name: str, tensor: CheckpointTensor) -> str:
    """The type of GGUF that holds a quantized tensor exactly. Reads it, and raises CheckpointError if none does."""
    assert tensor.layout is not None
    errors = []
    for storage in _PACKED_BY_BITS[tensor.layout.format.bits]:
        if tensor.shape[1] % PACKED_TYPES[storage].group_size:
            continue
        try:
            check_values(target, name, tensor, storage, to_gguf=True)
        except CheckpointError as error:
            errors.append(str(error))
        else:
            return storage
    reasons = "\n  ".join(errors) if errors else f"rows of {tensor.shape[1]} are no multiple of 32"
    raise CheckpointError(
        f"{target}: {name}: {tensor.storage} fits no type of GGUF exactly (--type F32, F16 or BF16 unpacks it):\n"
        f"  {reasons}"
    )


def check_values(target: str, name: str, tensor: CheckpointTensor, storage: str | None, *, to_gguf: bool) -> None:
    """Does all that writing a tensor does, but for the writing. Raises CheckpointError as it does."""
    what = f"{target}: {name}"
    if not to_gguf and tensor.layout is not None:
        mlx_parts(target, name, tensor)
    if storage in (None, tensor.storage) and (to_gguf or tensor.layout is None or isinstance(tensor, MlxTensor)):
        if isinstance(tensor, FloatTensor):
            for _ in tensor.chunks(_CHUNK_BYTES):
                pass  # reading it finds what overflows
        return  # copied
    for first, rows in tensor.chunks(_CHUNK_BYTES):
        if isinstance(rows, GroupedQuantRows):
            assert tensor.layout is not None
            if to_gguf:
                assert storage is not None
                repack_rows(storage, rows, tensor.layout, what, first)
            else:
                mlx_rows(what, tensor, first, rows)
        elif storage in PACKED_TYPES:
            quantize_rows(storage, rows.astype(np.float32).reshape(-1, rows.shape[-1]), what, first)
