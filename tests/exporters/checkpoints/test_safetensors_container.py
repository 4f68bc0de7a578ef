"""The safetensors container: files of the `safetensors` package, shards, and everything that can be wrong."""

from __future__ import annotations

import itertools
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as oracle
from peak_memory import peak_memory
from safetensors_files import entry, safetensors_bytes

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints import safetensors as reader


def test_files_of_the_safetensors_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f64": rng.normal(size=(2, 3)),
        "f32": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "f16": rng.normal(size=5).astype(np.float16),
        "bf16": rng.normal(size=(3, 3)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "naïve \U0001f642": np.ones(1, np.float32),
    }
    path = tmp_path / "m.safetensors"
    oracle.save_file(arrays, path, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.files, checkpoint.config) == ("safetensors", (path,), {"model_type": "x"})
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(tensor.read()), array)
        assert sum(len(rows) for _, rows in tensor.chunks(8) if isinstance(rows, np.ndarray)) == tensor.row_count


def test_a_type_that_is_not_read_is_listed_and_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"w": entry(0, 4, [4], "F4_E2M1")}, bytes(4)))
    tensor = open_checkpoint(path).tensors["w"]
    assert (tensor.storage, tensor.shape) == ("F4_E2M1", (4,))
    with pytest.raises(CheckpointError, match=r"m.safetensors: w: is stored as 'F4_E2M1'; read are F64, F32"):
        tensor.read()


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    """Bytes of each type as torch writes them, so that the names are not ours alone."""
    import torch
    from safetensors.torch import save_file

    rng = np.random.default_rng(5)
    kinds = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
        "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
        "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    }  # fmt: skip
    assert kinds.keys() == reader.DTYPES.keys()
    path = tmp_path / "m.safetensors"
    raw = {}
    for name, kind in kinds.items():
        size = 6 * torch.empty(0, dtype=kind).element_size()
        raw[name] = rng.integers(0, 2 if name == "BOOL" else 256, size, np.uint8).tobytes()
    arrays = {n: torch.frombuffer(bytearray(raw[n]), dtype=k).reshape(2, 3) for n, k in kinds.items()}
    save_file(arrays, path, metadata={"format": "pt", "note": "x"})
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {"format": "pt", "note": "x"}
    for name, tensor in checkpoint.tensors.items():
        values = tensor.read()
        assert (tensor.storage, tensor.shape) == (name, (2, 3))
        assert isinstance(values, np.ndarray)
        assert values.tobytes() == raw[name]
        if kinds[name].is_floating_point:
            expected = arrays[name].to(torch.float64).numpy()
            np.testing.assert_array_equal(values.astype(np.float64), expected, name)


@pytest.mark.parametrize("metadata", [[], "x", {"a": 1}, {"a": None}])
def test_metadata_that_is_not_text_is_refused(tmp_path: Path, metadata: Any) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": metadata or [1]}))
    with pytest.raises(CheckpointError, match=r"m.safetensors: __metadata__ is .*expected an object of strings"):
        open_checkpoint(path)


def test_rows_without_values_are_one_chunk(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"w": entry(0, 0, [1 << 40, 0])}))
    chunks = list(itertools.islice(open_checkpoint(path).tensors["w"].chunks(1024), 3))
    assert [(first, np.asarray(rows).shape) for first, rows in chunks] == [(0, (1 << 40, 0))]


# --- shards --------------------------------------------------------------------------------------------------


