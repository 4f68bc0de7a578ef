"""Files that nobody here wrote: pyarrow's test files of old writers, matplotlib's samples."""

from __future__ import annotations

import csv
import importlib.util
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from intaglio.trainer.data.columnar import ArrowReader, ParquetReader
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.records import Damage
from intaglio.trainer.data.tars import WebDatasetReader


def _package_file(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.origin).parent.joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"this build of {package} has no {path.name}")
    return path


def _sample(*parts: str) -> Path:
    return _package_file("matplotlib", "mpl-data", "sample_data", *parts)


def test_parquet_of_an_old_writer(build: Callable[..., Loader]) -> None:
    """Written by Arrow 0.7.1; diamonds, 10 rows."""
    import pyarrow.parquet as parquet

    path = _package_file("pyarrow", "tests", "data", "parquet", "v0.7.1.parquet")
    expected = parquet.read_table(path)
    records = [item for _, item in ParquetReader((path,)).records(0)]
    assert records == expected.to_pylist()
    examples = {"kind": "numbers", "fields": ["carat", "depth"], "label": "price"}
    table = {"format": "parquet", "files": [path.name], "examples": examples, "batch_size": 5, "shuffle": False}
    batches = list(build(path.parent, table))
    found = torch.cat([batch["inputs"] for batch in batches]).numpy()
    numbers = np.stack([expected["carat"].to_numpy(), expected["depth"].to_numpy()], axis=1)
    assert np.array_equal(found, numbers.astype(np.float32))
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == expected["price"].to_pylist()


def test_feather_of_an_old_writer() -> None:
    """Written by Arrow 0.17.0 with lz4."""
    import pyarrow.feather as feather

    path = _package_file("pyarrow", "tests", "data", "feather", "v0.17.0.version.2-compression.lz4.feather")
    expected = feather.read_table(path).to_pylist()
    items = list(ArrowReader((path,)).records(0))
    assert [item for _, item in items] == expected
    half = items[len(items) // 2][0]
    assert [item for _, item in ArrowReader((path,)).records(0, half)] == expected[len(items) // 2 :]


def test_csv_of_another_package(build: Callable[..., Loader]) -> None:
    """Quotes of a share, a day a row."""
    path = _sample("msft.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["Open", "High", "Low", "Close", "Adj. Close*"]
    examples = {"kind": "numbers", "fields": names, "label": "Volume"}
    table = {"format": "csv", "files": [path.name], "examples": examples, "batch_size": 1, "shuffle": False}
    batches = list(build(path.parent, table))
    expected = np.array([[float(row[name]) for name in names] for row in rows])
    assert len(expected) > 50
    assert np.array_equal(torch.cat([batch["inputs"] for batch in batches]).numpy(), expected.astype(np.float32))
    assert [int(batch["labels"]) for batch in batches] == [int(row["Volume"]) for row in rows]


def test_npy_of_another_package(build: Callable[..., Loader]) -> None:
    path = _sample("axes_grid", "bivariate_normal.npy")
    examples = {"kind": "numbers", "fields": ["density"]}
    table = {"format": "npy", "arrays": {"density": path.name}, "examples": examples, "batch_size": 5, "shuffle": False}
    found = torch.cat([batch["inputs"] for batch in build(path.parent, table)]).numpy()
    assert np.array_equal(found, np.load(path).astype(np.float32))


def test_photos_are_what_pillow_makes_of_them(build: Callable[..., Loader], tmp_path: Path) -> None:
    photo = _sample("grace_hopper.jpg")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "photo.jpg").write_bytes(photo.read_bytes())
    examples = {"size": [64, 96], "fit": "stretch"}
    table = {"format": "image-folder", "folder": ".", "examples": examples, "batch_size": 1}
    batch = next(iter(build(tmp_path, table)))
    with Image.open(photo) as image:
        expected = np.asarray(image.resize((96, 64), Image.Resampling.LANCZOS), np.float32)
    found = batch["pixel_values"][0].permute(1, 2, 0).numpy()
    assert np.array_equal(found, np.float32(2) * (expected / np.float32(255)) - np.float32(1))


def test_samples_are_grouped_as_webdataset_groups_them(tmp_path: Path) -> None:
    """Both writer and reader of the webdataset package, where it is installed."""
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / "shard.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(7):
            writer.write({"__key__": f"folder/sample{i:03}", "txt": f"é {i}", "cls": i, "json": {"n": [i]}})
            writer.write({"__key__": f"folder/more{i:03}", "npy": np.full((2, i), i, np.float32), "seg.txt": "s"})
    theirs = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    ours = [item for _, item in WebDatasetReader((path,)).records(0)]
    assert len(ours) == len(theirs) == 14
    for mine, other in zip(ours, theirs, strict=True):
        assert not isinstance(mine, Damage)
        assert set(mine) == {name for name in other if not name.startswith("__") or name == "__key__"}
        for name, value in mine.items():
            assert np.array_equal(value, other[name]), name


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_tar_format(format_: int, tmp_path: Path) -> None:
    """Long names have headers of their own, where a sample begins."""
    folder = "folder/" * 12 + "x" * (60 if format_ == tarfile.USTAR_FORMAT else 120)
    with tarfile.open(tmp_path / "a.tar", "w", format=format_) as tar:
        for i in range(5):
            for field in ("txt", "cls"):
                member = tarfile.TarInfo(f"{folder}{i}.{field}")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"%d" % i))
    reader = WebDatasetReader((tmp_path / "a.tar",))
    items = list(reader.records(0))
    assert [item["cls"] for _, item in items if not isinstance(item, Damage)] == list(range(5))
    for i, (offset, _) in enumerate(items):
        assert list(reader.records(0, offset)) == items[i:]
