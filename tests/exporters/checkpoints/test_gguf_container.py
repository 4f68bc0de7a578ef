"""The GGUF container: files of the `gguf` package, split files, and everything that can be wrong with one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import gguf_bytes, info, padded, pair, start, text
from peak_memory import peak_memory

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import gguf_header, open_checkpoint
from intaglio.exporters.checkpoints.gguf import open_gguf

VALUES = {
    "u8": 200, "i8": -3, "u16": 60000, "i16": -30000, "u32": 1 << 31, "i32": -(1 << 31), "f32": 0.1, "bool": True,
    "string": "naïve \U0001f642", "u64": (1 << 64) - 1, "i64": -(1 << 63), "f64": 0.1,
}  # fmt: skip
_ADDERS = {
    "u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32", "f32": "float32",
    "bool": "bool", "string": "string", "u64": "uint64", "i64": "int64", "f64": "float64",
}  # fmt: skip


def write_with_gguf(path: Path, alignment: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    """A file of the gguf package with a key of every type and four tensors, which are returned."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in VALUES.items():
        getattr(writer, f"add_{_ADDERS[key]}")(f"test.{key}", value)
    writer.add_array("test.words", ["a", "", "é\n", "\U0001f642"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -0.1])
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.nested", [[1, 2], [3, 4]])
    rng = np.random.default_rng(0)
    tensors = {
        "vector": rng.normal(size=5).astype(np.float32),
        "matrix": rng.normal(size=(3, 7)).astype(np.float16),
        "three": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "four": rng.normal(size=(2, 1, 3, 2)).astype(np.float32),
    }
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_files_of_the_gguf_package(tmp_path: Path, version: int, alignment: int | None) -> None:
    path = tmp_path / "m.gguf"
    tensors = write_with_gguf(path, alignment)
    # Version 2 differs from 3 in nothing but the number, as long as it is little-endian.
    raw = bytearray(path.read_bytes())
    assert raw[4] == 3
    raw[4] = version
    path.write_bytes(raw)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.files, checkpoint.notes) == ("gguf", (path,), ())
    assert list(checkpoint.tensors) == list(tensors)
    for name, array in tensors.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.dtype, tensor.nbytes) == (array.shape, array.dtype, array.nbytes)
        np.testing.assert_array_equal(np.asarray(tensor.read()), array)
    metadata = checkpoint.metadata
    assert metadata["general.architecture"] == "llama"
    for key, value in VALUES.items():
        expected = float(np.float32(value)) if key == "f32" else value
        assert metadata[f"test.{key}"] == expected
        assert type(metadata[f"test.{key}"]) is type(value)
    assert metadata["test.words"] == ["a", "", "é\n", "\U0001f642"]
    assert metadata["test.integers"].tolist() == [1, -2, 3]
    assert metadata["test.floats"].dtype == np.float32
    assert metadata["test.flags"].tolist() == [True, False]
    assert [inner.tolist() for inner in metadata["test.nested"]] == [[1, 2], [3, 4]]


def test_a_published_file_is_read_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    reader = gguf.GGUFReader(smollm2_gguf)
    assert [t.name for t in reader.tensors] == list(checkpoint.tensors)
    for oracle in reader.tensors:
        tensor = checkpoint.tensors[oracle.name]
        assert (tensor.storage, list(tensor.shape)) == (oracle.tensor_type.name, oracle.shape.tolist()[::-1])
        assert (tensor.offset, tensor.nbytes) == (oracle.data_offset, oracle.n_bytes)  # type: ignore[attr-defined]
    for key, value in checkpoint.metadata.items():
        np.testing.assert_array_equal(value, reader.fields[key].contents())


def test_tensors_off_the_alignment_are_read_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = start(2, 0) + info("a", (3,), 0, 0) + info("b", (2,), 0, 12)
    path.write_bytes(padded(header) + np.arange(5, dtype="<f4").tobytes())
    checkpoint = open_checkpoint(path)
    assert np.asarray(checkpoint.tensors["b"].read()).tolist() == [3, 4]
    assert checkpoint.notes == (
        "m.gguf: 1 tensors do not start on a multiple of the alignment 32, first b; other readers may refuse the file",
    )


def test_arrays_may_be_empty(tmp_path: Path) -> None:
    pairs = [text(f"k{kind}") + struct.pack("<IIQ", 9, kind, 0) for kind in range(13)]
    (tmp_path / "m.gguf").write_bytes(start(0, 13) + b"".join(pairs))
    metadata = open_checkpoint(tmp_path / "m.gguf").metadata
    assert [len(metadata[f"k{kind}"]) for kind in range(13)] == [0] * 13


