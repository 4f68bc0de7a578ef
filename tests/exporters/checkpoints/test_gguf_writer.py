"""GGUF files that are written: copied, quantized and repacked, and read back by the `gguf` package."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf_files import gguf_bytes

from intaglio.errors import CancelledError, CheckpointError, OutputError
from intaglio.exporters.checkpoints import gguf_pack, gguf_unpack, open_checkpoint
from intaglio.exporters.checkpoints.gguf import GgufMetadata
from intaglio.exporters.checkpoints.gguf_blocks import BLOCK_TYPES, TYPES
from intaglio.exporters.checkpoints.gguf_writer import GgufTensor, write_gguf
from intaglio.exporters.checkpoints.tensors import (
    ArrayTensor,
    CheckpointTensor,
    QuantizedLayout,
    reorder_rows,
)
from intaglio.kernels.grouped_quant import (
    GroupedQuantFormat,
    GroupedQuantRows,
    dequantize,
    pack_codes,
)

WITH_ORACLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
PACKED = [*WITH_ORACLE, "TQ2_0_g128"]


def dense(values: np.ndarray, storage: str = "F32", name: str = "w") -> ArrayTensor:
    return ArrayTensor(name, values.shape, storage, values)


def quantized(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, quantization: GroupedQuantFormat
) -> ArrayTensor:
    """Quantized rows from codes uint8 ``[out, in]``, one a byte."""
    packed = pack_codes(codes, quantization.bits)
    rows = GroupedQuantRows(packed, scales, np.zeros((), scales.dtype) if offsets is None else offsets)
    layout = QuantizedLayout(quantization, scales.dtype, offsets is not None)
    return ArrayTensor("w", codes.shape, "quantized", rows, layout)


def write(path: Path, *tensors: tuple[str, CheckpointTensor, str | None], **metadata: Any) -> Path:
    write_gguf(path, metadata, [GgufTensor(*tensor) for tensor in tensors])
    return path


def raw_bytes(path: Path, name: str = "w") -> bytes:
    """A tensor's bytes, by the gguf package."""
    reader = gguf.GGUFReader(path)
    return next(t for t in reader.tensors if t.name == name).data.tobytes()


def values_of(path: Path, name: str = "w") -> np.ndarray:
    tensor = open_checkpoint(path).tensors[name]
    assert tensor.layout is not None
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    return dequantize(rows, tensor.layout.format)


