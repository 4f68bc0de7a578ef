"""Packing and position ids against the methods of diffusers' FLUX.2-klein pipeline: equal."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import Flux2KleinPipeline

from intaglio.runtimes.latents import image_ids, pack, reference_ids, text_ids, unpack


def test_against_the_pipeline() -> None:
    rng = np.random.default_rng()
    latents_BCHW = rng.standard_normal((2, 128, 5, 7)).astype(np.float32)
    expected = torch.from_numpy(latents_BCHW)
    packed = Flux2KleinPipeline._pack_latents(expected)
    np.testing.assert_array_equal(pack(latents_BCHW), packed.numpy())

    latent_ids = Flux2KleinPipeline._prepare_latent_ids(expected)
    assert latent_ids.dtype == torch.int64
    for ids in latent_ids:
        np.testing.assert_array_equal(image_ids(5, 7), ids.numpy())
    back = Flux2KleinPipeline._unpack_latents_with_ids(packed, latent_ids)
    np.testing.assert_array_equal(unpack(pack(latents_BCHW), 5, 7), back.numpy())

    sizes = [(5, 7), (3, 2), (1, 4)]
    references = Flux2KleinPipeline._prepare_image_ids([torch.zeros(1, 128, *size) for size in sizes])
    found = np.concatenate([reference_ids(index, *size) for index, size in enumerate(sizes)])
    np.testing.assert_array_equal(found[None], references.numpy())

    text = Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, 512, 3))
    np.testing.assert_array_equal(text_ids(512)[None], text.numpy())