# --- split files ---------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with the three parts that the gguf package makes of four tensors, and the tensors."""
    tensors = write_with_gguf(tmp_path / "m.gguf", split_max_tensors=2, small_first_shard=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return tmp_path, tensors


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_any_part_of_a_split_file_opens_all(split: tuple[Path, dict[str, np.ndarray]], opened: int) -> None:
    folder, tensors = split
    checkpoint = open_checkpoint(folder / f"m-{opened:05}-of-00003.gguf")
    assert [path.name for path in checkpoint.files] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert list(checkpoint.tensors) == list(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(checkpoint.tensors[name].read()), array)
    assert checkpoint.metadata["test.words"][0] == "a"
    assert not [key for key in checkpoint.metadata if key.startswith("split.")]


def test_missing_parts_are_named(split: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = split
    (folder / "m-00001-of-00003.gguf").unlink()
    (folder / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder / "m-00002-of-00003.gguf")
    assert str(error.value).startswith(str(folder / "m-00002-of-00003.gguf"))
    assert "2 of 3 parts are missing" in str(error.value)
    assert "m-00001-of-00003.gguf, m-00003-of-00003.gguf. Fetch them" in str(error.value)


def _part(number: Any, count: Any, total: Any, name: str = "w", drop: str = "") -> bytes:
    metadata = {"split.no": number, "split.count": count, "split.tensors.count": total}
    metadata.pop(drop, None)
    return gguf_bytes(metadata, [(name, (2,), 0, bytes(8))])


@pytest.mark.parametrize(
    ("first", "second", "file", "message"),
    [
        (_part(0, 2, 2, "a"), _part(1, 2, 2, "a"), 2, "the tensor 'a' also stands in {0}/m-00001-of-00002.gguf"),
        (_part(0, 2, 2, "a"), _part(0, 2, 2, "b"), 2, "split.no is 0, expected 1 by the file's name"),
        (_part(1, 2, 2, "a"), _part(0, 2, 2, "b"), 1, "split.no is 1, expected 0"),
        (_part(0, 2, 2, "a"), _part(1, 3, 2, "b"), 2, "split.count is 3, expected 2"),
        (_part(0, 2, 2, "a"), _part(1, 2, 2, "b", "split.count"), 2, "split.count is None, expected 2"),
        (_part(0, 2, 3, "a"), _part(1, 2, 3, "b"), 1, "split.tensors.count is 3, but the 2 parts hold 2 tensors"),
        (_part(0, 2, 2, "a"), _part(1, 2, 5, "b"), 2, "split.tensors.count is 5, but the 2 parts hold 2 tensors"),
        (_part(0, 3, 2, "a"), _part(1, 3, 2, "b"), 1, "one of 3 parts (split.count), so its name must end in"),
        (_part(0, 1, 2, "a"), _part(1, 2, 2, "b"), 1, "its name says part 1 of 2, but it has no split.count"),
        (_part(0, 0, 2, "a"), _part(1, 2, 2, "b"), 1, "split.count is 0, expected a number of parts"),
        (_part(0, "2", 2, "a"), _part(1, 2, 2, "b"), 1, "split.count is '2', expected a number of parts"),
        (_part(0, 2, 2, "a"), b"GGUF" + bytes(8), 2, "is not a GGUF file, or is cut short"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    tmp_path: Path, first: bytes, second: bytes, file: int, message: str
) -> None:
    for i, raw in enumerate((first, second), 1):
        (tmp_path / f"m-{i:05}-of-00002.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
    assert str(error.value).startswith(str(tmp_path / f"m-{file:05}-of-00002.gguf"))
    assert message.format(tmp_path) in str(error.value)


def test_a_part_must_keep_its_name(tmp_path: Path) -> None:
    (tmp_path / "renamed.gguf").write_bytes(_part(0, 2, 2))
    with pytest.raises(CheckpointError, match=r"renamed.gguf: is one of 2 parts.*-NNNNN-of-00002.gguf"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_absurd_numbers_of_parts_are_missing_parts(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-99999.gguf").write_bytes(_part(0, 99999, 2))
    with pytest.raises(CheckpointError, match="99998 of 99999 parts are missing") as error:
        open_checkpoint(tmp_path / "m-00001-of-99999.gguf")
    assert len(str(error.value)) < 2000


# --- damaged and lying files ---------------------------------------------------------------------------------

WHOLE = gguf_bytes(
    {"general.architecture": "llama", "count": 7, "ratio": 0.5, "yes": True},
    [("a", (2, 32), 8, bytes(68)), ("b", (4,), 0, bytes(16))],
)
_HEADER_END = WHOLE.index(text("b")) + 9 + 4 + 8 + 4 + 8


def _one(shape: tuple[int, ...] = (4,), type_id: int = 0, offset: int = 0, name: str = "w", size: int = 64) -> bytes:
    return padded(start(1, 0) + info(name, shape, type_id, offset)) + bytes(size)


def _array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return start(0, 1) + text("key") + struct.pack("<IIQ", 9, kind, count) + rest


_HUGE = (1 << 64) - 1
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes|starts with b''"),
    "magic only": (b"GGUF", r"cut short \(4 bytes, expected b'GGUF' and at least 24\)"),
    "wrong magic": (b"GGUX" + WHOLE[4:], "starts with b'GGUX.*neither GGUF"),
    "version 1": (start(0, 0, 1), "is GGUF version 1; read are 2 and 3"),
    "version 4": (start(0, 0, 4), "is GGUF version 4; read are 2 and 3"),
    "version 0": (start(0, 0, 0), "is GGUF version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file; only little-endian"),
    "tensor count": (start(_HUGE, 0), f"counts {_HUGE} tensors of at least 24 bytes, but only 0"),
    "key count": (start(0, _HUGE), f"counts {_HUGE} metadata keys of at least 13 bytes, but only 0"),
    "more tensors than there are": (start(2, 0) + info("w", (4,), 0, 0) + bytes(24), "stands twice|cut short|lies"),
    "key length": (start(0, 1) + struct.pack("<Q", 1 << 40) + bytes(32), f"asks for {1 << 40} bytes at 32"),
    "key length overflow": (start(0, 1) + struct.pack("<Q", _HUGE) + bytes(32), f"asks for {_HUGE} bytes"),
    "value length": (start(0, 1) + text("k") + struct.pack("<IQ", 8, 1 << 62), f"asks for {1 << 62} bytes"),
    "name length": (start(1, 0) + struct.pack("<Q", 1 << 50) + bytes(64), f"asks for {1 << 50} bytes"),
    "array count of numbers": (_array(10, _HUGE), f"counts {_HUGE} values of key of at least 8 bytes"),
    "array count of strings": (_array(8, 1 << 40, bytes(64)), f"counts {1 << 40} strings of key"),
    "array count of arrays": (_array(9, 1 << 40, bytes(64)), f"counts {1 << 40} arrays of key"),
    "array of unknown type": (_array(13, 1, bytes(64)), "key is an array of type 13"),
    "deeply nested array": (_array(9, 1, struct.pack("<IQ", 9, 1) * 5000), "key is an array of type 9 at depth 4"),
    "unknown metadata type": (start(0, 1) + text("key") + struct.pack("<IQ", 77, 0), "unknown metadata type 77"),
    "boolean 2": (start(0, 1) + text("key") + struct.pack("<IB", 7, 2), "key holds the boolean 2, expected 0 or 1"),
    "key not UTF-8": (start(0, 1) + text(b"\xff\xfe") + bytes(8), r"a metadata key is not UTF-8 \(b'\\xff\\xfe'\)"),
    "value not UTF-8": (start(0, 1) + text("k") + struct.pack("<I", 8) + text(b"a\xc3"), "k is not UTF-8"),
    "element not UTF-8": (_array(8, 1, text(b"\x80")), "key is not UTF-8"),
    "name not UTF-8": (start(1, 0) + text(b"\xed\xa0\x80") + bytes(64), "a tensor name is not UTF-8"),
    "key twice": (start(0, 2) + pair("k", 1) * 2, "the metadata key 'k' stands twice"),
    "tensor twice": (
        padded(start(2, 0) + info("w", (4,), 0, 0) + info("w", (4,), 0, 32)) + bytes(64),
        "'w' stands twi",
    ),
    "five dimensions": (_one((1,) * 5), "'w' has 5 dimensions, expected at most 4"),
    "many dimensions": (start(1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(64), f"has {1 << 31} dimensions"),
    "zero dimension": (_one((4, 0)), r"'w' has the shape \[4, 0\], expected sizes of at least 1"),
    "overflowing shape": (_one((1 << 32, 1 << 32)), r"the shape \[4294967296, 4294967296\].*at most 2\^63 - 1"),
    "shape that wraps to 4": (_one((1 << 63, 1 << 1, 4)), "has the shape .* at most"),
    "large shape": (_one((1 << 60,)), r"w: F32 of shape \[1152921504606846976\] lies at bytes 64 to 4611.* has 128"),
    "past the end": (_one((17,)), "w: F32 of shape .17. lies at bytes 64 to 132, but the file has 128"),
    "offset past the end": (_one(offset=1 << 40), "w: F32 .* lies at bytes"),
    "offset overflow": (_one(offset=_HUGE - 31), "w: F32 .* lies at bytes"),
    "blocks past the end": (_one((4, 256), 12), "w: Q4_K .* lies at bytes 96 to 672|lies at bytes 64 to 640"),
    "id 42 past the end": (_one((4, 256), 42), r"w: type id 42 of shape \[4, 256\] at byte .* has"),
    "uneven row": (_one((4, 33), 8), r"w: Q8_0 of shape \[4, 33\], whose rows are no multiple of 32"),
    "scalar of blocks": (_one((), 8), r"w: Q8_0 of shape \[\], whose rows are no multiple of 32"),
    "overlap": (
        padded(start(2, 0) + info("a", (16,), 0, 0) + info("b", (16,), 0, 32)) + bytes(128),
        "b overlaps a at byte",
    ),
    "same place": (padded(start(2, 0) + info("a", (4,), 0, 0) + info("b", (4,), 0, 0)) + bytes(64), "b overlaps a"),
    "overlap of a type that is not read": (
        padded(start(2, 0) + info("a", (256,), 17, 0) + info("b", (16,), 0, 64)) + bytes(256),
        "b overlaps a at byte",
    ),
    "alignment 0": (gguf_bytes({"general.alignment": 32}, []).replace(b"\x20\0\0\0", bytes(4)), "alignment is 0, exp"),
    "alignment 24": (start(0, 1) + pair("general.alignment", 24), "alignment is 24, expected a power of two"),
    "alignment text": (start(0, 1) + pair("general.alignment", "32"), "alignment is '32', expected a power of two"),
    "alignment true": (start(0, 1) + pair("general.alignment", True), "alignment is True, expected a power of two"),
    "alignment past the end": (
        start(1, 1) + pair("general.alignment", 1 << 31) + info("w", (4,), 0, 0) + bytes(64),
        f"lies at bytes {1 << 31} to",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name_before_anything_is_allocated(tmp_path: Path, case: str) -> None:
    raw, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with peak_memory() as peak, pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(path)
    assert str(error.value).startswith(str(path))
    assert peak.nbytes < 2 << 20


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """At every byte of the header, and within the data."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(WHOLE)
    open_checkpoint(path)
    for length in [*range(_HEADER_END), _HEADER_END + 1, len(WHOLE) - 17]:
        path.write_bytes(WHOLE[:length])
        with peak_memory() as peak, pytest.raises(CheckpointError) as error:
            open_gguf(path)
        assert str(error.value).startswith(str(path)), length
        assert peak.nbytes < 2 << 20


def test_a_file_that_got_shorter_since_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    tensor = open_checkpoint(path).tensors["b"]
    path.write_bytes(WHOLE[:_HEADER_END])
    with pytest.raises(CheckpointError, match=rf"m.gguf: ends at {_HEADER_END} now|ends at \d+ now, was {len(WHOLE)}"):
        tensor.read()


@pytest.mark.parametrize(
    "raw",
    [
        _array(8, 60_000, text("ab") * 60_000),
        _array(9, 20_000, struct.pack("<IQ", 0, 0) * 20_000),
        _array(9, 40_000, struct.pack("<IQ", 8, 0) * 40_000),
        _array(9, 40_000, struct.pack("<IQ", 9, 0) * 40_000),
        start(0, 1) + text("k") + struct.pack("<I", 8) + text(b"a" * 1_200_000 + "\U0001f642".encode()),
        start(0, 10_000) + b"".join(text(f"{i:x}") + struct.pack("<IB", 0, 1) for i in range(10_000)),
        start(3_000, 0) + b"".join(info(f"{i:x}", (), 0, 0) for i in range(3_000)),
    ],
    ids=["strings", "arrays", "lists of strings", "lists of arrays", "wide string", "keys", "tensors"],
)
def test_small_things_that_are_large_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    """Twice the file and 64 MiB; here with 2 MiB in place of 48, and so 18 in place of 64."""
    assert gguf_header.MEMORY_FLOOR == 48 << 20
    monkeypatch.setattr(gguf_header, "MEMORY_FLOOR", 2 << 20)
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with peak_memory() as peak, pytest.raises(CheckpointError, match=r"bad.gguf: the header would take more memory"):
        open_checkpoint(path)
    # The window of the reader is 1 MiB, read beside the one before.
    assert peak.nbytes < 2 * len(raw) + (2 << 20) + (2 << 20)


def test_a_large_vocabulary_is_read_whole(tmp_path: Path) -> None:
    """As large as any published one, in a file with nothing else."""
    words = [f"token {i}" for i in range(600_000)]
    raw = _array(8, len(words), b"".join(map(text, words)))
    (tmp_path / "m.gguf").write_bytes(raw)
    assert open_checkpoint(tmp_path / "m.gguf").metadata["key"] == words
