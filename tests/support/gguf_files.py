"""GGUF files put together by hand, so that a test can break any byte of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

DEFAULT_ALIGNMENT = 32

Tensor = tuple[str, tuple[int, ...], int, bytes]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value: object) -> bytes:
    """A metadata pair: bool, uint32, float32 or string."""
    if isinstance(value, bool):
        return text(key) + struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    assert isinstance(value, str)
    return text(key) + struct.pack("<I", 8) + text(value)


def info(name: str, shape: Sequence[int], type_id: int, offset: int) -> bytes:
    """An entry of the tensor list; ``shape`` is row-major."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), type_id, offset)


def start(tensors: int, pairs: int, version: int = 3) -> bytes:
    """The first 24 bytes."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def padded(data: bytes, alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    return data + bytes(-len(data) % alignment)


def gguf_bytes(metadata: Mapping[str, object], tensors: Sequence[Tensor], version: int = 3) -> bytes:
    """A whole file; each tensor is ``(name, shape, type id, bytes)``."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    header = start(len(tensors), len(metadata), version) + b"".join(pair(k, v) for k, v in metadata.items())
    data = b""
    for name, shape, type_id, raw in tensors:
        header += info(name, shape, type_id, len(data))
        data += padded(raw, alignment)
    return padded(header, alignment) + data
