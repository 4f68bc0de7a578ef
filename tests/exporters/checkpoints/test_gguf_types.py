"""Every GGUF tensor type that is read, on random blocks, against the `gguf` package and the raw bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import gguf_bytes

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf_pack, gguf_type42, gguf_unpack, open_checkpoint
from intaglio.exporters.checkpoints.gguf_blocks import BLOCK_TYPES, TYPES
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor, UnreadableTensor
from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize, unpack_codes

# name -> where its float16 numbers stand in a block.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64], "TQ2_0_g128": [32], "Q1_0_g128": [0],
}  # fmt: skip
WITH_ORACLE = [name for name in HALVES if not name.endswith("_g128")]
IDS = {name: type_id for type_id, (name, _, _) in TYPES.items()} | {"TQ2_0_g128": 42}
SIZES = {name: (values, size) for name, values, size in TYPES.values()} | {"TQ2_0_g128": (128, 34)}
# Zeros, the smallest subnormal, subnormals, the smallest normal, one, the largest.
EXTREMES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF]


def random_blocks(name: str, rows: int, blocks: int, seed: int, extreme: bool) -> np.ndarray:
    """Blocks uint8 ``[rows, blocks, bytes]`` with every bit random, but for scales: finite, or from EXTREMES."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, SIZES[name][1]), dtype=np.uint8)
    for at in HALVES[name]:
        scales = rng.normal(size=(rows, blocks)).astype("<f2").view("<u2")
        if extreme:
            scales = rng.choice(np.array(EXTREMES, "<u2"), (rows, blocks))
        elif name == "TQ2_0_g128":
            scales &= 0x7FFF
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "TQ2_0_g128":
        codes = data[..., :32]
        # The code 3 is of no value: its higher bit goes.
        codes &= ~((codes & codes >> 1 & 0x55) << 1)
    return data


def open_blocks(folder: Path, name: str, blocks: np.ndarray, **metadata: object) -> Checkpoint:
    path = folder / "blocks.gguf"
    width = blocks.shape[1] * SIZES[name][0]
    path.write_bytes(gguf_bytes(metadata, [("w", (blocks.shape[0], width), IDS[name], blocks.tobytes())]))
    return open_checkpoint(path)


def read_quantized(tensor: CheckpointTensor) -> tuple[GroupedQuantRows, np.ndarray]:
    """The rows, and their dequantized values."""
    assert tensor.layout is not None
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    assert rows.codes.shape == tensor.layout.format.codes_shape(tensor.shape)
    assert rows.scales.shape == tensor.layout.format.groups_shape(tensor.shape)
    assert rows.scales.dtype == rows.offsets.dtype == tensor.layout.scale_dtype
    assert rows.has_offsets == tensor.layout.has_offsets
    return rows, dequantize(rows, tensor.layout.format)


def test_every_type_that_is_read_is_tested() -> None:
    assert set(HALVES) == set(BLOCK_TYPES)
    for type_id, (name, values, size) in TYPES.items():
        # The package's figure for Q8_1 is not ggml's (two float16 numbers and 32 bytes).
        if name in gguf.GGMLQuantizationType.__members__ and name != "Q8_1":
            oracle = gguf.GGMLQuantizationType[name]
            assert (int(oracle), gguf.GGML_QUANT_SIZES[oracle]) == (type_id, (values, size)), name


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", WITH_ORACLE)
def test_values_are_those_of_the_gguf_package(tmp_path: Path, name: str, extreme: bool) -> None:
    """Equal to the last bit, float32 rounding included: a product of the two is exact, and both round the one
    sum once. Only a zero may differ in its sign, as 0 is added to it here.
    """
    blocks = random_blocks(name, 7, 3, 1, extreme)
    _, values = read_quantized(open_blocks(tmp_path, name, blocks).tensors["w"])
    expected = gguf.quants.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[name])
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(values, expected)
    nonzero = expected != 0
    assert nonzero.any()
    np.testing.assert_array_equal(values[nonzero].view(np.uint32), expected[nonzero].view(np.uint32))