def hard_rows(seed: int) -> np.ndarray:
    """Float32 ``[n, 512]`` with groups of zeros, ties, one large value, tiny and large numbers, equal values."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(40, 512)).astype(np.float32)
    rows[1] = 0
    rows[2, :256] = 0
    rows[3] = rng.integers(-8, 9, 512) / 2
    rows[4] = rng.choice([-1, -0.5, 0, 0.5, 1], 512)
    rows[5] *= np.float32(1e-6)
    rows[6] *= np.float32(1e4)
    rows[7, ::32] *= 100
    rows[8] = 3.25
    rows[9] = -0.125
    rows[10] = np.abs(rows[10])
    rows[11] = -np.abs(rows[11])
    rows[12] = rng.integers(-127, 128, 512)
    rows[13] = rng.integers(0, 16, 512) * np.float32(0.1)
    rows[14] *= np.float32(1e-30)
    rows[15, :] = -0.0
    return rows


@pytest.mark.parametrize("name", WITH_ORACLE)
def test_quantized_bytes_are_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    for seed in range(4):
        rows = hard_rows(seed)
        path = write(tmp_path / "m.gguf", ("w", dense(rows), name))
        expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
        assert raw_bytes(path) == expected.tobytes()


@pytest.mark.parametrize(("name", "dtype"), [("F32", "f4"), ("F16", "f2"), ("BF16", ml_dtypes.bfloat16)])
def test_dense_types_round_to_nearest_even(tmp_path: Path, name: str, dtype: Any) -> None:
    rows = hard_rows(0)
    path = write(tmp_path / "m.gguf", ("w", dense(rows), name))
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    assert raw_bytes(path) == np.ascontiguousarray(expected).tobytes()
    read = open_checkpoint(path).tensors["w"].read()
    np.testing.assert_array_equal(np.asarray(read), rows.astype(dtype))


def test_the_halfway_values_of_the_published_ternary_example(tmp_path: Path) -> None:
    rows = np.zeros((1, 256), np.float32)
    rows[0, :6] = [1, 0.5, -0.5, 0.49, -0.49, 0.500001]
    rows[0, 128:133] = [2, 0.9, 0, -0.9, -2]
    for name, second in (("TQ2_0", [2, 0, 0, 0, -2]), ("TQ2_0_g128", [2, 0, 0, 0, -2])):
        values = values_of(write(tmp_path / f"{name}.gguf", ("w", dense(rows), name)))
        if name == "TQ2_0_g128":
            assert values[0, :6].tolist() == [1, 1, -1, 0, 0, 1]
            assert values[0, 128:133].tolist() == second
        else:
            assert values[0, 128:133].tolist() == second


def test_ternary_groups_of_128_compare_with_half_of_the_unrounded_scale() -> None:
    """The rule, value by value, on numbers about the threshold."""
    rng = np.random.default_rng(9)
    rows = rng.normal(size=(50, 128)).astype(np.float32)
    peak = np.abs(rows).max(axis=-1)
    for i, near in enumerate((np.nextafter, lambda x, _: x)):
        rows[:, i] = near(np.float32(0.5) * peak, np.float32(0))
        rows[:, i + 2] = -rows[:, i]
    blocks = gguf_pack.quantize_rows("TQ2_0_g128", rows, "w")
    for row, block in zip(rows, blocks, strict=True):
        threshold = np.float32(0.5) * np.abs(row).max()
        codes = [int(block[j // 4]) >> 2 * (j % 4) & 3 for j in range(128)]
        assert codes == [2 if x >= threshold else 0 if x <= -threshold else 1 for x in row]
        assert block[32:].tobytes() == np.abs(row).max().astype("<f2").tobytes()


@pytest.mark.parametrize("name", PACKED)
def test_what_is_read_is_repacked_to_the_same_bytes(tmp_path: Path, name: str) -> None:
    first = write(tmp_path / "a.gguf", ("w", dense(hard_rows(1)), name))
    source = open_checkpoint(first).tensors["w"]
    # Not copied: the rows pass through codes and scales.
    order = np.arange(40)[::-1].copy()
    second = write(tmp_path / "b.gguf", ("w", reorder_rows(source, order), name))
    expected = first.read_bytes()[-source.nbytes :]
    expected = b"".join(expected[row * source.row_bytes :][: source.row_bytes] for row in order)
    assert second.read_bytes()[-source.nbytes :] == expected


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("Q4_0", "Q5_0"), ("Q4_0", "Q8_0"), ("Q5_0", "Q8_0"), ("Q4_1", "Q5_1"), ("Q4_0", "Q4_1"), ("Q4_0", "Q5_1"),
        ("TQ1_0", "TQ2_0"), ("TQ2_0", "TQ1_0"), ("TQ2_0", "TQ2_0_g128"), ("TQ2_0", "Q4_0"), ("TQ2_0_g128", "Q4_0"),
        ("TQ2_0_g128", "Q8_0"), ("TQ2_0_g128", "Q4_1"), ("TQ1_0", "TQ2_0_g128"),
    ],
)  # fmt: skip
def test_types_are_repacked_into_wider_ones_exactly(tmp_path: Path, source: str, target: str) -> None:
    first = write(tmp_path / "a.gguf", ("w", dense(hard_rows(2)[:14]), source))
    second = write(tmp_path / "b.gguf", ("w", open_checkpoint(first).tensors["w"], target))
    assert open_checkpoint(second).tensors["w"].storage == target
    np.testing.assert_array_equal(values_of(second), values_of(first))


def test_affine_ternary_rows_of_bfloat16_become_tq2_0_g128(tmp_path: Path) -> None:
    """As MLX stores them: codes from 0, the offset minus the scale. A scale may be negative or zero."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 3, (6, 384), dtype=np.uint8)
    scales = (rng.normal(size=(6, 3)) * 0.03).astype(ml_dtypes.bfloat16)
    scales[2, 1] = 0
    tensor = quantized(codes, scales, -scales, GroupedQuantFormat(2, 128, 0))
    path = write(tmp_path / "m.gguf", ("w", tensor, "TQ2_0_g128"))
    expected = np.repeat(scales.astype(np.float32), 128, axis=1) * (codes.astype(np.float32) - 1)
    np.testing.assert_array_equal(values_of(path), expected)
    data = np.frombuffer(path.read_bytes()[-6 * 3 * 34 - (-6 * 3 * 34 % 32) :][: 6 * 3 * 34], np.uint8).reshape(
        6, 3, 34
    )
    assert data[0, 0, 0] == codes[0, 0] | codes[0, 1] << 2 | codes[0, 2] << 4 | codes[0, 3] << 6
    with pytest.raises(CheckpointError, match="no multiple of 256"):
        write(tmp_path / "n.gguf", ("w", tensor, "TQ2_0"))


