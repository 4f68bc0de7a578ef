"""What data is, in a hash and in words, so that a run is not resumed on other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from intaglio.errors import DataError

# Bytes that are hashed at each end of a file, and files of which they are.
_END_BYTES = 64 << 10
_FILES = 256


def fingerprint(files: tuple[Path, ...], root: Path, settings: Mapping[str, Any]) -> str:
    """SHA-256 over the settings, name and size of each file, and both ends of up to 256 of them, evenly spread.

    Names are relative to ``root`` where they lie below it, so that a folder may be moved. Raises DataError for a file
    that cannot be read.
    """
    found = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode())
    step = -(-len(files) // _FILES)
    for i, path in enumerate(files):
        try:
            size = path.stat().st_size
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
            found.update(json.dumps([name, size]).encode())
            if i % step == 0:
                with path.open("rb") as file:
                    found.update(file.read(_END_BYTES))
                    file.seek(max(size - _END_BYTES, _END_BYTES))
                    found.update(file.read(_END_BYTES))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return found.hexdigest()


def described(files: tuple[Path, ...], kind: str) -> str:
    """The data in a few words, for messages."""
    size = sum(path.stat().st_size for path in files)
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{kind} data of {size} bytes, {files[0]}{more}"
