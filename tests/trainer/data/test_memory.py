"""A corpus ten times larger than what the process may hold goes through, in every format."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import training_data as data

# Beside what the imports take; pyarrow takes more to read a page of Parquet than the others take in all.
_ALLOWED_MIB = 24
_ALLOWED_PARQUET_MIB = 2 * _ALLOWED_MIB
_CORPUS_MIB = 256
# Of a quarter of a MiB.
_ROWS = 4 * _CORPUS_MIB

# What a source may hold is bounded by the operating system: an allocation beyond it fails.
_RUN = """
import json, resource, sys
from pathlib import Path
import torch
from intaglio.trainer.data.settings import build_source, parse_settings
from intaglio.trainer.data.text import open_tokenizer

table, root, tokenizer = json.loads(sys.argv[1]), Path(sys.argv[2]), open_tokenizer(Path(sys.argv[3]))
torch.set_num_threads(1)
if table["format"] in ("arrow", "parquet"):
    import pyarrow.parquet
table["batch_size"], table["shuffle"] = 4, True
def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
source = build_source(parse_settings(table), seed=0, root=root, tokenizer=tokenizer)
batches = iter(source)
next(batches)
before = status("VmRSS")
limit = status("VmSize") + (int(sys.argv[4]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
count = 1 + sum(1 for _ in batches)
state = source.state_dict()
print(json.dumps([count, (status("VmHWM") - before) / 2**20]))
"""


def _write(root: Path, name: str) -> dict[str, Any]:
    """Rows of a quarter of a MiB; the table that reads them."""
    if name in ("csv", "csv-gzip", "jsonl", "jsonl-gzip"):
        return _write_lines(root, *name.split("-"))
    if name in ("idx", "idx-gzip", "npy", "tokens"):
        return _write_arrays(root, *name.split("-"))
    # Most of a row is padding behind the picture.
    row = data.png(data.picture(0)) + np.random.default_rng(0).bytes(1 << 18)
    stream = {"shuffle_buffer": 20, "examples": {"kind": "pictures", "size": 12, "image": "png"}}
    if name == "image-folder":
        for i in range(_ROWS):
            path = root / "pictures" / "ab"[i % 2] / f"{i:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row)
        return {"format": "image-folder", "folder": "pictures", "examples": {"size": 12}}
    if name == "webdataset":
        data.write_tar(root / "x.tar", [{"png": row}] * _ROWS)
        return {"format": "webdataset", "files": ["x.tar"], **stream}
    import pyarrow as pa
    import pyarrow.parquet as parquet

    batch = pa.record_batch({"png": [row] * 8})
    if name == "arrow":
        with pa.ipc.new_file(root / "x.arrow", batch.schema) as writer:
            for _ in range(_ROWS // 8):
                writer.write_batch(batch)
        return {"format": "arrow", "files": ["x.arrow"], **stream}
    table = pa.Table.from_batches([batch] * 32)
    with parquet.ParquetWriter(root / "x.parquet", table.schema, use_dictionary=False, compression="none") as file:
        for _ in range(2 * _ROWS // 256):
            file.write_table(table, row_group_size=256)
    return {"format": "parquet", "files": ["x.parquet"], **stream}


def _write_lines(root: Path, form: str, compression: str = "") -> dict[str, Any]:
    text = np.random.default_rng(0).bytes(1 << 17).hex()
    with _opened(root / "x", compression) as file:
        if form == "csv":
            file.write(b"x,text\n")
        for i in range(_ROWS):
            line = f"{i},{text}" if form == "csv" else json.dumps({"x": i, "text": text})
            file.write(f"{line}\n".encode())
    return {"format": form, "files": ["x"], "shuffle_buffer": 20, "examples": {"kind": "numbers", "fields": ["x"]}}


def _write_arrays(root: Path, form: str, compression: str = "") -> dict[str, Any]:
    if form == "tokens":
        np.random.default_rng(0).integers(0, 300, _CORPUS_MIB << 19, np.uint16).tofile(root / "t.bin")
        return {"format": "tokens", "files": ["t.bin"], "dtype": "uint16", "length": 65536}
    if form == "npy":
        np.save(root / "x.npy", np.ones((_ROWS, 1 << 16), np.float32))
        return {"format": "npy", "arrays": {"x": "x.npy"}, "examples": {"kind": "numbers", "fields": ["x"]}}
    with _opened(root / "x.idx", compression) as file:
        file.write(struct.pack(">BBBB3I", 0, 0, 8, 3, _ROWS, 256, 1024))
        for _ in range(_ROWS):
            file.write(bytes(256 * 1024))
    examples = {"kind": "pictures", "size": 12}
    return {"format": "idx", "arrays": {"image": "x.idx"}, "shuffle_buffer": 20, "examples": examples}


def _opened(path: Path, compression: str) -> BinaryIO:
    if compression:
        return gzip.open(path, "wb", compresslevel=1)  # type: ignore[return-value]
    return path.open("wb")


def _content_size(path: Path) -> int:
    """Of a file through gzip that of what it holds, which its last bytes say."""
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.stat().st_size
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(), "little")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    "name",
    [
        "tokens",
        "npy",
        "idx",
        "idx-gzip",
        "csv",
        "csv-gzip",
        "jsonl",
        "jsonl-gzip",
        "webdataset",
        "image-folder",
        "arrow",
        "parquet",
    ],
)
def test_streams_a_corpus_ten_times_its_memory(name: str, tmp_path: Path) -> None:
    table = _write(tmp_path, name)
    allowed = _ALLOWED_PARQUET_MIB if name == "parquet" else _ALLOWED_MIB
    assert sum(_content_size(path) for path in tmp_path.rglob("*") if path.is_file()) >= 10 * allowed << 20
    tokenizer = data.write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-c", _RUN, json.dumps(table), str(tmp_path), str(tokenizer), str(allowed)]
    # The pools of pyarrow's other allocators reserve addresses by the gigabyte.
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    count, grown = json.loads(done.stdout)
    assert count >= _CORPUS_MIB - 1
    assert grown < allowed
