"""Readers of folders of pictures: a folder for each class, and pictures with captions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from intaglio.errors import DataError
from intaglio.trainer.data.records import IndexedReader, PositionedFile, Record

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif")
_METADATA = "metadata.jsonl"


class ImageFolderReader(IndexedReader):
    """Pictures as ``{"image": bytes, "label": number}``; label n is the n-th subfolder in order of name.

    Raises DataError where there is no subfolder, or one without a picture.
    """

    def __init__(self, folder: Path) -> None:
        self.classes = tuple(sorted(path.name for path in _listed(folder) if path.is_dir()))
        if not self.classes:
            raise DataError(f"{folder}: has no subfolders; expected one for each class, with its pictures")
        found = [_pictures(folder / name) for name in self.classes]
        for name, paths in zip(self.classes, found, strict=True):
            if not paths:
                raise DataError(f"{folder / name}: holds no picture ({', '.join(_SUFFIXES)}); remove the folder")
        self.files = tuple(path for paths in found for path in paths)
        self._labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found])

    def __len__(self) -> int:
        return len(self.files)

    def get(self, index: int) -> Record:
        return {"image": _content(self.files[index]), "label": int(self._labels[index])}

    def where(self, index: int) -> str:
        return str(self.files[index])


class CaptionFolderReader(IndexedReader):
    """Pictures as ``{"image": bytes, "text": caption}``: of each picture the ``.txt`` file of the same name.

    Where the folder has a ``metadata.jsonl``, that names picture (``file_name``) and caption, and whatever else a
    record of it holds: https://huggingface.co/docs/datasets/image_dataset#imagefolder. Raises DataError where there
    is no picture.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = folder / _METADATA
        self._metadata = PositionedFile(metadata) if metadata.is_file() else None
        if self._metadata is not None:
            self._lines = _line_places(metadata)
            self.files: tuple[Path, ...] = (metadata, *_pictures(folder))
            self._count = len(self._lines)
        else:
            pictures = _pictures(folder)
            self._pictures = pictures
            self.files = (*pictures, *(text for path in pictures if (text := path.with_suffix(".txt")).is_file()))
            self._count = len(pictures)
        if not self._count:
            raise DataError(f"{folder}: holds no picture; expected pictures with a .txt beside each, or {_METADATA}")

    def __len__(self) -> int:
        return self._count

    def get(self, index: int) -> Record:
        if self._metadata is None:
            picture = self._pictures[index]
            return {"image": _content(picture), "text": _text(picture.with_suffix(".txt"))}
        begin, end = self._lines[index]
        try:
            record = json.loads(self._metadata.read(int(begin), int(end - begin)))
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("file_name"), str):
            raise DataError("names no picture; expected an object with file_name")
        path = self.folder / record["file_name"]
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise DataError(f"names {path}, which lies outside of the folder")
        return {**record, "image": _content(path)}

    def where(self, index: int) -> str:
        if self._metadata is None:
            return str(self._pictures[index])
        return f"{self._metadata.path}, record {index + 1}"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected a folder") from error


def _pictures(folder: Path) -> tuple[Path, ...]:
    """All pictures below a folder, in order of their paths."""
    found: list[Path] = []
    for path in _listed(folder):
        if path.is_dir():
            found += _pictures(path)
        elif path.suffix.lower() in _SUFFIXES:
            found.append(path)
    return tuple(found)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name} cannot be read ({error.strerror})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise DataError(f"has no caption; expected it in {path.name} beside it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"its caption {path.name} cannot be read ({error})") from error


def _line_places(path: Path) -> np.ndarray:
    """Int64 ``[lines, 2]``: first byte of each line that is not empty, and the byte after it."""
    places, place = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                places.append((place, place + len(line)))
            place += len(line)
    return np.array(places, np.int64).reshape(-1, 2)
