"""Safetensors files that are written: bytes as they were, read back by the ``safetensors`` package and by mlx."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors as oracle

from intaglio.errors import CancelledError, CheckpointError, OutputError
from intaglio.exporters.checkpoints import open_checkpoint, safetensors_writer
from intaglio.exporters.checkpoints.safetensors import DTYPES
from intaglio.exporters.checkpoints.safetensors_writer import write_file, write_shards
from intaglio.exporters.checkpoints.tensors import ArrayTensor, CheckpointTensor, QuantizedLayout, UnreadableTensor
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes


def dense(name: str, values: np.ndarray) -> ArrayTensor:
    return ArrayTensor(name, values.shape, "x", values)


def some(seed: int = 0) -> dict[str, np.ndarray]:
    """One array of each dtype, odd sizes first, with a scalar and an empty one."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.frombuffer(
            rng.integers(0, 2 if name == "BOOL" else 256, 15 * dtype.itemsize, np.uint8).tobytes(), dtype
        )
        for name, dtype in sorted(DTYPES.items(), key=lambda item: item[1].itemsize)
    }
    arrays = {name: array.reshape(3, 5) for name, array in arrays.items()}
    return {**arrays, "scalar": np.array(2.5, np.float32), "none": np.zeros((0, 4), np.float16), "ü 🙂": np.ones(1)}


def mapped(arrays: dict[str, np.ndarray]) -> dict[str, CheckpointTensor]:
    return {name: dense(name, array) for name, array in arrays.items()}


def packed(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, bits: int, group: int, zero_point: int
) -> ArrayTensor:
    rows = GroupedQuantRows(pack_codes(codes, bits), scales, np.zeros((), scales.dtype) if offsets is None else offsets)
    layout = QuantizedLayout(GroupedQuantFormat(bits, group, zero_point), scales.dtype, offsets is not None)
    return ArrayTensor("w.weight", codes.shape, "quantized", rows, layout)


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    import torch

    arrays = some()
    write_file(tmp_path / "m.safetensors", mapped(arrays), {"format": "pt", "note": "ä"})
    with oracle.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ä"}
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            found = file.get_tensor(name)
            assert tuple(found.shape) == array.shape
            assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_file_copied_through_the_reader_keeps_every_byte(tmp_path: Path) -> None:
    arrays = some()
    write_file(tmp_path / "a.safetensors", mapped(arrays), {"b": "2", "a": "1"})
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    write_file(tmp_path / "b.safetensors", checkpoint.tensors, checkpoint.metadata)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    raw = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0, name


def test_shards_and_index(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((i + 1, 100), i, np.float32) for i in range(6)}
    files = write_shards(tmp_path, mapped(arrays), {"format": "pt"}, shard_bytes=1300)
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert [file.name for file in files] == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays.values())}
    assert index["weight_map"] == {"t0": names[0], "t1": names[0], "t2": names[1], "t3": names[2], "t4": names[3],
                                   "t5": names[4]}  # fmt: skip
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata == {"format": "pt"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(checkpoint.tensors[name].read()), array)
    assert len(os.listdir(tmp_path)) == 6


def test_below_the_size_there_is_one_file(tmp_path: Path) -> None:
    arrays = {"a": np.ones(100, np.float32), "b": np.ones(100, np.float32)}
    files = write_shards(tmp_path, mapped(arrays), stem="diffusion_pytorch_model", shard_bytes=800)
    assert [file.name for file in files] == os.listdir(tmp_path) == ["diffusion_pytorch_model.safetensors"]
    write_shards(tmp_path / "..", {}, stem=f"{tmp_path.name}/empty")
    assert open_checkpoint(tmp_path / "empty.safetensors").tensors == {}


CASES = [
    (bits, group, zero_point, dtype)
    for bits, group, zero_point in [(2, 128, 1), (2, 256, 1), (4, 32, 8), (4, 32, 0), (8, 32, 128), (8, 64, 16)]
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16)
]


