"""Pixels against diffusers' image processor for FLUX.2: equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image

from intaglio.runtimes.images import load_image, to_pixels


def test_against_the_image_processor() -> None:
    processor = Flux2ImageProcessor(vae_scale_factor=16)
    rng = np.random.default_rng()
    sample_B3HW = (rng.standard_normal((2, 3, 64, 48)) * 0.7).astype(np.float32)
    # Halfway between two pixel values, as far as float32 holds that.
    sample_B3HW[0, 0] = (2 * (rng.integers(0, 255, (64, 48)) + 0.5) / 255 - 1).astype(np.float32)
    pictures: Any = processor.postprocess(torch.from_numpy(sample_B3HW), output_type="pil")
    np.testing.assert_array_equal(to_pixels(sample_B3HW), np.stack([np.asarray(picture) for picture in pictures]))

    pixels_HW3 = rng.integers(0, 256, (64, 96, 3), np.uint8)
    expected = processor.preprocess(Image.fromarray(pixels_HW3), height=64, width=96, resize_mode="crop")
    np.testing.assert_array_equal(load_image(pixels_HW3), expected.numpy())