def test_groups_are_joined_where_they_are_alike(tmp_path: Path) -> None:
    codes = np.random.default_rng(4).integers(0, 3, (2, 256), dtype=np.uint8)
    scales = np.array([[0.5, 0.5], [2, 2]], np.float16)
    alike = quantized(codes, scales, None, GroupedQuantFormat(2, 128, 1))
    path = write(tmp_path / "m.gguf", ("w", alike, "TQ2_0"))
    np.testing.assert_array_equal(values_of(path), (codes.astype(np.float32) - 1) * scales[:, :1])
    scales[1, 1] = 3
    with pytest.raises(CheckpointError, match=r"m.gguf: w: cannot be written as TQ2_0: row 1, group 0 joins groups"):
        write(tmp_path / "m.gguf", ("w", alike, "TQ2_0"))


_SCALES = np.full((3, 2), 0.25, np.float16)
_CODES = np.full((3, 64), 8, np.uint8)


def _with(array: np.ndarray, at: tuple[int, int], value: float, dtype: Any = None) -> np.ndarray:
    changed = array.astype(dtype or array.dtype)
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    ("tensor", "target", "message"),
    [
        (quantized(_with(_CODES, (2, 40), 15), _SCALES, None, GroupedQuantFormat(4, 32, 0)), "Q4_0",
         "row 0, group 0 holds 8 times its scale, and Q4_0 holds -8 to 7"),
        (quantized(_with(_CODES, (2, 40), 25), _SCALES, None, GroupedQuantFormat(8, 32, 8)), "Q5_0",
         "row 2, group 1 holds 17 times its scale, and Q5_0 holds -16 to 15"),
        (quantized(_CODES, _with(_SCALES, (1, 1), 1 / 3, np.float32), None, GroupedQuantFormat(4, 32, 8)), "Q4_0",
         "row 1, group 1 has the scale 0.3333333432674408, which is no finite float16"),
        (quantized(_CODES, _with(_SCALES, (1, 0), 1e6, np.float32), None, GroupedQuantFormat(4, 32, 8)), "Q8_0",
         "row 1, group 0 has the scale 1000000.0, which is no finite float16"),
        (quantized(_CODES, _with(_SCALES, (1, 0), np.nan), None, GroupedQuantFormat(4, 32, 8)), "Q8_0",
         "row 1, group 0 has the scale nan, which is no finite float16"),
        (quantized(_CODES, _with(_SCALES, (1, 0), np.inf), None, GroupedQuantFormat(4, 32, 8)), "Q8_0",
         "row 1, group 0 has the scale inf, which is no finite float16"),
        (quantized(_CODES, _SCALES, _with(_SCALES * 0, (2, 1), 0.1), GroupedQuantFormat(4, 32, 8)), "Q4_0",
         "row 2, group 1 has the offset 0.0999755859375, no small multiple of its scale 0.25; the type has no minimum"),
        (quantized(_CODES, _SCALES, _with(_SCALES * 0, (0, 1), 1e-9, np.float32), GroupedQuantFormat(4, 32, 0)), "Q4_1",
         "row 0, group 1 has the offset 9.999999717180685e-10, which is no finite float16"),
        (quantized(_CODES, _SCALES, _with(_SCALES * 0, (1, 1), 1), GroupedQuantFormat(4, 32, 8)), "Q4_1",
         "row 1, group 1 has a zero point and the offset 1.0, of which one can be kept"),
        (quantized(_CODES, _with(_SCALES, (1, 1), 60000), None, GroupedQuantFormat(4, 32, 8)), "Q4_1",
         "row 1, group 1 has the minimum (scale times zero point) -480000.0, which is no finite float16"),
        (quantized(_CODES, _SCALES, None, GroupedQuantFormat(4, 32, 8)), "TQ2_0", "no multiple of 256"),
        (quantized(_CODES[:, :32], _SCALES[:, :1], None, GroupedQuantFormat(4, 32, 8)), "Q4_K", "exactly"),
        (quantized(_CODES, _SCALES, None, GroupedQuantFormat(4, 32, 8)), "F16", "cannot be made F16 exactly"),
        (dense(_with(np.ones((2, 64), np.float32), (1, 40), np.nan)), "Q4_0", "row 1, group 1 holds nan"),
        (dense(_with(np.ones((2, 64), np.float32), (1, 2), np.inf)), "Q8_0", "row 1, group 0 holds inf"),
        (dense(_with(np.ones((2, 64), np.float32), (0, 40), 1e7)), "Q8_0", "row 0, group 1 needs the scale or minimum"),
        (dense(_with(np.ones((2, 64), np.float32), (0, 40), 1e5)), "F16", "holds 100000.0, which overflows F16"),
        (dense(np.ones((2, 40), np.float32)), "Q4_0", "no multiple of 32"),
        (dense(np.ones((2, 256), np.float32)), "Q4_K", "cannot be made Q4_K from F32"),
        (dense(np.ones((2, 256), np.float32)), "Q9", "'Q9' is no type of GGUF"),
        (dense(np.ones((2, 2), np.float64), "F64"), "F32", "is F64, which float32 does not hold"),
        (dense(np.ones((2, 0), np.float32)), "F32", "sizes of at least 1"),
        (dense(np.ones((1, 1, 1, 1, 1), np.float32)), "F32", "expected at most 4 sizes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, tensor: ArrayTensor, target: str, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        write(tmp_path / "m.gguf", ("blk.0.w", tensor, target))
    assert str(error.value).startswith(f"{tmp_path / 'm.gguf'}: blk.0.w: ")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_scale_of_zero_takes_any_code(tmp_path: Path) -> None:
    codes = np.full((1, 32), 200, np.uint8)
    tensor = quantized(codes, np.zeros((1, 1), np.float32), None, GroupedQuantFormat(8, 32, 0))
    np.testing.assert_array_equal(values_of(write(tmp_path / "m.gguf", ("w", tensor, "Q4_0"))), np.zeros((1, 32)))


def test_rows_are_counted_through_the_chunks(tmp_path: Path) -> None:
    rows = np.zeros((5000, 1024), np.float32)
    rows[4321, 70] = np.inf
    with pytest.raises(CheckpointError, match="row 4321, group 2 holds inf"):
        write(tmp_path / "m.gguf", ("w", dense(rows), "Q8_0"))


@pytest.mark.parametrize("storage", ["IQ2_XS", "MXFP4", "I32", "F64", "Q4_K", "Q6_K", "Q1_0_g128", "Q8_K"])
def test_any_type_is_copied_as_it_is(tmp_path: Path, storage: str) -> None:
    type_id, (_, values, size) = next((i, t) for i, t in TYPES.items() if t[0] == storage)
    raw = np.random.default_rng(5).bytes(6 * 256 // values * size)
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({}, [("x", (3,), 0, bytes(12)), ("w", (2, 3, 256), type_id, raw)]))
    checkpoint = open_checkpoint(path)
    tensors = [GgufTensor(name, tensor) for name, tensor in checkpoint.tensors.items()]
    write_gguf(tmp_path / "b.gguf", checkpoint.metadata, tensors)
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()


def test_what_is_not_read_is_copied_only(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({}, [("w", (1, 256), 17, bytes(74)), ("u", (1, 256), 99, bytes(74))]))
    tensors = open_checkpoint(path).tensors
    with pytest.raises(CheckpointError, match="w: is IQ2_XS, which is not read, so it can only be copied"):
        write(tmp_path / "b.gguf", ("w", tensors["w"], "Q8_0"))
    with pytest.raises(CheckpointError, match="'type 99' is no type of GGUF"):
        write(tmp_path / "b.gguf", ("u", tensors["u"], None))


def test_a_published_file_is_copied_byte_for_byte(tmp_path: Path, smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    tensors = [GgufTensor(name, tensor) for name, tensor in checkpoint.tensors.items()]
    done: list[int] = []
    tracemalloc.start()
    write_gguf(tmp_path / "b.gguf", checkpoint.metadata, tensors, lambda event: done.append(event.done))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "b.gguf").read_bytes() == smollm2_gguf.read_bytes()
    assert done[-1] == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert peak < 32 << 20


def test_metadata_comes_back_with_its_types(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama", "text": "naïve \U0001f642", "empty": "", "yes": True, "count": 7, "minus": -7,
        "large": 1 << 40, "huge": (1 << 64) - 1, "ratio": 0.5, "double": np.float64(0.1), "byte": np.uint8(3),
        "short": np.int16(-3), "words": ["a", "", "é"], "none": [], "numbers": [1, 2, 3], "mixed": [1, -1],
        "flags": [True, False], "array": np.array([1, 2], np.uint16), "floats": [0.25, 1.0],
        "nested": [[1, 2], [3]], "general.alignment": 64,
    }  # fmt: skip
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata, [GgufTensor("w", dense(np.ones((2, 3), np.float32)))])
    reader = gguf.GGUFReader(path)
    types = {name: [int(kind) for kind in field.types] for name, field in reader.fields.items()}
    expected_types = {
        "text": [8], "yes": [7], "count": [4], "minus": [5], "large": [11], "huge": [10], "ratio": [6], "double": [12],
        "byte": [0], "short": [3], "words": [9, 8], "numbers": [9, 4], "mixed": [9, 5], "flags": [9, 7],
        "array": [9, 2], "floats": [9, 6],
    }  # fmt: skip
    assert {name: types[name] for name in expected_types} == expected_types
    for name in expected_types:
        if name not in ("words", "flags"):
            np.testing.assert_array_equal(reader.fields[name].contents(), metadata[name])
    assert reader.fields["words"].contents() == ["a", "", "é"]
    read = open_checkpoint(path).metadata
    assert list(read) == list(metadata)
    for key, value in metadata.items():
        if key == "nested":
            assert [inner.tolist() for inner in read[key]] == value
        else:
            np.testing.assert_array_equal(read[key], value)
    # And once more: what was read is written with the same types.
    write_gguf(tmp_path / "n.gguf", read, [GgufTensor("w", open_checkpoint(path).tensors["w"])])
    assert (tmp_path / "n.gguf").read_bytes() == path.read_bytes()
    assert reader.data_offset % 64 == 0


def test_changed_metadata_keeps_the_types_of_the_rest(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"short": np.uint16(3), "name": "x"}, [])
    metadata = GgufMetadata(open_checkpoint(tmp_path / "a.gguf").metadata)
    metadata["name"] = "y"
    metadata["short"] = 4
    write_gguf(tmp_path / "b.gguf", metadata, [])
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    assert (reader.fields["short"].contents(), int(reader.fields["short"].types[0])) == (4, 2)
    metadata["short"] = 70000
    with pytest.raises(CheckpointError, match="the metadata key short holds 70000, which is not of its GGUF type"):
        write_gguf(tmp_path / "b.gguf", metadata, [])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"k": None}, "the metadata key k holds None, which GGUF has no type for"),
        ({"k": {"a": 1}}, "which GGUF has no type for"),
        ({"k": 1 << 64}, "which GGUF has no type for"),
        ({"k": 1e300}, "is above float32"),
        ({"k": [1, "a"]}, "which GGUF has no type for"),
        ({"k": [1, 1.5]}, "which GGUF has no type for"),
        ({"k": np.ones((2, 2))}, "which GGUF has no type for|not of its GGUF type"),
        ({"k": "\ud800"}, "cannot be written as UTF-8"),
        ({"general.alignment": 24}, "general.alignment is 24, expected a power of two of at least 8"),
        ({"split.count": 3}, "split.count is 3"),
        ({"intaglio.type_42": "Q2_0"}, "intaglio.type_42 is 'Q2_0', but the tensors of the id are TQ2_0_g128"),
    ],
)
def test_bad_metadata_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "m.gguf", ("w", dense(np.ones((1, 128), np.float32)), "TQ2_0_g128"), **metadata)
    assert list(tmp_path.iterdir()) == []


