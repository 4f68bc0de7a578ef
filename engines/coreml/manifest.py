"""The manifest of a package, which names its parts by identifiers that are digests of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "Manifest.json"
MODEL = "com.apple.CoreML/model.mlmodel"
WEIGHTS = "com.apple.CoreML/weights"
_DESCRIPTIONS = {MODEL: "CoreML Model Specification", WEIGHTS: "CoreML Model Weights"}


def write_manifest(package: Path) -> None:
    """Writes the manifest of what lies in ``Data``: the model, and weights where there are any."""
    parts = {part: package / "Data" / part for part in _DESCRIPTIONS}
    names = {part: identifier(path, part) for part, path in parts.items() if path.exists()}
    entries = {
        name: {
            "author": "com.apple.CoreML",
            "description": _DESCRIPTIONS[part],
            "name": part.rpartition("/")[2],
            "path": part,
        }
        for part, name in names.items()
    }
    said = {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": names[MODEL]}
    (package / MANIFEST).write_text(json.dumps(said, indent=4, sort_keys=True) + "\n")


def identifier(path: Path, name: str) -> str:
    """The identifier of a part: a file, or a folder of files."""
    digest = hashlib.sha256(name.encode())
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    # In the form of a UUID of version 8: made by rules of one's own.
    text = digest.hexdigest().upper()
    return f"{text[:8]}-{text[8:12]}-8{text[13:16]}-8{text[17:20]}-{text[20:32]}"
