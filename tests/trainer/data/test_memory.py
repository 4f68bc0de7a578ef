"""A corpus several times larger than what the process may hold goes through, in every format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_data as data

# Beside what the imports take.
_ALLOWED_MIB = 48
_CORPUS_MIB = 192

# What a source may hold is bounded by the operating system: an allocation beyond it fails.
_RUN = f"""
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
limit = status("VmSize") + ({_ALLOWED_MIB} << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
count = 1 + sum(1 for _ in batches)
state = source.state_dict()
print(json.dumps([count, (status("VmHWM") - before) / 2**20]))
"""


def _write(root: Path, name: str) -> dict[str, Any]:
    numbers = {"kind": "numbers", "fields": ["x"]}
    rng = np.random.default_rng(0)
    count = _CORPUS_MIB * 4
    # A row of a quarter of a MiB, most of which is padding behind the picture.
    row = data.png(data.picture(0)) + rng.bytes(1 << 18)
    stream = {"shuffle_buffer": 20, "examples": {"kind": "pictures", "size": 12, "image": "png"}}
    if name == "tokens":
        rng.integers(0, 300, _CORPUS_MIB << 19, np.uint16).tofile(root / "t.bin")
        return {"format": "tokens", "files": ["t.bin"], "dtype": "uint16", "length": 65536}
    if name == "npy":
        np.save(root / "x.npy", np.ones((count, 1 << 16), np.float32))
        return {"format": "npy", "arrays": {"x": "x.npy"}, "examples": numbers}
    if name == "jsonl":
        with (root / "x.jsonl").open("w") as file:
            for i in range(count):
                file.write(json.dumps({"x": i, "text": row.hex()[: 1 << 18]}) + "\n")
        return {"format": "jsonl", "files": ["x.jsonl"], **stream, "examples": numbers}
    if name == "webdataset":
        data.write_tar(root / "x.tar", [{"png": row}] * count)
        return {"format": "webdataset", "files": ["x.tar"], **stream}
    import pyarrow as pa
    import pyarrow.parquet as parquet

    batch = pa.record_batch({"png": [row] * 8})
    if name == "arrow":
        with pa.ipc.new_file(root / "x.arrow", batch.schema) as writer:
            for _ in range(count // 8):
                writer.write_batch(batch)
        return {"format": "arrow", "files": ["x.arrow"], **stream}
    table = pa.Table.from_batches([batch] * 32)
    with parquet.ParquetWriter(root / "x.parquet", table.schema, use_dictionary=False, compression="none") as file:
        for _ in range(count // 256):
            file.write_table(table, row_group_size=256)
    return {"format": "parquet", "files": ["x.parquet"], **stream}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("name", ["tokens", "npy", "jsonl", "webdataset", "arrow", "parquet"])
def test_streams_a_corpus_four_times_its_memory(name: str, tmp_path: Path) -> None:
    table = _write(tmp_path, name)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size >= 4 * _ALLOWED_MIB << 20
    tokenizer = data.write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-c", _RUN, json.dumps(table), str(tmp_path), str(tokenizer)]
    # The pools of pyarrow's other allocators reserve addresses by the gigabyte.
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    count, grown = json.loads(done.stdout)
    assert count >= _CORPUS_MIB - 1
    assert grown < _ALLOWED_MIB