def write_shards(
    folder: Path, shards: dict[str, list[str]], weight_map: Any, index: str = "model.safetensors.index.json"
) -> None:
    for file, names in shards.items():
        header = {name: entry(4 * i, 4 * i + 4, [1]) for i, name in enumerate(names)}
        (folder / file).write_bytes(safetensors_bytes(header, bytes(4 * len(names))))
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json"])
def test_shards_are_opened_through_their_index(tmp_path: Path, index: str) -> None:
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    write_shards(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["c"]}, weight_map, index)
    for path in (tmp_path, tmp_path / index):
        checkpoint = open_checkpoint(path)
        assert sorted(checkpoint.tensors) == ["a", "b", "c"]
        assert [file.name for file in checkpoint.files] == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize(
    ("shards", "weight_map", "file", "message"),
    [
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "2.safetensors"}, None,
         "1 of 2 shards are missing in .*: 2.safetensors. Fetch them"),
        ({"1.safetensors": ["a"]}, {"a": "../1.safetensors"}, None, "names the shard '../1.safetensors'; a shard must"),
        ({"1.safetensors": ["a"]}, {"a": "/etc/passwd"}, None, "names the shard '/etc/passwd'; a shard must be a file"),
        ({"1.safetensors": ["a"]}, {"a": "sub/1.safetensors"}, None, "a shard must be a file beside its index"),
        ({"1.safetensors": ["a"]}, {"a": ""}, None, "names the shard ''"),
        ({"1.safetensors": ["a"]}, {"a": ".."}, None, "names the shard '..'"),
        ({"1.safetensors": ["a"]}, {"a": "."}, None, "names the shard '.'"),
        ({"1.safetensors": ["a"]}, {"a": "x" * 300}, None, "1 of 1 shards are missing"),
        ({"1.safetensors": ["a"]}, {"a": "a\0b"}, None, "1 of 1 shards are missing"),
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "1.safetensors"}, None,
         "1 tensors are not in the shards it names: b"),
        ({"1.safetensors": ["a", "b"]}, {"a": "1.safetensors"}, "1.safetensors", "holds 'b', which the index places"),
        ({"1.safetensors": ["a"], "2.safetensors": ["a", "b"]}, {"a": "1.safetensors", "b": "2.safetensors"},
         "2.safetensors", "holds 'a', which the index places in '1.safetensors'"),
        ({"1.safetensors": ["a"]}, ["a"], None, "has no `weight_map` from tensor names to file names"),
        ({"1.safetensors": ["a"]}, {"a": 1}, None, "has no `weight_map` from tensor names to file names"),
    ],
)  # fmt: skip
def test_shards_that_do_not_belong_together_are_named(
    tmp_path: Path, shards: dict[str, list[str]], weight_map: Any, file: str | None, message: str
) -> None:
    write_shards(tmp_path, shards, weight_map)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(error.value).startswith(str(tmp_path / (file or "model.safetensors.index.json")))


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"1.safetensors": ["a"]}, {})
    index = tmp_path / "model.safetensors.index.json"
    for raw in (b"{", b"[]", b"\xff\xff", b"[" * 100_000, b""):
        index.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"index.json: (cannot be read as JSON|is a JSON list)"):
            open_checkpoint(tmp_path)
    index.write_bytes(b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read as JSON \(the key 'a' stands twice\)"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a.safetensors, b.safetensors\) and no"):
        open_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"2 indexes \(a.safetensors.index.json, b.safetensors.index.json\)"):
        open_checkpoint(tmp_path)


# --- damaged and lying files ---------------------------------------------------------------------------------

