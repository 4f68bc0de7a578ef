"""What the text chunks of a PNG say."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def read_png_text(path: str | Path) -> dict[str, str]:
    """Keywords and texts of a PNG file, in its order."""
    with Image.open(path, formats=["PNG"]) as image:
        image.load()
        return dict(image.text)  # type: ignore[attr-defined]
