"""JSON files that come with a checkpoint: configurations and indexes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from intaglio.errors import CheckpointError

# JSON can take thirty times its size in memory.
_MAX_BYTES = 16 << 20


def read_json(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, also for a file too large, or with a key that stands twice."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path}: has {size} bytes, expected at most {max_bytes} of JSON")
        content = json.loads(path.read_bytes(), object_pairs_hook=no_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is a JSON {type(content).__name__}, expected an object")
    return content


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: refuses an object with a key that stands twice. Raises ValueError."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result
