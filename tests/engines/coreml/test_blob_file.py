"""The weight file: the same bytes as coremltools' own writer makes, and equal data once."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from intaglio.engines.coreml.blob_file import DTYPES, BlobFile
from intaglio.engines.coreml.deferred import Deferred, deferred, large, pack
from intaglio.engines.coreml.evaluator.blobs import unpack_bits

WRITERS = {"fp32": "float"}


def _values(dtype: str, count: int) -> np.ndarray:
    rng = np.random.default_rng()
    bits = DTYPES[dtype][1]
    if dtype.startswith("fp"):
        return rng.standard_normal(count).astype(np.float32 if bits == 32 else np.float16)
    kind = np.dtype(f"{dtype.rstrip('0123456789')}{max(bits, 8)}")
    low = -(1 << bits - 1) if kind.kind == "i" else 0
    return rng.integers(low, low + (1 << bits), count, np.int64).astype(kind)


def test_bytes_are_those_of_coremltools(tmp_path: Path) -> None:
    types = importlib.import_module("coremltools.converters.mil.mil.types")
    theirs = importlib.import_module("coremltools.libmilstoragepython")._BlobStorageWriter(str(tmp_path / "theirs"))
    with BlobFile(tmp_path / "ours") as ours:
        for dtype, (_, bits) in DTYPES.items():
            for count in (17, 64, 200):
                values = _values(dtype, count)
                given = values.view(np.uint16) if dtype == "fp16" else values
                if bits < 8:
                    given = values.astype(getattr(types, f"np_{dtype}_dtype"))
                offset = getattr(theirs, f"write_{WRITERS.get(dtype, dtype)}_data")(given)
                data = pack(values, bits) if bits < 8 else values.view(np.uint8)
                assert ours.write(dtype, count, data) == offset
    del theirs
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_equal_data_are_stored_once(tmp_path: Path) -> None:
    data = np.arange(128, dtype=np.uint8)
    with BlobFile(tmp_path / "weights") as blobs:
        first = blobs.write("uint8", 128, data)
        assert blobs.write("uint8", 128, data.copy()) == first
        # Equal bytes of another dtype have a record of their own.
        assert blobs.write("int8", 128, data) != first
        assert blobs.write("uint4", 256, data) != first
        other = data.copy()
        other[-1] ^= 1
        assert blobs.write("uint8", 128, other) != first
        assert blobs.count == 4


def test_data_of_another_size_are_refused(tmp_path: Path) -> None:
    with BlobFile(tmp_path / "weights") as blobs, pytest.raises(ValueError, match="take 3 bytes, found 4"):
        blobs.write("uint2", 9, np.zeros(4, np.uint8))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_packing_is_undone_by_the_evaluator(bits: int) -> None:
    values = np.random.default_rng().integers(0, 1 << bits, 77, np.uint8)
    np.testing.assert_array_equal(unpack_bits(pack(values, bits), f"UINT{bits}", 77), values)


def test_a_deferred_weight_has_no_values() -> None:
    array = deferred((64, 64), np.dtype(np.uint8), 2, lambda: np.zeros(1024, np.uint8))
    assert isinstance(array, Deferred)
    assert array.shape == (64, 64)
    for use in (lambda: array + 1, lambda: array[0], lambda: array.reshape(-1), lambda: np.sum(array), array.copy):
        with pytest.raises(TypeError, match="asked for its values"):
            use()
    assert array.base is not None
    assert array.base.nbytes == 1


def test_a_small_deferred_weight_is_read_at_once() -> None:
    codes = np.array([[0, 1, 2], [3, 2, 1]], np.uint8)
    array = deferred((2, 3), np.dtype(np.uint8), 2, lambda: pack(codes, 2))
    np.testing.assert_array_equal(array, codes)


def test_large_constants_equal_only_themselves() -> None:
    array = np.zeros(4096, np.float32)
    held = large(array)
    np.testing.assert_array_equal(np.asarray(held), array)
    assert held is held
    assert (held == held) is True
    assert (held != object()) is True
    assert type(large(array[:10])) is np.ndarray
