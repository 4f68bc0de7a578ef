"""Bad input: an error that names file and place, or with skip_bad a count, the same after a resume."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_data as data

from intaglio.errors import CheckpointError, DataError
from intaglio.trainer.data.loader import Loader

Build = Callable[..., Loader]
_TEXT: dict[str, Any] = {"examples": data.TEXT, "batch_size": 2, "shuffle_buffer": 10}
_NUMBERS: dict[str, Any] = {"examples": {"kind": "numbers", "fields": ["x"]}, "batch_size": 4, "shuffle_buffer": 10}
_PICTURES: dict[str, Any] = {"size": 8, "augmentation": {"horizontal_flip": 0.5}}


def _flip(path: Path, place: int, count: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for i in range(place, place + count):
        content[i] ^= 0xFF
    path.write_bytes(content)


def _bad_jsonl(root: Path) -> tuple[dict[str, Any], str, int]:
    lines = [json.dumps({"text": text}).encode() for text in data.texts(40)]
    lines[3], lines[9], lines[20], lines[21] = b'{"text": "cut', b"[1]", b'{"text": "\xff"}', b'{"text": 7}'
    (root / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    return {"format": "jsonl", "files": ["a.jsonl"], **_TEXT}, r"a\.jsonl, line (4|10|21|22): (is|field)", 4


def _cut_gzip(root: Path) -> tuple[dict[str, Any], str, int]:
    data.write_jsonl(root / "a.jsonl.gz", [{"text": text} for text in data.texts(400)])
    whole = (root / "a.jsonl.gz").read_bytes()
    (root / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    return {"format": "jsonl", "files": ["a.jsonl.gz"], **_TEXT}, r"a\.jsonl\.gz, line \d+: cannot be read from here", 1


def _bad_csv(root: Path) -> tuple[dict[str, Any], str, int]:
    rows = [f"{i},text {i}" for i in range(30)]
    rows[5], rows[6] = "5", "6,a,b"
    rows[8], rows[9] = '8,"a" b', "nine,nine"
    (root / "a.csv").write_text("\n".join(["x,text", *rows, '30,"never closed']))
    return {"format": "csv", "files": ["a.csv"], **_NUMBERS}, r"a\.csv, line (7|8|10|11|32): (is|has|field)", 5


def _bad_parquet(root: Path) -> tuple[dict[str, Any], str, int]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({"text": data.texts(60), "x": np.arange(60.0)})
    parquet.write_table(
        table, root / "a.parquet", row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True
    )
    column = parquet.ParquetFile(root / "a.parquet").metadata.row_group(2).column(0)
    _flip(root / "a.parquet", column.data_page_offset + column.total_compressed_size // 2)
    return {"format": "parquet", "files": ["a.parquet"], **_TEXT}, r"a\.parquet, row group 2, row 0: is damaged", 10


def _bad_arrow(root: Path) -> tuple[dict[str, Any], str, int]:
    import pyarrow as pa
    import pyarrow.feather as feather

    feather.write_feather(pa.table({"text": data.texts(60)}), root / "a.feather", compression="lz4", chunksize=10)
    content = (root / "a.feather").read_bytes()
    frames = [i for i in range(len(content)) if content.startswith(b"\x04\x22\x4d\x18", i)]
    _flip(root / "a.feather", frames[len(frames) // 2])
    return {"format": "arrow", "files": ["a.feather"], **_TEXT}, r"a\.feather, record batch \d, row 0: is damaged", 1


def _samples(count: int) -> list[dict[str, bytes]]:
    return [{"png": data.png(data.picture(i)), "cls": b"%d" % (i % 3)} for i in range(count)]


_TAR = {
    "format": "webdataset",
    "files": ["a.tar"],
    "batch_size": 2,
    "shuffle_buffer": 10,
    "examples": {"kind": "pictures", **_PICTURES, "label": "cls"},
}


def _bad_tar_header(root: Path) -> tuple[dict[str, Any], str, int]:
    data.write_tar(root / "a.tar", _samples(20))
    # Of the second member of sample 4: a label is lost, and the picture alone is no example.
    _flip(root / "a.tar", (root / "a.tar").read_bytes().index(b"data/00004.cls") + 2)
    return _TAR, r"a\.tar, byte \d+: (is no tar header|data/00004: has no field 'cls')", 2


def _cut_tar(root: Path) -> tuple[dict[str, Any], str, int]:
    data.write_tar(root / "a.tar", _samples(20))
    content = (root / "a.tar").read_bytes()
    (root / "a.tar").write_bytes(content[: content.index(b"data/00017.png") + 600])
    return _TAR, r"a\.tar, byte \d+: is damaged \(unexpected end of data\)", 1


def _bad_tar_picture(root: Path) -> tuple[dict[str, Any], str, int]:
    samples = _samples(20)
    samples[6]["png"] = samples[6]["png"][:100]
    samples[8]["cls"] = b"cat"
    data.write_tar(root / "a.tar", samples)
    return _TAR, r"a\.tar, byte \d+: (data/00006: the picture does not decode|data/00008\.cls: is no cls)", 2


def _cut_idx(root: Path) -> tuple[dict[str, Any], str, int]:
    rng = np.random.default_rng(0)
    data.write_idx(root / "a.idx.gz", rng.integers(0, 255, (40, 60), np.uint8))
    whole = (root / "a.idx.gz").read_bytes()
    (root / "a.idx.gz").write_bytes(whole[: len(whole) // 2])
    examples = {"kind": "numbers", "fields": ["x"]}
    table = {"format": "idx", "arrays": {"x": "a.idx.gz"}, "examples": examples, "batch_size": 2, "shuffle_buffer": 5}
    return table, r"a\.idx\.gz, row \d+: cannot be read", -1


def _bad_pictures(root: Path) -> tuple[dict[str, Any], str, int]:
    for i in range(20):
        path = root / "pictures" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.png(data.picture(i))[: 60 if i in (3, 8) else None])
    table = {"format": "image-folder", "folder": "pictures", "batch_size": 2, "examples": _PICTURES}
    return table, r"pictures/[ab]/0[38]\.png: the picture does not decode", 2


def _missing_caption(root: Path) -> tuple[dict[str, Any], str, int]:
    for i in range(20):
        (root / f"{i:02}.png").write_bytes(data.png(data.picture(i)))
        if i != 5:
            (root / f"{i:02}.txt").write_text("a print")
    examples = {**_PICTURES, "caption_length": 30}
    table = {"format": "image-caption-folder", "folder": ".", "batch_size": 2, "examples": examples}
    return table, r"05\.png: has no caption; expected it in 05\.txt", 1


def _large_token(root: Path) -> tuple[dict[str, Any], str, int]:
    tokens = np.zeros(501, "<u2")
    tokens[123] = 400
    tokens.tofile(root / "t.bin")
    table = {"format": "tokens", "files": ["t.bin"], "dtype": "uint16", "length": 10, "batch_size": 2}
    return (
        {**table, "vocab_size": 400},
        r"t\.bin, tokens 120 to 130: token 3 of these is 400; expected ids below 400",
        1,
    )


CASES = [
    _bad_jsonl,
    _cut_gzip,
    _bad_csv,
    _bad_parquet,
    _bad_arrow,
    _bad_tar_header,
    _cut_tar,
    _bad_tar_picture,
    _cut_idx,
    _bad_pictures,
    _missing_caption,
    _large_token,
]


def _two_epochs(source: Loader) -> Iterator[dict[str, torch.Tensor]]:
    while source.epoch < 2:
        yield from source


@pytest.mark.parametrize("case", CASES)
def test_names_the_place_or_skips_and_counts(
    case: Callable[[Path], tuple[dict[str, Any], str, int]],
    build: Build,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, message, count = case(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        list(build(tmp_path, table))
    assert "skip_bad" in str(caught.value)

    source = build(tmp_path, {**table, "skip_bad": True})
    batches, states = [], []
    with caplog.at_level(logging.INFO, "intaglio"):
        for batch in _two_epochs(source):
            batches.append(batch)
            states.append(source.state_dict())
    if count >= 0:
        assert source.skipped == 2 * count
        assert caplog.text.count("left out") >= 2
    assert source.skipped > 0
    for n in range(0, len(batches), 3):
        resumed = build(tmp_path, {**table, "skip_bad": True})
        resumed.load_state_dict(states[n])
        for i, mine in enumerate(_two_epochs(resumed), n + 1):
            for name in batches[i]:
                assert torch.equal(mine[name], batches[i][name])
            assert resumed.state_dict() == states[i]
        assert resumed.skipped == source.skipped


def test_damage_of_files_as_a_whole(build: Build, corpora: Path, tmp_path: Path) -> None:
    for name, content, table, message in (
        ("a.parquet", b"PAR1 no", {"format": "parquet", **_TEXT}, r"a\.parquet: is damaged or no Parquet file"),
        ("a.feather", b"FEA1 old", {"format": "arrow", **_TEXT}, r"a\.feather: is damaged or no Arrow file"),
        ("a.tar", b"x" * 2048, _TAR, r"a\.tar, byte 0: is damaged"),
        ("a.csv", b'x,"text\n', {"format": "csv", **_NUMBERS}, r"a\.csv: its first row is not CSV"),
        ("b.csv", b"x,x\n1,2\n", {"format": "csv", **_NUMBERS}, r"b\.csv: its first row names a column twice"),
        ("t.bin", b"abc", {"format": "tokens", "dtype": "uint16", "length": 4, "batch_size": 1}, "no whole number of"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(build(tmp_path, {**table, "files": [name]}))
    examples = {"kind": "numbers", "fields": ["x"]}
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.zeros((3, 4))))
    np.save(tmp_path / "cut.npy", np.zeros((3, 4)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-1])
    (tmp_path / "a.idx").write_bytes(b"\0\0\x07\x01\0\0\0\1a")
    (tmp_path / "b.idx.gz").write_bytes(gzip.compress(b"\0\0\x08\x02\0\0"))
    for name, message in (
        ("objects.npy", "expected rows of numbers"),
        ("columns.npy", "Fortran-ordered"),
        ("cut.npy", "cut short or damaged"),
        ("a.idx", "no IDX or .npy file, it begins with 00 00 07 01"),
        ("b.idx.gz", "no IDX or .npy file"),
    ):
        with pytest.raises(DataError, match=message):
            build(tmp_path, {"format": "idx", "arrays": {"x": name}, "examples": examples, "batch_size": 1})
    arrays = {"x": str(corpora / "labels.npy"), "y": "three.npy"}
    np.save(tmp_path / "three.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"different numbers of rows: .*labels\.npy has 61, .*three\.npy has 3"):
        build(tmp_path, {"format": "npy", "arrays": arrays, "examples": examples, "batch_size": 1})


def test_a_column_or_field_that_is_not_there(build: Build, corpora: Path) -> None:
    other = {**data.TEXT, "field": "body"}
    for files, form in (("*.parquet", "parquet"), ("*.feather", "arrow")):
        table = {"format": form, "files": [files], "examples": other, "batch_size": 1}
        with pytest.raises(DataError, match=r"has no column 'body'; it has text, x, y, label"):
            list(build(corpora, table))
    table = {"format": "jsonl", "files": ["*.jsonl"], "examples": other, "batch_size": 1}
    with pytest.raises(DataError, match=r"jsonl, line \d+: has no field 'body'; it has 'text', 'x', 'y', 'label'"):
        list(build(corpora, table))


def test_empty_data(build: Build, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "a.csv").write_text("")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    data.write_tar(tmp_path / "a.tar", [])
    np.zeros(3, "<u2").tofile(tmp_path / "t.bin")
    np.save(tmp_path / "a.npy", np.zeros((0, 3)))
    (tmp_path / "none").mkdir()
    (tmp_path / "classes" / "empty").mkdir(parents=True)
    tokens = {"format": "tokens", "files": ["t.bin"], "dtype": "uint16", "length": 4, "batch_size": 1}
    for table in (
        {"format": "jsonl", "files": ["a.jsonl"], **_TEXT},
        {"format": "csv", "files": ["a.csv"], **_NUMBERS},
        {"format": "parquet", "files": ["a.parquet"], **_TEXT},
        {**_TAR, "skip_bad": False},
        tokens,
        {"format": "npy", "arrays": {"x": "a.npy"}, "examples": _NUMBERS["examples"], "batch_size": 1},
    ):
        with pytest.raises(DataError, match=r"an epoch has no batch.*Is the data empty"):
            list(build(tmp_path, table))
    for folder, message in (("none", "holds no picture"), ("gone", "cannot be listed")):
        table = {"format": "image-caption-folder", "folder": folder, "batch_size": 1, "examples": _PICTURES}
        with pytest.raises(DataError, match=message):
            build(tmp_path, table)
    for folder, message in (("none", "has no subfolders"), ("classes", "empty: holds no picture")):
        table = {"format": "image-folder", "folder": folder, "batch_size": 1, "examples": _PICTURES}
        with pytest.raises(DataError, match=message):
            build(tmp_path, table)
    with pytest.raises(DataError, match=r"b\*\.jsonl: names no file"):
        build(tmp_path, {"format": "jsonl", "files": ["b*.jsonl"], **_TEXT})
    with pytest.raises(DataError, match=r"a\.jsonl: is named twice"):
        build(tmp_path, {"format": "jsonl", "files": ["a.jsonl", "*.jsonl"], **_TEXT})


def test_all_bad_is_an_error_even_when_skipped(build: Build, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[]\n" * 9)
    table = {"format": "jsonl", "files": ["a.jsonl"], "skip_bad": True, **_TEXT}
    with pytest.raises(DataError, match=r"an epoch has no batch. 0 windows were found and 9 damaged records left out"):
        list(build(tmp_path, table))
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(b"no picture" if i < 2 else data.png(data.picture(i)))
        (tmp_path / f"{i}.txt").write_text("a print")
    table = {"format": "image-caption-folder", "folder": ".", "shuffle": False, "skip_bad": True, "examples": _PICTURES}
    batches = list(build(tmp_path, {**table, "batch_size": 2}))
    assert [len(batch["pixel_values"]) for batch in batches] == [2]
    with pytest.raises(DataError, match="all records of a batch of rank 0 are damaged"):
        list(build(tmp_path, {**table, "batch_size": 1}).shard(0, 2))


def test_files_changed_since_the_checkpoint(build: Build, corpora: Path, tmp_path: Path) -> None:
    for name in ("0.jsonl", "1.jsonl"):
        shutil.copy(corpora / name, tmp_path / name)
    source = build(tmp_path, {**data.TABLES["jsonl"], "batch_size": 2})
    next(iter(source))
    state = source.state_dict()
    shutil.copytree(tmp_path, tmp_path / "moved")
    build(tmp_path / "moved", {**data.TABLES["jsonl"], "batch_size": 2}).load_state_dict(state)
    _flip(tmp_path / "1.jsonl", 700)
    with pytest.raises(CheckpointError, match="Resume with the data and settings of the checkpoint"):
        build(tmp_path, {**data.TABLES["jsonl"], "batch_size": 2}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="lacks fingerprint"):
        source.load_state_dict({"epoch": 0})