@pytest.mark.parametrize(("bits", "group", "zero_point", "dtype"), CASES)
def test_grouped_quantized_rows_become_mlx_tensors(
    tmp_path: Path, bits: int, group: int, zero_point: int, dtype: Any
) -> None:
    import mlx.core as mx

    rng = np.random.default_rng(1)
    codes = rng.integers(0, 1 << bits, (7, 512), np.uint8)
    # Small integers in the place of random numbers, since few sums are exact.
    scales = (rng.integers(-63, 64, (7, 512 // group)) / 64).astype(dtype)
    offsets = None if zero_point else (rng.integers(-63, 64, scales.shape) / 64).astype(dtype)
    tensor = packed(codes, scales, offsets, bits, group, zero_point)
    write_file(tmp_path / "m.safetensors", {"w.weight": tensor})
    assert tensor.layout is not None
    expected = dequantize(tensor.read(), tensor.layout.format)  # type: ignore[arg-type]
    arrays = mx.load(str(tmp_path / "m.safetensors"))
    parts = [arrays[f"w.{part}"].astype(mx.float32) for part in ("scales", "biases")]
    found = mx.dequantize(arrays["w.weight"], *parts, group_size=min(group, 128), bits=bits)
    np.testing.assert_array_equal(np.array(found), expected)
    config = {"quantization": {"bits": bits, "group_size": min(group, 128)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = open_checkpoint(tmp_path)
    write_file(tmp_path / "again.safetensors", again.tensors)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_what_mlx_cannot_hold_is_refused_by_row_and_group(tmp_path: Path) -> None:
    codes = np.tile(np.arange(128, 256, dtype=np.uint8), (3, 1))

    def write(scale: float, zero_point: int, dtype: Any, group: int = 32, offsets: float | None = None) -> None:
        scales = np.ones((3, 128 // group), dtype)
        scales[2, 1] = scale
        added = None if offsets is None else np.full(scales.shape, offsets, dtype)
        write_file(tmp_path / "m.safetensors", {"w.weight": packed(codes, scales, added, 8, group, zero_point)})

    write(500, 128, np.float16)
    (tmp_path / "m.safetensors").unlink()
    for scale, zero_point, dtype, offsets in [
        (600, 128, np.float16, None),  # the bias is above the type's largest
        (1 / 3, 127, np.float16, None),  # or between two of its numbers
        (1.0078125, 127, ml_dtypes.bfloat16, None),
        (np.inf, 0, np.float32, 1.0),
        (np.inf, 8, np.float16, None),
        (0.1, 8, np.float32, None),  # the product with some codes would be rounded before the bias is taken away
    ]:
        with pytest.raises(CheckpointError, match=r"w.weight: row 2, group 1 of quantized has the scale .* --type F32"):
            write(scale, zero_point, dtype, offsets=offsets)
    with pytest.raises(CheckpointError, match=r"w.weight: row 0, group 0 .* would need the bias 1.0"):
        write(1, 8, np.float16, offsets=1.0)
    with pytest.raises(CheckpointError, match=r"w.weight: quantized has groups of 16, and MLX has only groups of 32"):
        write(1, 128, np.float16, group=16)
    assert os.listdir(tmp_path) == []


def test_refusals(tmp_path: Path) -> None:
    quantized = packed(np.zeros((1, 32), np.uint8), np.ones((1, 1), np.float16), None, 4, 32, 8)
    one = dense("a", np.ones(1, np.float32))
    for tensors, metadata, message in [
        ({"w": quantized}, {}, r"w: is quantized, and MLX quantizes only tensors named \*.weight"),
        ({"w": UnreadableTensor("w", (1,), "F4", "no")}, {}, "w: is F4, which is not read"),
        ({"w": dense("w", np.ones(1, ml_dtypes.int4))}, {}, "w: is int4, which safetensors does not have"),
        ({"w.weight": quantized, "w.scales": one}, {}, "w.scales stands twice"),
        ({"__metadata__": one}, {}, "may not be called __metadata__"),
        ({"a": one}, {"key": 3}, "the metadata key key is 3, expected text"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            write_file(tmp_path / "m.safetensors", tensors, metadata)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match=r"nowhere/m.safetensors: cannot be written"):
        write_file(tmp_path / "nowhere" / "m.safetensors", {"a": one})
    assert os.listdir(tmp_path) == []


def test_a_stopped_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")

    def stop(_event: object) -> bool:
        raise CancelledError("stop")

    with pytest.raises(CancelledError):
        write_file(path, {"a": dense("a", np.ones(4, np.float32))}, progress=stop)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_memory_is_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "_CHUNK_BYTES", 1 << 20)
    with (tmp_path / "a.safetensors").open("wb") as file:
        header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 12, 1 << 12], "data_offsets": [0, 1 << 26]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 26))
    tensors = open_checkpoint(tmp_path / "a.safetensors").tensors
    tracemalloc.start()
    try:
        write_file(tmp_path / "b.safetensors", tensors)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "b.safetensors").stat().st_size > 1 << 26
