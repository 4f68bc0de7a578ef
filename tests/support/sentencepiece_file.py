"""Writes SentencePiece model files byte by byte, so that tests need no library for it and can write wrong ones.

Source: SentencePiece `src/sentencepiece_model.proto`; the encoding of protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

Piece = tuple[str, float, int]

# What every LLaMA-like vocabulary begins with.
START: list[Piece] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
]


def varint(value: int) -> bytes:
    value %= 1 << 64  # negative ids take ten bytes
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def piece_field(piece: Piece) -> bytes:
    text, score, kind = piece
    return field(1, field(1, text.encode()) + field(2, score) + field(3, kind))


def model_file(
    pieces: Iterable[Piece],
    *,
    model_type: int = 2,
    byte_fallback: bool = True,
    add_dummy_prefix: bool = True,
    remove_extra_whitespaces: bool = False,
    trainer: bytes = b"",
    normalizer: bytes = b"",
) -> bytes:
    """A model file; `trainer` and `normalizer` are further fields of theirs, already encoded."""
    trainer_spec = field(3, model_type) + field(35, int(byte_fallback)) + trainer
    switches = field(3, int(add_dummy_prefix)) + field(4, int(remove_extra_whitespaces))
    normalizer_spec = field(1, b"identity") + switches + normalizer
    return b"".join(map(piece_field, pieces)) + field(2, trainer_spec) + field(3, normalizer_spec)
