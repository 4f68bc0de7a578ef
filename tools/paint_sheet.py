"""Paints a sheet of prompts with a compiled picture bundle, one picture each, and says how long each stage took.

    python tools/paint_sheet.py bundles/emoji emoji.png "red apple" "banana" --steps 20 --guidance 3

Each picture lies beside the sheet too, in a folder of its name. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import intaglio

# Captions of the emoji painter's data, none of them picked by how it comes out.
PROMPTS = (
    *("red apple", "banana", "watermelon", "carrot", "hamburger", "pizza", "hot dog", "cat face"),
    *("dog face", "lion", "penguin", "tropical fish", "tulip", "cactus", "mushroom", "four leaf clover"),
)
_MARGIN, _TEXT, _SCALE = 8, 18, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("sheet", type=Path, help="a .png")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--columns", type=int, default=8)
    arguments = parser.parse_args()
    pipeline = intaglio.load(arguments.bundle)
    out = pipeline(
        list(arguments.prompts),
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.guidance,
        seed=arguments.seed,
    )
    folder = arguments.sheet.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for prompt, image in zip(arguments.prompts, out.images, strict=True):
        image.save(folder / f"{re.sub(r'[^a-z0-9]+', '-', prompt.lower()).strip('-') or 'empty'}.png")
    sheet(out.images, arguments.prompts, arguments.columns).save(arguments.sheet)
    seconds = ", ".join(f"{stage.replace('_', ' ')} {time:.1f} s" for stage, time in out.timings.items())
    print(f"painted {len(out.images)} pictures: {seconds}")
    print(f"{arguments.sheet}, each picture in {folder}/")
    return 0


def sheet(images: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    """Pictures of one size in rows of ``columns``, twice as large, each over its caption."""
    width, height = (side * _SCALE for side in images[0].size)
    rows = -(-len(images) // columns)
    cell = (width + _MARGIN, height + _MARGIN + _TEXT)
    result = Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN), "white")
    draw, font = ImageDraw.Draw(result), ImageFont.load_default(11)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = _MARGIN + i % columns * cell[0], _MARGIN + i // columns * cell[1]
        result.paste(image.resize((width, height), Image.Resampling.BICUBIC), (x, y))
        draw.text((x + width / 2, y + height + 2), caption, fill="black", font=font, anchor="ma")
    return result


if __name__ == "__main__":
    sys.exit(main())
