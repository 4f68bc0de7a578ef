"""Moving values between channels, batch and the two spatial dims of ``[N, C, H, W]``."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


@op(widen=False)
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Channels are read as ``[C, f, f]``, as in PyTorch."""
    n, c, h, w = x.shape
    f = upscale_factor
    return x.reshape(n, c // f**2, f, f, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(n, c // f**2, h * f, w * f)


@op(widen=False)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    n, c, h, w = x.shape
    f = downscale_factor
    return x.reshape(n, c, h // f, f, w // f, f).transpose(0, 1, 3, 5, 2, 4).reshape(n, c * f**2, h // f, w // f)


@op(widen=False)
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """Channels are read as ``[b, b, C]``, as in TensorFlow."""
    n, c, h, w = x.shape
    b = block_size
    return x.reshape(n, b, b, c // b**2, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


@op(widen=False)
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    b = block_size
    return x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4).reshape(n, c * b**2, h // b, w // b)


@op(widen=False)
def space_to_batch(x: Tensor, block_shape: list[int], paddings: Tensor) -> Tensor:
    """As in TensorFlow: the place in the block becomes the slowest part of the batch."""
    padded = np.pad(x, [(0, 0), (0, 0), *map(tuple, paddings.tolist())])
    n, c, h, w = padded.shape
    b, d = block_shape
    blocks = padded.reshape(n, c, h // b, b, w // d, d).transpose(3, 5, 0, 1, 2, 4)
    return blocks.reshape(n * b * d, c, h // b, w // d)


@op(widen=False)
def batch_to_space(x: Tensor, block_shape: list[int], crops: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b, d = block_shape
    blocks = x.reshape(b, d, n // (b * d), c, h, w).transpose(2, 3, 4, 0, 5, 1)
    whole = blocks.reshape(n // (b * d), c, h * b, w * d)
    (top, bottom), (left, right) = crops.tolist()
    return whole[:, :, top : h * b - bottom, left : w * d - right]


@op(widen=False)
def crop(x: Tensor, crop_height: list[int], crop_width: list[int]) -> Tensor:
    (top, bottom), (left, right) = crop_height, crop_width
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]
