"""Safetensors files put together by hand, so that a test can break any byte of them."""

from __future__ import annotations

import json
from typing import Any


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A whole file; ``header`` is an object to be written as JSON, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    """A tensor of the header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
