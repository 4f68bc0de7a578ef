"""Constants, and the compressed weights that Core ML decompresses when it loads a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intaglio.engines.coreml.evaluator.blobs import unpack_bits
from intaglio.engines.coreml.evaluator.ops.quantization import along
from intaglio.engines.coreml.evaluator.registry import Tensor, op


@op
def const(val: Any) -> Any:
    return val


@op(widen=False)
def constexpr_cast(source_val: Tensor, output_dtype: str) -> Tensor:
    if output_dtype != "fp32":
        raise ValueError(f"casts to {output_dtype!r}, expected fp32")
    return source_val.astype(np.float32)


@op
def constexpr_affine_dequantize(quantized_data: Tensor, zero_point: Tensor, scale: Tensor, axis: int) -> Tensor:
    values = quantized_data.astype(np.float32) - along(zero_point.astype(np.float32), quantized_data, axis)
    return values * along(scale, quantized_data, axis)


@op(widen=False)
def constexpr_lut_to_dense(
    indices: Tensor, lut: Tensor, shape: list[int] | None = None, vector_axis: int | None = None
) -> Tensor:
    """Looks codes up. iOS 16: one table, packed codes, ``shape``. iOS 18: ``lut`` ``[*blocks, entries, vector]``."""
    if shape is not None:
        bits = int(math.log2(lut.size))
        codes = unpack_bits(indices, f"UINT{bits}", math.prod(shape)) if bits < 8 else indices
        return lut.ravel()[codes].reshape(shape)
    return _look_up(indices, lut, vector_axis)


def _look_up(indices: Tensor, lut: Tensor, vector_axis: int | None) -> Tensor:
    vector = lut.shape[-1]
    if lut.ndim != indices.ndim + 2 or (vector > 1 and vector_axis is None):
        raise ValueError(f"has a table of shape {list(lut.shape)} for codes of shape {list(indices.shape)}")
    axis = 0 if vector_axis is None else vector_axis % indices.ndim
    # Blocks are counted on the result, which is longer along the vector's axis.
    sizes = [size * (vector if dim == axis else 1) for dim, size in enumerate(indices.shape)]
    blocks = _block_sizes(sizes, lut.shape[:-2])
    codes = np.repeat(indices, vector, axis)
    places = list(np.indices(sizes, sparse=True))
    table = [place // block for place, block in zip(places, blocks, strict=True)]
    return lut[(*table, codes, places[axis] % vector)]


def _block_sizes(sizes: list[int], counts: tuple[int, ...]) -> list[int]:
    if len(sizes) != len(counts) or any(size % count for size, count in zip(sizes, counts, strict=True)):
        raise ValueError(f"has {list(counts)} blocks for a tensor of shape {sizes}")
    return [size // count for size, count in zip(sizes, counts, strict=True)]


def _per_block(parameter: Tensor, sizes: list[int]) -> Tensor:
    """One value a block, repeated to ``sizes``."""
    for axis, block in enumerate(_block_sizes(sizes, parameter.shape)):
        parameter = np.repeat(parameter, block, axis)
    return parameter


@op
def constexpr_blockwise_shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """``scale * (data - offset)``, one scale and offset a block; a block's size is the data's size over the scales'."""
    values = data.astype(np.float32)
    if offset is not None:
        if offset.shape != scale.shape:
            raise ValueError(f"has offsets of shape {list(offset.shape)} for scales of shape {list(scale.shape)}")
        values = values - _per_block(offset.astype(np.float32), list(data.shape))
    return values * _per_block(scale, list(data.shape))


def _spread(nonzero_data: Tensor, mask: Tensor) -> Tensor:
    chosen = mask.astype(bool)
    if nonzero_data.size != np.count_nonzero(chosen):
        raise ValueError(f"has {nonzero_data.size} values for {np.count_nonzero(chosen)} set bits")
    result = np.zeros(mask.shape, nonzero_data.dtype)
    result[chosen] = nonzero_data
    return result


@op(widen=False)
def constexpr_sparse_to_dense(nonzero_data: Tensor, mask: Tensor, shape: list[int] | None = None) -> Tensor:
    if shape is not None:
        mask = unpack_bits(mask, "UINT1", math.prod(shape)).reshape(shape)
    return _spread(nonzero_data, mask)


@op(widen=False)
def constexpr_lut_to_sparse(
    indices_mask: Tensor, indices_nonzero_data: Tensor, lut: Tensor, vector_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    dense = _look_up(_spread(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = indices_mask if vector_axis is None else np.repeat(indices_mask, lut.shape[-1], vector_axis)
    return mask, dense[mask.astype(bool)]


@op
def constexpr_sparse_blockwise_shift_scale(
    data_mask: Tensor, nonzero_data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dense = constexpr_blockwise_shift_scale(_spread(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask.astype(bool)]
