"""Resizing and padding of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import evaluated
from coreml_nodes import check_node, floats, one_node

from intaglio.errors import CompileError
from intaglio.exporters.bundle import Dim

COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
FACTORS = [(1.0, 1.0, 2.0, 3.0), (1.0, 1.0, 0.5, 0.75), (1.0, 1.0, 1.5, 2.3)]


def _sizes(*sizes: int) -> tuple[np.ndarray]:
    return (np.array(sizes, np.int64),)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("sizes", [(10, 18), (3, 4), (7, 11), (1, 1)])
@pytest.mark.parametrize("mode", ["linear", "cubic", "floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_resize_to_sizes(coordinates, sizes, mode):
    how = {"mode": mode} if mode in ("linear", "cubic") else {"mode": "nearest", "nearest_mode": mode}
    inputs = [floats(1, 2, 5, 6), None, None, _sizes(1, 2, *sizes)]
    check_node("Resize", inputs, 19, coordinate_transformation_mode=coordinates, rtol=3e-5, **how)


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_by_scales(factors, mode):
    scales = (np.array(factors, np.float32),)
    check_node("Resize", [floats(1, 2, 4, 8), None, scales], 13, mode=mode, rtol=3e-5)


def test_resize_of_opset_10_rounds_down():
    check_node("Resize", [floats(1, 2, 4, 8), (np.array([1, 1, 1.5, 2], np.float32),)], 10)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample(mode):
    check_node("Upsample", [floats(1, 2, 4, 5), (np.array([1, 1, 2, 3], np.float32),)], 9, mode=mode)


def test_antialiased_and_cropped():
    check_node(
        "Resize", [floats(1, 1, 12, 9), None, None, _sizes(1, 1, 5, 4)], 19, mode="linear", antialias=1, rtol=3e-5
    )
    region = (np.array([0, 0, 0.4, 0.6, 1, 1, 0.6, 1.4], np.float32),)
    how = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    check_node("Resize", [floats(1, 1, 6, 5), region, None, _sizes(1, 1, 4, 7)], 19, rtol=3e-5, **how)


def test_other_axes_than_the_last():
    check_node("Resize", [floats(1, 3, 4, 2), None, None, _sizes(6, 7)], 19, mode="linear", axes=[1, 2], rtol=3e-5)
    check_node("Resize", [floats(3, 5), None, (np.array([1, 2.0], np.float32),)], 19, mode="cubic", rtol=3e-5)
    check_node("Resize", [floats(2, 3, 5), None, (np.array([1, 1, 2.5], np.float32),)], 19, mode="nearest")


DIMS = {"h": Dim(min=2, max=32), "w": Dim(min=2, max=32)}


@pytest.mark.parametrize("how", [("nearest", "asymmetric", "floor"), ("linear", "half_pixel", "floor")])
def test_sizes_that_vary_by_whole_factors(how):
    mode, coordinates, nearest = how
    scales = (np.array([1, 1, 2, 2], np.float32),)
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    check_node("Resize", [floats(1, 2, 5, 6), None, scales], 13, vary="1,2,h,w", dims=DIMS, **attributes)


def test_what_has_no_op_says_so():
    scales = (np.array([1, 1, 2.5, 2], np.float32),)
    model, feeds = one_node("Resize", [floats(1, 2, 5, 6), None, scales], 13, vary="1,2,h,w", mode="cubic")
    with pytest.raises(CompileError, match=r"Resize, opset 13.*mode cubic.*--shapes"):
        evaluated(model, feeds, dims=DIMS)


PADS = [[0, 0, 1, 2, 0, 0, 3, 1], [1, 2, 0, 1, 0, 1, 2, 0], [0, 0, -1, 2, 0, 0, 1, -2]]


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_pad(pads, mode, dtype):
    if mode != "constant" and min(pads) < 0:
        pytest.skip("runtimes differ on negative pads of these modes")
    x = (floats(3, 4, 5, 6) * 9).astype(dtype)
    value = [(np.array(5, dtype),)] if mode == "constant" else []
    check_node("Pad", [x, (np.array(pads, np.int64),), *value], 19, mode=mode)


def test_pad_of_some_axes_and_of_old_opsets():
    axes = (np.array([-1, 0], np.int64),)
    check_node("Pad", [floats(2, 3, 4), (np.array([1, 0, 2, 3], np.int64),), None, axes], 18)
    check_node("Pad", [floats(2, 3, 4)], 10, pads=[0, 1, 2, 0, 0, 3], value=2.5)


def test_large_integers_are_padded_exactly():
    x = np.array([[2**30 + 1, -(2**30) - 3]], np.int64)
    check_node("Pad", [x, (np.array([1, 0, 0, 1], np.int64),), (np.array(2**24 + 1, np.int64),)], 18)
