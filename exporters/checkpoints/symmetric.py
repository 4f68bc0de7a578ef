"""Affine tensors whose offsets say nothing: ``scale * code - scale`` is ``scale * (code - 1)``.

MLX has no zero points, so a ternary tensor is stored there with an offset of minus its scale in every group. Held with
the zero point 1 and no offsets it is the same tensor as in formats that have zero points, and smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from intaglio.exporters.checkpoints.mlx import MlxTensor
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class SymmetricTensor(CheckpointTensor):
    """``source`` with the zero point 1 in place of its offsets."""

    source: CheckpointTensor

    def __post_init__(self) -> None:
        layout = self.source.layout
        assert layout is not None
        quantization = GroupedQuantFormat(layout.format.bits, layout.format.group_size, 1)
        object.__setattr__(self, "layout", QuantizedLayout(quantization, layout.scale_dtype, False))

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        rows = self.source.read_rows(start, stop)
        assert isinstance(rows, GroupedQuantRows)
        return GroupedQuantRows(rows.codes, rows.scales, np.zeros((), rows.scales.dtype))


def without_offsets(tensor: CheckpointTensor) -> CheckpointTensor:
    """``tensor`` with a zero point in place of offsets, where it is one of MLX's of 2 bits and every offset is minus
    its scale; else as it is. Reads scales and offsets of such a tensor.

    Both are exact: a code below 4 times a scale of any of the three types, and one scale less, fit a float32.
    """
    root = _stored(tensor)
    if root is None or root.bits != 2:
        return tensor
    step = max(1, _CHUNK_BYTES // max(1, root.scales.row_bytes))
    for start in range(0, root.row_count, step):
        stop = min(start + step, root.row_count)
        scales, biases = root.scales.read_rows(start, stop), root.biases.read_rows(start, stop)
        if not np.array_equal(biases, -scales):
            return tensor
    return SymmetricTensor(tensor.name, tensor.shape, tensor.storage, tensor)


def _stored(tensor: CheckpointTensor) -> MlxTensor | None:
    """The stored tensor whose rows ``tensor`` are, all or some."""
    while not isinstance(tensor, MlxTensor):
        source = getattr(tensor, "source", None)
        if not isinstance(source, CheckpointTensor):
            return None
        tensor = source
    return tensor