@pytest.mark.parametrize("name", [name for name, at in HALVES.items() if not name.endswith("_K")])
def test_scales_are_the_bytes_of_the_file(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(name, 4, 2, 2, extreme=True)
    metadata = {"intaglio.type_42": name} if name == "TQ2_0_g128" else {}
    rows, _ = read_quantized(open_blocks(tmp_path, name, blocks, **metadata).tensors["w"])
    stored = [np.ascontiguousarray(blocks[..., at : at + 2]).view("<u2")[..., 0] for at in HALVES[name]]
    np.testing.assert_array_equal(rows.scales.view("<u2"), stored[0])
    if len(stored) > 1:
        np.testing.assert_array_equal(rows.offsets.view("<u2"), stored[1])


def _bit(block: np.ndarray, byte: int, bit: int) -> int:
    return int(block[byte]) >> bit & 1


# Where bit k of code i lies, as (byte, bit): written out from ggml's loops, one value at a time.
def _places(name: str, i: int) -> list[tuple[int, int]]:
    half, j = divmod(i, 128)
    in32, in16 = i % 32, i % 16
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        front = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[name]
        low = [(front + in16, 4 * (i // 16) + k) for k in range(4)]
        return low if name.startswith("Q4") else [*low, (front - 4 + i // 8, i % 8)]
    if name == "Q2_K":
        return [(16 + 32 * half + in32, 2 * (j // 32) + k) for k in range(2)]
    if name == "Q3_K":
        return [*((32 + 32 * half + in32, 2 * (j // 32) + k) for k in range(2)), (in32, 4 * half + j // 32)]
    if name in ("Q4_K", "Q5_K"):
        low = [((16 if name == "Q4_K" else 48) + 32 * (i // 64) + in32, 4 * (i // 32 % 2) + k) for k in range(4)]
        return low if name == "Q4_K" else [*low, (16 + in32, i // 32)]
    if name == "Q6_K":
        low = [(64 * half + j % 64, 4 * (j // 64) + k) for k in range(4)]
        return [*low, *((128 + 32 * half + in32, 2 * (j // 32) + k) for k in range(2))]
    if name == "TQ2_0":
        return [(32 * half + in32, 2 * (j // 32) + k) for k in range(2)]
    assert name == "TQ2_0_g128"
    return [(i // 4, 2 * (i % 4) + k) for k in range(2)]


@pytest.mark.parametrize("name", [n for n in HALVES if n not in ("Q8_0", "TQ1_0", "Q1_0_g128")])
def test_codes_are_the_bits_of_the_file(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(name, 2, 1, 3, extreme=False)
    metadata = {"intaglio.type_42": name} if name == "TQ2_0_g128" else {}
    tensor = open_blocks(tmp_path, name, blocks, **metadata).tensors["w"]
    rows, _ = read_quantized(tensor)
    assert tensor.layout is not None
    codes = unpack_codes(rows.codes, tensor.layout.format.bits)
    for row in range(2):
        for i in range(SIZES[name][0]):
            expected = sum(_bit(blocks[row, 0], *place) << k for k, place in enumerate(_places(name, i)))
            assert codes[row, i] == expected, (row, i)


def test_q8_0_codes_are_the_signed_bytes_plus_128(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", 3, 2, 4, extreme=False)
    rows, _ = read_quantized(open_blocks(tmp_path, "Q8_0", blocks).tensors["w"])
    expected = blocks[..., 2:].view(np.int8).astype(np.int16).reshape(3, -1) + 128
    np.testing.assert_array_equal(rows.codes, expected)


def test_every_byte_of_tq1_0_has_the_digits_that_the_gguf_package_reads(tmp_path: Path) -> None:
    blocks = np.zeros((256, 1, 54), np.uint8)
    blocks[:, 0, :52] = np.arange(256)[:, None]
    blocks[:, 0, 52:] = [0x00, 0x3C]
    _, values = read_quantized(open_blocks(tmp_path, "TQ1_0", blocks).tensors["w"])
    expected = gguf.quants.dequantize(blocks.reshape(256, -1), gguf.GGMLQuantizationType.TQ1_0)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", ["Q4_1", "Q3_K", "TQ1_0"])
def test_rows_can_be_read_in_parts(tmp_path: Path, name: str) -> None:
    tensor = open_blocks(tmp_path, name, random_blocks(name, 9, 2, 5, extreme=False)).tensors["w"]
    whole = tensor.read()
    assert isinstance(whole, GroupedQuantRows)
    parts = [part for _, part in tensor.chunks(2 * tensor.row_bytes)]
    assert len(parts) == 5
    np.testing.assert_array_equal(np.concatenate([p.codes for p in parts]), whole.codes)  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.concatenate([p.scales for p in parts]), whole.scales)  # type: ignore[union-attr]


@pytest.mark.parametrize(("byte", "value"), [(0xAA, 1), (0x00, -1), (0x55, 0)])
def test_tq2_0_g128_has_the_published_bytes(byte: int, value: int) -> None:
    block = np.array([[[byte] * 32 + [0x00, 0x38]]], np.uint8)
    values = dequantize(gguf_unpack.tq2_0_g128(block), BLOCK_TYPES["TQ2_0_g128"].layout.format)
    np.testing.assert_array_equal(values, np.full((1, 128), value * 0.5, np.float32))


def test_tq2_0_g128_counts_lanes_from_the_lowest_bits() -> None:
    block = np.array([[[0b10_01_00_10] + [0x55] * 31 + [0x00, 0x3C]]], np.uint8)
    values = dequantize(gguf_unpack.tq2_0_g128(block), BLOCK_TYPES["TQ2_0_g128"].layout.format)
    assert values[0, :5].tolist() == [1, -1, 0, 1, 0]


def test_tq2_0_interleaves_as_published() -> None:
    for position, (byte, shift) in {0: (0, 0), 1: (1, 0), 32: (0, 2), 64: (0, 4), 128: (32, 0), 255: (63, 6)}.items():
        values = np.zeros((1, 256), np.float32)
        values[0, position] = 1
        block = gguf_pack.quantize_rows("TQ2_0", values, "w")[0]
        expected = np.full(64, 0x55)
        expected[byte] += 1 << shift
        np.testing.assert_array_equal(block[:64], expected)
        assert block[64:].tolist() == [0x00, 0x3C]


def test_q1_0_g128_is_plus_or_minus_its_scale(tmp_path: Path) -> None:
    blocks = random_blocks("Q1_0_g128", 3, 2, 6, extreme=False)
    tensor = open_blocks(tmp_path, "Q1_0_g128", blocks).tensors["w"]
    assert tensor.storage == "Q1_0_g128"
    _, values = read_quantized(tensor)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    np.testing.assert_array_equal(values, (signs * scales).reshape(3, -1))


def test_a_reserved_code_names_tensor_row_and_group(tmp_path: Path) -> None:
    blocks = random_blocks("TQ2_0_g128", 4, 3, 7, extreme=False)
    path = tmp_path / "blocks.gguf"
    open_blocks(tmp_path, "TQ2_0_g128", blocks)
    tensor = open_checkpoint(path).tensors["w"]
    raw = bytearray(path.read_bytes())
    raw[-blocks.nbytes + (2 * 3 + 1) * 34 + 5] = 0xFF
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blocks.gguf: w: row 2, group 1 holds the code 3, expected 0, 1 or 2"):
        tensor.read()


# --- the three meanings of the id 42 -------------------------------------------------------------------------


def _scale_first(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    blocks[:, :2] = np.abs(rng.normal(size=(count, 1)) * 0.02).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", list(gguf_type42.LAYOUTS))
def test_the_id_42_is_told_by_its_contents(tmp_path: Path, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, size, _ = gguf_type42.LAYOUTS[name]
    count = 64 * 1024 // values
    if name == "TQ2_0_g128":
        blocks = random_blocks(name, 64, 8, seed, extreme=False).reshape(count, size)
    else:
        blocks = _scale_first(rng, count, size)
    if name == "PQ2_0":
        # The published files are ternary: this is the layout of the same size with the same codes.
        codes = random_blocks("TQ2_0_g128", 64, 8, seed, extreme=False)[..., :32]
        blocks[:, 2:] = codes.reshape(count, 32)
    path = tmp_path / "m.gguf"
    tensors = [
        (f"w{i}", (16, 1024), 42, blocks[i * len(blocks) // 4 :][: len(blocks) // 4].tobytes()) for i in range(4)
    ]
    path.write_bytes(gguf_bytes({"general.architecture": "qwen3"}, tensors))
    checkpoint = open_checkpoint(path)
    assert {tensor.storage for tensor in checkpoint.tensors.values()} == {name}
    assert len(checkpoint.notes) == 1
    assert checkpoint.notes[0].startswith(f"m.gguf: type id 42 (4 tensors) is taken as {name}: ")
    if name == "TQ2_0_g128":
        read_quantized(checkpoint.tensors["w3"])
    else:
        with pytest.raises(CheckpointError, match=f"w3: is stored as {name}"):
            checkpoint.tensors["w3"].read()


def test_one_scale_for_all_is_still_told_apart(tmp_path: Path) -> None:
    """A file whose scales are all one number, without a 3 among its four pairs of bits."""
    codes = random_blocks("TQ2_0_g128", 16, 8, 11, extreme=False)[..., :32]
    scale = np.broadcast_to(np.array([0x00, 0x24], np.uint8), (16, 8, 2))
    for name, parts in (("TQ2_0_g128", [codes, scale]), ("PQ2_0", [scale, codes])):
        blocks = np.concatenate(parts, axis=-1)
        assert open_blocks(tmp_path, "TQ2_0_g128", blocks).tensors["w"].storage == name


def test_what_nothing_tells_is_listed_and_refused_when_read(tmp_path: Path) -> None:
    blocks = np.full((1, 1, 34), 0x55, np.uint8)
    checkpoint = open_blocks(tmp_path, "TQ2_0_g128", blocks)
    tensor = checkpoint.tensors["w"]
    assert isinstance(tensor, UnreadableTensor)
    assert (tensor.storage, tensor.shape) == ("type 42", (1, 128))
    assert "is not read: the contents allow TQ2_0_g128 and PQ2_0" in checkpoint.notes[0]
    with pytest.raises(CheckpointError, match=r"blocks.gguf: w: has the type id 42.*TQ2_0_g128 and PQ2_0"):
        tensor.read()


@pytest.mark.parametrize(
    "metadata", [{"general.architecture": "bonsai-image"}, {"intaglio.type_42": "TQ2_0_g128"}], ids=["bonsai", "hint"]
)
def test_the_metadata_decides_where_contents_do_not(tmp_path: Path, metadata: dict[str, object]) -> None:
    blocks = np.full((1, 1, 34), 0x55, np.uint8)
    checkpoint = open_blocks(tmp_path, "TQ2_0_g128", blocks, **metadata)
    assert checkpoint.tensors["w"].storage == "TQ2_0_g128"
    assert next(iter(metadata)) in checkpoint.notes[0]


def test_a_hint_that_the_contents_contradict_is_refused(tmp_path: Path) -> None:
    blocks = np.full((1, 1, 34), 0xFF, np.uint8)
    with pytest.raises(CheckpointError, match=r"intaglio.type_42 is 'TQ2_0_g128', but the contents allow none of"):
        open_blocks(tmp_path, "TQ2_0_g128", blocks, **{"intaglio.type_42": "TQ2_0_g128"})


def test_an_unknown_id_is_listed_and_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, [("w", (2, 64), 99, bytes(32)), ("v", (4,), 0, bytes(16))]))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["w"].storage == "type 99"
    with pytest.raises(CheckpointError, match=r"m.gguf: w: has the unknown type id 99"):
        checkpoint.tensors["w"].read()
    assert checkpoint.tensors["v"].read().tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]