WHOLE = safetensors_bytes(
    {"__metadata__": {"format": "pt"}, "a": entry(0, 24, [2, 3]), "b": entry(24, 32, [4], "F16")}, bytes(32)
)
_DEEP = b"[" * 200_000
_LONG = b"9" * 5000

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "starts with b''"),
    "short": (b"\x08\0\0\0\0\0\0", "starts with b'.*neither GGUF"),
    "header past the end": (b"\xff\0\0\0\0\0\0\0{}", "says its header has 255 bytes, but the file has 10"),
    "header length lies": (b"\xff" * 8 + b"{}", f"says its header has {(1 << 64) - 1} bytes, but the file has 10"),
    "not JSON": (safetensors_bytes(b"{'a': 1}"), "the header is not the JSON of a safetensors file"),
    "cut JSON": (safetensors_bytes(b'{"a": {"dtype'), "the header is not the JSON"),
    "bad UTF-8": (safetensors_bytes(b'{"\xff\xfe": 1}'), "the header is not the JSON"),
    "key twice": (
        safetensors_bytes(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":0}', bytes(4)),
        "the header is not the JSON of a safetensors file .the key 'a' stands twice",
    ),
    "key twice within": (
        safetensors_bytes(b'{"a":{"dtype":"F32","shape":[],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "the key 'shape' stands twice",
    ),
    "deep lists": (safetensors_bytes(b'{"a":' + _DEEP + b"}"), "the header is not the JSON"),
    "deep objects": (safetensors_bytes(b'{"a":' * 100_000), "the header is not the JSON"),
    "long number": (safetensors_bytes(b'{"a":' + _LONG + b"}"), "the header is not the JSON"),
    "lone surrogate": (safetensors_bytes(b'{"\\ud800":1}'), "expected dtype, shape and data_offsets"),
    "entry a number": (safetensors_bytes({"a": 1}), "a: expected dtype, shape and data_offsets, found 1"),
    "entry a list": (safetensors_bytes({"a": [1]}), "a: expected dtype, shape and data_offsets"),
    "entry null": (safetensors_bytes({"a": None}), "a: expected dtype, shape and data_offsets, found None"),
    "no dtype": (safetensors_bytes({"a": {"shape": [], "data_offsets": [0, 0]}}), "a: expected dtype, shape"),
    "three offsets": (safetensors_bytes({"a": entry(0, 4, [1]) | {"data_offsets": [0, 4, 8]}}), "a: expected dtype"),
    "text offsets": (safetensors_bytes({"a": entry(0, 4, [1]) | {"data_offsets": "04"}}), "a: shape .* must be int"),
    "negative offset": (safetensors_bytes({"a": entry(-4, 0, [1])}, bytes(4)), "must be integers >= 0"),
    "float offset": (safetensors_bytes({"a": entry(0, 4.0, [1])}, bytes(4)), "must be integers >= 0"),  # type: ignore[arg-type]
    "boolean size": (safetensors_bytes({"a": entry(0, 4, [True])}, bytes(4)), "must be integers >= 0"),
    "negative size": (safetensors_bytes({"a": entry(0, 4, [-1])}, bytes(4)), "must be integers >= 0"),
    "shape a number": (safetensors_bytes({"a": entry(0, 4, [1]) | {"shape": 1}}, bytes(4)), "must be integers >= 0"),
    "reversed offsets": (safetensors_bytes({"a": entry(4, 0, [1])}, bytes(4)), "a: lies at bytes"),
    "past the end": (safetensors_bytes({"a": entry(0, 8, [2])}, bytes(7)), "a: lies at bytes .* but the file has"),
    "far past the end": (safetensors_bytes({"a": entry(0, 1 << 60, [1 << 58])}), "a: lies at bytes"),
    "shape and offsets": (safetensors_bytes({"a": entry(0, 8, [3])}, bytes(8)), r"F32 of shape \[3\] takes 12 bytes"),
    "offsets and shape": (safetensors_bytes({"a": entry(0, 8, [1])}, bytes(8)), "takes 4 bytes, but data_offsets"),
    "empty shape and offsets": (safetensors_bytes({"a": entry(0, 0, [])}), r"of shape \[\] takes 4 bytes, .* give 0"),
    "overflowing shape": (safetensors_bytes({"a": entry(0, 4, [1 << 32, 1 << 32])}, bytes(4)), "a: has the shape"),
    "wrapping shape": (safetensors_bytes({"a": entry(0, 0, [1 << 62, 0, 1 << 62])}), "a: has the shape"),
    "huge zero shape": (safetensors_bytes({"a": entry(0, 0, [0, 1 << 80])}), "a: has the shape"),
    "many dimensions": (safetensors_bytes({"a": entry(0, 4, [1] * 65)}, bytes(4)), "a: has the shape .* at most 32"),
    "overlap": (
        safetensors_bytes({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)), "b overlaps a at byte 4"
    ),
    "same place": (safetensors_bytes({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, bytes(8)), "b overlaps a"),
    "dtype a list": (safetensors_bytes({"a": entry(0, 4, [1], [])}, bytes(4)), "a: dtype is .., expected a name"),
    "nested entry": (safetensors_bytes(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"), "a: expected dtype, shape"),
    "nested dtype": (
        safetensors_bytes(b'{"a":{"shape":[0],"data_offsets":[0,0],"dtype":' + b"[" * 900 + b"]" * 900 + b"}}"),
        "a: dtype is .*, expected a name",
    ),
    "header a list": (b"\x04\0\0\0\0\0\0\0{}[]", "the header is not the JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name_before_anything_is_allocated(tmp_path: Path, case: str) -> None:
    raw, message = BAD[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with peak_memory() as peak, pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(path)
    assert str(error.value).startswith(str(path))
    assert peak.nbytes < 2 << 20


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(WHOLE)
    open_checkpoint(path)
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert str(error.value).startswith(str(path)), length


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"[[[[]]]],", b'"ab",', b"1000,", b'{"a":1},'])
def test_small_things_that_are_large_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: bytes
) -> None:
    """Twice the file and 64 MiB; here 4. The largest header that is parsed at all keeps within it."""
    assert reader._MEMORY_FLOOR == 64 << 20
    monkeypatch.setattr(reader, "_MEMORY_FLOOR", 4 << 20)
    path = tmp_path / "bad.safetensors"
    for size, message in ((90_000, "expected dtype, shape"), (95_000, "would take more memory than twice the file")):
        path.write_bytes(safetensors_bytes(b'{"a":[' + filler * (size // len(filler)) + b"1]}"))
        with peak_memory() as peak, pytest.raises(CheckpointError, match=message) as error:
            open_checkpoint(path)
        assert peak.nbytes < 2 * path.stat().st_size + (4 << 20)
        assert len(str(error.value)) < 1000


# --- pickles -------------------------------------------------------------------------------------------------


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(Path.cwd() / "sprung"), "w"))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ""])
@pytest.mark.parametrize("zipped", [False, True])
def test_pickles_are_refused_with_advice_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"pytorch_model{suffix}"
    raw = pickle.dumps(_Trap())
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", raw)
    else:
        path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"pytorch_model.*: is a pickle; .*safe_serialization=True"):
        open_checkpoint(path)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(raw).close()
    assert (tmp_path / "sprung").exists()


def test_a_folder_of_pickles_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}, protocol=0))
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pickle.*Take the safetensors files of the same model"):
            open_checkpoint(path)


def test_a_header_whose_length_starts_as_a_pickle_does(tmp_path: Path) -> None:
    for length in (0x80, 0x0180, 0x0780):
        header = b'{"__metadata__":{}}'
        with (tmp_path / "a.safetensors").open("wb") as file:
            file.write(length.to_bytes(8, "little") + header)
            file.write(b" " * (length - len(header)))
        assert open_checkpoint(tmp_path / "a.safetensors").tensors == {}
