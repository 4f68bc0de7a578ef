"""Packing, position ids, and latents that a caller gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from intaglio.errors import InputError
from intaglio.runtimes.latents import image_ids, initial_latents, pack, reference_ids, text_ids, unpack


def grid(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_pack() -> None:
    latents_BCHW = grid(2, 128, 3, 5)
    latents_BSC = pack(latents_BCHW)
    assert latents_BSC.shape == (2, 15, 128) and latents_BSC.flags.c_contiguous
    for token in range(15):
        np.testing.assert_array_equal(latents_BSC[:, token], latents_BCHW[:, :, token // 5, token % 5])
    back = unpack(latents_BSC, 3, 5)
    assert back.flags.c_contiguous
    np.testing.assert_array_equal(back, latents_BCHW)


def test_bad_shapes() -> None:
    with pytest.raises(InputError, match=r"latents are \[1, 15, 128\]; expected \[batch, channels, height, width\]"):
        pack(grid(1, 15, 128))
    for shape in ((1, 128, 3, 5), (1, 14, 128)):
        with pytest.raises(InputError, match=r"expected \[batch, 15, channels\]"):
            unpack(grid(*shape), 3, 5)


def test_ids() -> None:
    assert image_ids(2, 3).tolist() == [[0, r, c, 0] for r in range(2) for c in range(3)]
    assert reference_ids(0, 2, 3).tolist() == [[10, r, c, 0] for r in range(2) for c in range(3)]
    assert reference_ids(2, 1, 2).tolist() == [[30, 0, 0, 0], [30, 0, 1, 0]]
    assert text_ids(3).tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]
    assert text_ids(0).shape == (0, 4)
    assert image_ids(2, 3).dtype == reference_ids(0, 2, 3).dtype == text_ids(3).dtype == np.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: image_ids(0, 3), "height is 0; expected an integer of at least 1"),
        (lambda: image_ids(3, 2.0), "width is 2.0"),  # type: ignore[arg-type]
        (lambda: reference_ids(-1, 2, 3), "index is -1; expected an integer of at least 0"),
        (lambda: reference_ids(0, 2, True), "width is True"),
        (lambda: text_ids(-1), "length is -1"),
    ],
)
def test_bad_ids(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_initial_latents(dtype: Any) -> None:
    latents_BCHW = grid(2, 128, 3, 5).astype(dtype)
    expected = pack(latents_BCHW.astype(np.float32))
    for given in (latents_BCHW, pack(latents_BCHW)):
        found = initial_latents(given, 2, 128, 3, 5)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_initial_latents_of_a_list() -> None:
    found = initial_latents([[[1.0, 2.0], [3.0, 4.0]]], 1, 2, 1, 2)
    assert found.dtype == np.float32 and found.tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.zeros((1, 128, 5, 3), np.float32), r"\[1, 128, 5, 3\]; expected \[2, 128, 3, 5\] or packed \[2, 15, 128\]"),
        (np.zeros((2, 128, 5, 3), np.float32), "for pictures of 80 by 48 pixels"),
        (np.zeros((2, 128, 15), np.float32), "expected"),
        (np.zeros((15, 128), np.float32), "expected"),
        (np.zeros((2, 15, 128), np.int64), "latents are int64; expected float32, or another floating dtype"),
        (np.zeros((2, 15, 128), bool), "latents are bool"),
        (np.zeros((2, 15, 128), np.complex64), "latents are complex64"),
        (np.full((2, 15, 128), "a"), "latents are <U1"),
        (np.full((2, 15, 128), np.nan, np.float32), "3840 of 3840 values of the latents are not finite in float32"),
        (np.eye(15, 128) * 1e39 + np.zeros((2, 15, 128)), "30 of 3840 values of the latents are not finite"),
    ],
)
def test_bad_initial_latents(latents: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        initial_latents(latents, 2, 128, 3, 5)