def test_bad_names_are_refused(tmp_path: Path) -> None:
    tensor = dense(np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match=r"m\.gguf: w: stands twice"):
        write(tmp_path / "m.gguf", ("w", tensor, None), ("w", tensor, None))
    with pytest.raises(CheckpointError, match="the name has 65 bytes, expected at most 64"):
        write(tmp_path / "m.gguf", ("n" * 65, tensor, None))


def test_every_shape_is_padded_to_the_alignment(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    arrays = {
        "scalar": np.array(rng.normal()), "vector": rng.normal(size=5), "matrix": rng.normal(size=(3, 7)),
        "three": rng.normal(size=(2, 3, 5)), "four": rng.normal(size=(2, 1, 3, 2)),
    }  # fmt: skip
    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    for alignment in (32, 256):
        path = write(
            tmp_path / "m.gguf", *((n, dense(a), None) for n, a in arrays.items()), **{"general.alignment": alignment}
        )
        assert path.stat().st_size % alignment == 0
        checkpoint = open_checkpoint(path)
        assert checkpoint.notes == ()
        for tensor in gguf.GGUFReader(path).tensors:
            assert tensor.data_offset % alignment == 0
            np.testing.assert_array_equal(tensor.data.reshape(arrays[tensor.name].shape), arrays[tensor.name])
        for name, array in arrays.items():
            np.testing.assert_array_equal(np.asarray(checkpoint.tensors[name].read()), array)


def test_a_stack_of_matrices_and_a_vector_are_quantized(tmp_path: Path) -> None:
    stack = np.random.default_rng(7).normal(size=(3, 5, 64)).astype(np.float32)
    path = write(tmp_path / "m.gguf", ("s", dense(stack), "Q8_0"), ("v", dense(stack[0, 0]), "Q4_0"))
    for name, values, kind in (("s", stack, "Q8_0"), ("v", stack[0, 0], "Q4_0")):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes()
        assert raw_bytes(path, name) == expected


def test_the_type_42_is_noted_for_the_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", ("w", dense(np.zeros((1, 128), np.float32)), "TQ2_0_g128"))
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata["intaglio.type_42"] == "TQ2_0_g128"
    assert checkpoint.tensors["w"].storage == "TQ2_0_g128"
    # The key goes where the type goes.
    write_gguf(tmp_path / "n.gguf", checkpoint.metadata, [GgufTensor("v", dense(np.ones(2, np.float32)))])
    assert "intaglio.type_42" not in open_checkpoint(tmp_path / "n.gguf").metadata


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def cancel(event: Any) -> bool:
        assert path.read_bytes() == b"old"
        return bool(event.done == 0)

    rows = np.ones((4, 64), np.float32)
    with pytest.raises(CancelledError):
        write_gguf(path, {}, [GgufTensor("w", dense(rows), "Q8_0")], cancel)
    rows[2, 3] = np.nan
    with pytest.raises(CheckpointError):
        write_gguf(path, {}, [GgufTensor("w", dense(rows), "Q8_0")])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_target_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/m\.gguf: cannot be written"):
        write_gguf(tmp_path / "nowhere" / "m.gguf", {}, [])
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(OutputError, match=r"m\.gguf: cannot be written"):
        write_gguf(tmp_path / "m.gguf", {}, [])


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A 64 MiB tensor is copied, and then quantized, within much less."""
    raw = np.random.default_rng(8).normal(size=(4096, 4096)).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", {}, [GgufTensor("w", dense(raw))])
    del raw
    tensor = open_checkpoint(tmp_path / "a.gguf").tensors["w"]
    for storage, bound in (("F32", 12 << 20), ("Q4_1", 48 << 20)):
        tracemalloc.start()
        write_gguf(tmp_path / "b.gguf", {}, [GgufTensor("w", tensor, storage)])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < bound, storage


def test_interleaving_undoes_the_planes() -> None:
    rng = np.random.default_rng(10)
    for bits, run in ((1, 1), (1, 32), (2, 32), (4, 16), (4, 64)):
        packed = rng.integers(0, 256, (2, 3, 128), dtype=np.uint8)
        np.testing.assert_array_equal(
            gguf_pack.interleave(gguf_unpack.bit_planes(packed, bits, run), bits, run), packed
        )


def test_every_type_that_is_written_is_read_with_the_same_zero_point() -> None:
    for name, packed in gguf_pack.PACKED_TYPES.items():
        layout = BLOCK_TYPES[name].layout
        assert (packed.group_size, packed.zero_point) == (layout.format.group_size, layout.format.zero_point)
        assert packed.has_minima == layout.has_offsets
