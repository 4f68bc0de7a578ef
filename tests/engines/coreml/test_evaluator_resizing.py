"""Resizing, sampling and spatial ops of the evaluator, compared with torch in float64."""

import mil_packages
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from mil_packages import numbers, run, t

from intaglio.engines.coreml.evaluator.ops.resizing import grid
from intaglio.errors import EngineError

F = torch.nn.functional
BOUND = 2e-6


def agree(found, expected, bound=BOUND):
    mil_packages.agree(found, expected, bound)


def test_grid_points_as_documented():
    """The examples in the documentation of ``resize_bilinear``, two values to five and to six."""
    documented = {
        "UNALIGN_CORNERS": ([0, 0.1, 0.5, 0.9, 1], [0, 0, 0.33, 0.67, 1, 1]),
        "STRICT_ALIGN_CORNERS": ([0, 0.25, 0.5, 0.75, 1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        "ALIGN_CORNERS": ([0, 0.25, 0.5, 0.75, 1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        "DEFAULT": ([0, 0.4, 0.8, 1, 1], [0, 0.33, 0.67, 1, 1, 1]),
        "OFFSET_CORNERS": ([0.1, 0.3, 0.5, 0.7, 0.9], [0.08, 0.25, 0.42, 0.58, 0.75, 0.92]),
    }
    for mode, points in documented.items():
        for expected in points:
            np.testing.assert_allclose(grid(mode, 2, len(expected)), expected, atol=0.005)
    assert grid("STRICT_ALIGN_CORNERS", 5, 1) == [0]
    assert grid("ALIGN_CORNERS", 5, 1) == [2]


def interpolated(x, mode, height, width):
    """Linear interpolation at Core ML's grid, with NumPy's own."""
    for axis, size in ((-2, height), (-1, width)):
        count = x.shape[axis]
        points = {
            "STRICT_ALIGN_CORNERS": np.linspace(0, count - 1, size),
            "ALIGN_CORNERS": np.linspace(0, count - 1, size),
            "DEFAULT": np.arange(size) * (count / size),
            "OFFSET_CORNERS": (np.arange(size) + 0.5) * (count - 1) / size,
            "UNALIGN_CORNERS": (np.arange(size) + 0.5) * (count / size) - 0.5,
        }[mode]
        x = np.apply_along_axis(lambda row, at=points, n=count: np.interp(at, np.arange(n), row), axis, x)
    return x


MODES = ["STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS"]


def test_resize(tmp_path):
    x = numbers(2, 3, 5, 4)

    def body(x):
        results = []
        for mode in MODES:
            for height, width in ((8, 9), (3, 2)):
                given = {"target_size_height": height, "target_size_width": width, "sampling_mode": mode}
                results.append(mb.resize_bilinear(x=x, **given))
                shape = [1, height, width]
                results.append(mb.resize(x=x, shape=shape, resized_dims=np.uint32(2), sampling_mode=mode))
        return [*results, mb.resize(x=x, shape=[7, 0], resized_dims=np.uint32(2), sampling_mode="UNALIGN_CORNERS")]

    expected = []
    for mode in MODES:
        for size in ((8, 9), (3, 2)):
            expected += [interpolated(x.astype(np.float64), mode, *size)] * 2
    expected.append(F.interpolate(t(x), size=(7, 4), mode="bilinear"))
    agree(run(tmp_path, body, {"x": x}), expected)
    # Two modes are torch's.
    agree([expected[0], expected[-3]], [
        F.interpolate(t(x), size=(8, 9), mode="bilinear", align_corners=True),
        F.interpolate(t(x), size=(3, 2), mode="bilinear", align_corners=False),
    ])  # fmt: skip


def test_nearest_neighbours(tmp_path):
    x = numbers(2, 3, 5, 4)

    def body(x):
        return [
            mb.resize_nearest_neighbor(x=x, target_size_height=8, target_size_width=3),
            mb.resize(x=x, shape=[2, 13], resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR"),
            mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=3),
            mb.upsample_nearest_neighbor(x=x, scale_factor_height=1.6, scale_factor_width=1.75),
        ]

    expected = [
        F.interpolate(t(x), size=(8, 3), mode="nearest-exact"), F.interpolate(t(x), size=(2, 13), mode="nearest-exact"),
        F.interpolate(t(x), scale_factor=(2, 3), mode="nearest"),
        F.interpolate(t(x), scale_factor=(1.6, 1.75), mode="nearest"),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected, 0)


def test_nearest_neighbours_with_a_sampling_mode_are_refused(tmp_path):
    def body(x):
        return mb.resize(
            x=x, shape=[4, 4], resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR",
            sampling_mode="ALIGN_CORNERS",
        )  # fmt: skip

    with pytest.raises(EngineError, match=r"resize 'resize_0' takes nearest neighbours .* ALIGN_CORNERS"):
        run(tmp_path, body, {"x": numbers(1, 1, 2, 2)})


def test_upsample_bilinear(tmp_path):
    x = numbers(2, 3, 5, 4)

    def body(x):
        up = mb.upsample_bilinear
        return [
            up(x=x, scale_factor_height=2, scale_factor_width=3),
            up(x=x, scale_factor_height=2, scale_factor_width=3, align_corners=False),
            up(x=x, scale_factor_height=1.5, scale_factor_width=1.6, align_corners=False, half_pixel_centers=True),
            up(x=x, scale_factor_height=2, scale_factor_width=2, align_corners=False, half_pixel_centers=False),
        ]

    expected = [
        F.interpolate(t(x), size=(10, 12), mode="bilinear", align_corners=True),
        F.interpolate(t(x), size=(10, 12), mode="bilinear"), F.interpolate(t(x), size=(7, 6), mode="bilinear"),
        interpolated(x.astype(np.float64), "DEFAULT", 10, 8),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected)


@pytest.mark.parametrize("align_corners", [False, True])
def test_resample(tmp_path, align_corners):
    x = numbers(2, 3, 5, 4)
    places = np.random.default_rng().uniform(-1.8, 1.8, (2, 6, 7, 2)).astype(np.float32)
    paddings = {
        "constant": "zeros",
        "border": "border",
        "symmetric" if not align_corners else "reflection": "reflection",
    }

    def body(x, places):
        return [
            mb.resample(
                x=x, coordinates=places, sampling_mode=mode, padding_mode=padding, padding_value=0.0,
                coordinates_mode="normalized_minus_one_to_one", align_corners=align_corners,
            )
            for mode in ("bilinear", "nearest")
            for padding in paddings
        ]  # fmt: skip

    expected = [
        F.grid_sample(t(x), t(places), mode, padding, align_corners)
        for mode in ("bilinear", "nearest")
        for padding in paddings.values()
    ]
    agree(run(tmp_path, body, {"x": x, "places": places}), expected, 1e-5)


def test_channels_and_space(tmp_path):
    x, y = numbers(2, 12, 4, 6), numbers(12, 3, 2, 3)

    def body(x, y):
        return [
            mb.pixel_shuffle(x=x, upscale_factor=2), mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)),
            mb.depth_to_space(x=x, block_size=2), mb.space_to_depth(x=x, block_size=2),
            mb.space_to_batch(x=x, block_shape=[2, 3], paddings=[[1, 1], [0, 3]]),
            mb.batch_to_space(x=y, block_shape=[2, 3], crops=[[1, 0], [2, 1]]),
            mb.crop(x=x, crop_height=[1, 0], crop_width=[2, 3]),
        ]  # fmt: skip

    # Depth first in blocks: channels [b, b, C] instead of [C, b, b].
    regrouped = t(x).reshape(2, 4, 3, 4, 6).transpose(1, 2).reshape(2, 12, 4, 6)
    unshuffled = F.pixel_unshuffle(t(x), 2).reshape(2, 12, 4, 2, 3).transpose(1, 2).reshape(2, 48, 2, 3)
    padded = F.pad(t(x), (0, 3, 1, 1))
    batches = torch.cat([padded[:, :, i::2, j::3] for i in range(2) for j in range(3)])
    whole = torch.zeros(2, 3, 4, 9, dtype=torch.float64)
    for place, values in enumerate(t(y).chunk(6)):
        whole[:, :, place // 3 :: 2, place % 3 :: 3] = values
    expected = [
        F.pixel_shuffle(t(x), 2), F.pixel_unshuffle(t(x), 2), F.pixel_shuffle(regrouped, 2), unshuffled, batches,
        whole[:, :, 1:, 2:-1], x[:, :, 1:, 2:-3],
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x, "y": y}), expected, 0)
