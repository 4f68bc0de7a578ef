"""The same small records in every format that the trainer reads, written by other people's libraries."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = (
    "plate",
    "ink",
    "press",
    "paper",
    "line",
    "cut",
    "print",
    "proof",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
)


def texts(count: int, seed: int = 0) -> list[str]:
    """Sentences of 1 to 30 words, each with its number, so that no two are the same."""
    rng = np.random.default_rng(seed)
    return [f"{i} " + " ".join(rng.choice(WORDS, rng.integers(1, 31))) for i in range(count)]


def picture(index: int, size: int = 12) -> np.ndarray:
    """Uint8 ``[size, size, 3]``; no two are the same."""
    return np.random.default_rng([7, index]).integers(0, 256, (size, size, 3), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tokenizer(folder: Path) -> Path:
    """A small byte-level BPE with EOS, a token to pad with and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(200, 5), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return folder


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """A record a line; through gzip where the name ends so."""
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    """By the csv module."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_idx(path: Path, array: np.ndarray) -> None:
    """As http://yann.lecun.com/exdb/mnist describes it, value by value; through gzip where the name ends so."""
    code, letter = {"uint8": (8, "B"), "int32": (12, "i"), "float32": (13, "f")}[array.dtype.name]
    content = struct.pack(">BBBB", 0, 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    content += struct.pack(f">{array.size}{letter}", *array.ravel().tolist())
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_tar(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> None:
    """A WebDataset shard: a member for each field of each sample."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for i, sample in enumerate(samples):
            for field, content in sample.items():
                member = tarfile.TarInfo(f"data/{first + i:05}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


COUNT = 61
TEXT = {"kind": "text", "length": 24}
PICTURES = {
    "size": 8,
    "augmentation": {"horizontal_flip": 0.5, "vertical_flip": 0.3, "shift": 2, "rotation": 20, "crop": 0.7},
}


def write_corpora(root: Path) -> None:
    """The same 61 records in every format, as the tables of TABLES name them."""
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    varied = [text + ('\n"and, quoted"\n' if i % 5 == 0 else " é🙂") for i, text in enumerate(texts(COUNT))]
    records = [{"text": text, "x": i / 4, "y": [i, -i], "label": i % 3} for i, text in enumerate(varied)]
    halves = [records[:25], records[25:]]
    for i, half in enumerate(halves):
        write_jsonl(root / f"{i}.jsonl", half)
        write_jsonl(root / f"{i}.jsonl.gz", half)
        write_csv(root / f"{i}.csv", [{**record, "y": i} for record in half])
        table = pa.Table.from_pylist(half)
        pa.parquet.write_table(table, root / f"{i}.parquet", row_group_size=7, write_page_checksum=True)
        pa.feather.write_feather(table, root / f"{i}.feather", compression="lz4", chunksize=6)
        with pa.ipc.new_stream(root / f"{i}.arrows", table.schema) as stream:
            stream.write_table(table, max_chunksize=6)
        pngs = [png(picture(25 * i + n)) for n in range(len(half))]
        samples = [
            {"png": encoded, "txt": record["text"].encode(), "cls": str(record["label"]).encode()}
            for encoded, record in zip(pngs, half, strict=True)
        ]
        write_tar(root / f"{i}.tar", samples, 25 * i)
        write_tar(root / f"{i}.tar.gz", samples, 25 * i)
    pictures = np.stack([picture(i) for i in range(COUNT)])
    labels = np.arange(COUNT) % 3
    np.save(root / "pictures.npy", pictures)
    np.save(root / "labels.npy", labels)
    for name in ("idx", "idx.gz"):
        write_idx(root / f"pictures.{name}", pictures[..., 0])
        write_idx(root / f"labels.{name}", labels.astype(np.uint8))
    for i in range(COUNT):
        classed, captioned, listed = root / "classes" / "abc"[i % 3], root / "captions", root / "listed"
        for folder in (classed, captioned, listed):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:03}.png").write_bytes(png(picture(i)))
        (captioned / f"{i:03}.txt").write_text(texts(COUNT)[i])
    lines = [json.dumps({"file_name": f"{i:03}.png", "text": texts(COUNT)[i]}) for i in range(COUNT)]
    (root / "listed" / "metadata.jsonl").write_text("\n".join(lines))
    for i, dtype in enumerate(("uint16", "uint32")):
        tokens = np.random.default_rng(i).integers(0, 400, 700 + i).astype(dtype)
        tokens.tofile(root / f"tokens.{dtype}")
        tokens[:311].tofile(root / f"more.{dtype}")


_CAPTIONS = {"caption_length": 80, "caption_dropout": 0.3}
_STREAM = {"shuffle_buffer": 10, "examples": TEXT}
TABLES: dict[str, dict[str, Any]] = {
    "jsonl": {"format": "jsonl", "files": ["*.jsonl"], **_STREAM},
    "jsonl-gzip": {"format": "jsonl", "files": ["*.jsonl.gz"], **_STREAM},
    "jsonl-numbers": {
        "format": "jsonl",
        "files": ["*.jsonl"],
        "shuffle_buffer": 10,
        "examples": {"kind": "numbers", "fields": ["x", "y"], "label": "label"},
    },
    "csv": {"format": "csv", "files": ["*.csv"], **_STREAM},
    "csv-numbers": {
        "format": "csv",
        "files": ["*.csv"],
        "examples": {"kind": "numbers", "fields": ["x", "y"], "label": "label"},
    },
    "parquet": {"format": "parquet", "files": ["*.parquet"], **_STREAM},
    "arrow": {"format": "arrow", "files": ["*.feather"], **_STREAM},
    "arrow-stream": {"format": "arrow", "files": ["*.arrows"], **_STREAM},
    "webdataset": {
        "format": "webdataset",
        "files": ["*.tar"],
        "shuffle_buffer": 10,
        "examples": {"kind": "pictures", **PICTURES, "caption": "txt", "label": "cls", **_CAPTIONS},
    },
    "webdataset-gzip": {
        "format": "webdataset",
        "files": ["*.tar.gz"],
        "shuffle_buffer": 10,
        "examples": {"kind": "pictures", **PICTURES, "label": "cls"},
    },
    "npy": {
        "format": "npy",
        "arrays": {"image": "pictures.npy", "label": "labels.npy"},
        "examples": {"kind": "pictures", **PICTURES, "label": "label"},
    },
    "idx": {
        "format": "idx",
        "arrays": {"image": "pictures.idx", "label": "labels.idx"},
        "examples": {"kind": "pictures", **PICTURES, "label": "label"},
    },
    "idx-gzip": {
        "format": "idx",
        "arrays": {"image": "pictures.idx.gz", "label": "labels.idx.gz"},
        "shuffle_buffer": 10,
        "examples": {"kind": "pictures", **PICTURES, "label": "label"},
    },
    "image-folder": {"format": "image-folder", "folder": "classes", "examples": PICTURES},
    "image-caption-folder": {
        "format": "image-caption-folder",
        "folder": "captions",
        "examples": {**PICTURES, **_CAPTIONS},
    },
    "image-caption-metadata": {
        "format": "image-caption-folder",
        "folder": "listed",
        "examples": {**PICTURES, **_CAPTIONS},
    },
    "tokens-uint16": {"format": "tokens", "files": ["tokens.uint16", "more.uint16"], "dtype": "uint16", "length": 24},
    "tokens-uint32": {"format": "tokens", "files": ["tokens.uint32", "more.uint32"], "dtype": "uint32", "length": 24},
}
