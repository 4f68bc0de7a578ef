"""What is built of a stage: one file, or a folder of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def files_in(artifact: Path) -> list[Path]:
    """The file itself, or all files in the folder and below, sorted."""
    return sorted(file for file in artifact.rglob("*") if file.is_file()) if artifact.is_dir() else [artifact]


def digest(artifact: Path) -> str:
    """A hash of the names and bytes of all its files. Raises OSError."""
    found = hashlib.sha256()
    for file in files_in(artifact):
        with file.open("rb") as content:
            found.update(f"{file.relative_to(artifact).as_posix()}\0".encode())
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()


def stamps(artifact: Path) -> dict[str, tuple[int, int, int]]:
    """Bytes and times of each file, by its path. Any write moves these. Raises OSError."""
    stats = {file.relative_to(artifact.parent).as_posix(): file.stat() for file in files_in(artifact)}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()}
